"""What each room may import, and who talks to process groups: read off the import statements of every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("kernels", "megatron_ext", "recipes", "data_prep", "launch")
MAY_IMPORT = {
    "kernels": set(),
    "megatron_ext": {"kernels", "recipes"},
    "recipes": {"kernels.limits"},
    "data_prep": {"recipes"},
    "launch": {"kernels", "megatron_ext", "recipes", "data_prep"},
}
# beside megatron_ext/parallel: the ranks' messages to one another when a collective has failed, through their store
ASK_THE_STORE = {"launch/peers.py", "launch/failures.py"}


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """Full names of what `file` imports, wherever in it: `from a import b` is a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room):
    allowed = {room} | MAY_IMPORT[room]
    for file in files_of(room):
        for name in imported(file):
            of_ours = any(within(name, other) for other in ROOMS)
            assert not of_ours or any(within(name, one) for one in allowed), f"{file} imports {name}"


def test_process_groups_are_for_one_folder():
    for file in (file for room in ROOMS for file in files_of(room)):
        place = file.relative_to(ROOT).as_posix()
        if not place.startswith("megatron_ext/parallel/") and place not in ASK_THE_STORE:
            assert not [name for name in imported(file) if within(name, "torch.distributed")], file


def test_launch_calls_no_collective_of_torch():
    """Where it imports torch.distributed, it is for the store."""
    for file in files_of("launch"):
        called = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
        }
        known = {"Store", "TCPStore", "PrefixStore", "distributed_c10d", "is_initialized", "get_rank", "get_world_size"}
        assert called <= known, f"{file}: {called - known}"
