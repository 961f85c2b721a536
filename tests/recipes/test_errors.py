"""Rooms raise UserError for what a person can act on, and a bare exception of Python's only among themselves."""

import ast
import builtins

import pytest

from tests.distributed import ROOT

ROOMS = ("launch", "megatron_ext", "recipes", "data_prep")
# caught by the same room, or a fault of the code that calls
OURS = {
    ("data_prep/loader.py", "RuntimeError"),
    ("data_prep/prefetch.py", "RuntimeError"),
    ("data_prep/prefetch.py", "TimeoutError"),
    ("data_prep/pool.py", "RuntimeError"),
    ("data_prep/corpus.py", "OSError"),
    ("data_prep/tokenizer.py", "OSError"),
    ("launch/failures.py", "RuntimeError"),
}
LEAVES_WITH_THE_MODEL = "megatron_ext/hugging_face/modeling_longpitch.py"  # beside exported weights, without us
PROGRAMMER = {"NotImplementedError", "AssertionError", "StopIteration", "SystemExit"}


def raised(tree: ast.Module) -> set[str]:
    """Names of Python's own exceptions that the code raises or returns anew."""
    made = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    made += [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    names = {one.func.id for one in made if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    kinds = {name: getattr(builtins, name, None) for name in names}
    return {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseException)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_raises_user_errors(room):
    found = set()
    for path in sorted((ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name != LEAVES_WITH_THE_MODEL:
            found |= {(name, kind) for kind in raised(ast.parse(path.read_text())) - PROGRAMMER}
    assert found <= OURS, "raise recipes.errors.UserError for what a person can act on"


def test_what_is_raised_is_seen():
    assert raised(ast.parse("def f():\n    raise ValueError(3)\ndef g():\n    return OSError()")) == {
        "ValueError",
        "OSError",
    }
