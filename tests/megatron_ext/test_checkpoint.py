"""Only complete checkpoints count, the newest is the highest step, and a layout that cannot read one is told so."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext import checkpoint
from megatron_ext.checkpoint import layout_facts, needs_universal, save, universal_form
from megatron_ext.checkpoint_files import (
    MARK,
    CheckpointError,
    complete_checkpoints,
    find,
    newest_whole,
    read_facts,
)


def step(folder: Path, name: str, mark: str | None = "{}") -> Path:
    """A step folder, with a mark or without."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "weights").write_text("w")
    if mark is not None:
        (path / MARK).write_text(mark)
    return path


def newest(folder: Path) -> Path | None:
    return newest_whole(folder)[0]


# which checkpoints there are


def test_order_is_by_number(tmp_path):
    for number in (100, 9, 10):
        step(tmp_path, f"step_{number}")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]
    assert newest(tmp_path) == tmp_path / "step_100"


def test_incomplete_ones_do_not_exist(tmp_path):
    step(tmp_path, "step_9")
    step(tmp_path, "step_20", mark=None)
    step(tmp_path, ".step_30.partial")
    (step(tmp_path, "step_40", mark=None) / f"{MARK}.partial").write_text("{}")
    assert newest(tmp_path) == tmp_path / "step_9"


def test_none(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_folders_with_other_names_are_left_alone(tmp_path):
    step(tmp_path, "step_9")
    step(tmp_path, "step_9_copy")
    assert newest(tmp_path) == tmp_path / "step_9"


def test_find(tmp_path):
    old, new = step(tmp_path / "checkpoints", "step_9"), step(tmp_path / "checkpoints", "step_10")
    assert find(tmp_path) == find(str(tmp_path)) == new
    assert find(old) == old


@pytest.mark.parametrize("path", ["", "absent", "checkpoints/step_9"])
def test_find_refuses_what_is_not_complete(tmp_path, path):
    step(tmp_path / "checkpoints", "step_9", mark=None)
    with pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        find(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)


def test_read_facts(tmp_path):
    facts = {"step": 9, "tokens": 90, "layout": {"world": 1}, "model": {}}
    assert read_facts(step(tmp_path, "step_9", json.dumps(facts))) == facts | {"tokenizer": None}


@pytest.mark.parametrize("mark", ["", '{"step": 9', "step 9", None], ids=["empty", "cut", "no-json", "absent"])
def test_damaged_mark_names_the_checkpoint(tmp_path, mark):
    damaged = step(tmp_path, "step_9", mark)
    with pytest.raises(CheckpointError, match=MARK) as caught:
        read_facts(damaged)
    assert str(damaged) in str(caught.value)


def test_mark_that_is_no_text(tmp_path):
    damaged = step(tmp_path, "step_9")
    (damaged / MARK).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=MARK):
        read_facts(damaged)


@pytest.mark.parametrize("mark", ["[]", "{}", '{"step": 9}'])
def test_mark_that_holds_something_else(tmp_path, mark):
    with pytest.raises(CheckpointError, match=MARK):
        read_facts(step(tmp_path, "step_9", mark))


# which layout can read which


def layout(world: int = 4, tensor: int = 1, context: int = 1) -> SimpleNamespace:
    """What the decision looks at."""
    return SimpleNamespace(world=world, tensor=tensor, context=context)


def facts(zero_stage: int, **shape: int) -> dict:
    return {"step": 9, "layout": layout_facts(layout(**shape), zero_stage)}


def test_layout_facts_survive_json():
    saved = layout_facts(layout(world=8, tensor=2, context=4), 3)
    assert json.loads(json.dumps(saved)) == {"world": 8, "tensor": 2, "context": 4, "zero_stage": 3}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_layout_is_read_directly(stage):
    assert needs_universal(facts(stage), layout(), stage) is False


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_other_world_is_converted(stage, world):
    assert needs_universal(facts(stage), layout(world=world), stage) is True


def test_stage_0_is_whole_on_every_rank():
    assert needs_universal(facts(0), layout(world=8), 0) is False


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_context_and_data_ranks_shard_alike(stage):
    """ZeRO shards over data x context: only their product counts."""
    assert needs_universal(facts(stage, context=4), layout(context=2), stage) is False


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("world", [4, 2])
def test_stages_1_and_2_read_each_other(saved, now, world):
    assert needs_universal(facts(saved), layout(world=world), now) is True


@pytest.mark.parametrize(
    ("saved", "now"), [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (1, 3), (2, 3), (3, 1), (3, 2)]
)
@pytest.mark.parametrize("world", [4, 2])
def test_other_stages_are_refused(saved, now, world):
    with pytest.raises(CheckpointError, match=f"zero_stage {saved}, which stage {now} cannot read"):
        needs_universal(facts(saved), layout(world=world), now)


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (4, 2)])
def test_other_tensor_ranks_are_refused(saved, now):
    with pytest.raises(CheckpointError, match=rf"parallel\.tensor {saved} and this run has {now}"):
        needs_universal(facts(1, tensor=saved), layout(tensor=now), 1)


# saving, with a stand-in for what DeepSpeed writes


class FileWriter:
    """Writes one file where DeepSpeed would write its shards; dies there when told to."""

    def __init__(self, killed: bool = False):
        self.killed, self.saves, self.checkpoint_engine = killed, 0, None

    def save_checkpoint(self, folder: str, *, tag: str, client_state: dict, save_latest: bool) -> None:
        self.saves += 1
        self.checkpoint_engine.save(client_state, f"{folder}/{tag}/shard")
        if self.killed:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    """The stand-in has no optimizer whose state could be summed up."""
    monkeypatch.setattr(checkpoint, "_held", lambda _engine: [1, 2])


FACTS = {"tokens": 30, "layout": {"world": 1}, "model": {"kind": "m"}}


def save_step(alone, folder: Path, number: int, *, keep: int = 2, writer: FileWriter | None = None) -> Path:
    engine = SimpleNamespace(layout=alone, deepspeed=writer or FileWriter())
    return save(engine, folder, step=number, facts=FACTS, client={"n": number}, keep=keep)


def test_saved_checkpoint_is_complete(alone, tmp_path):
    saved = save_step(alone, tmp_path, 3)
    assert newest(tmp_path) == saved == tmp_path / "step_3"
    files = {name: (saved / name).stat().st_size for name in ("state/shard", "random_rank_0.pt")}
    assert read_facts(saved) == {"step": 3, "tokenizer": None, "files": [files], "held": [[1, 2]]} | FACTS
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]
    assert not list(saved.rglob("*.partial"))


def test_only_the_newest_are_kept(alone, tmp_path):
    for number in (8, 9, 10, 11):
        save_step(alone, tmp_path, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]


def test_kill_during_a_save_leaves_the_one_before(alone, tmp_path):
    save_step(alone, tmp_path, 3, keep=1)
    with pytest.raises(KeyboardInterrupt):
        save_step(alone, tmp_path, 4, keep=1, writer=FileWriter(killed=True))
    assert newest(tmp_path) == tmp_path / "step_3"
    save_step(alone, tmp_path, 4, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_kill_before_the_mark_is_saved_again(alone, tmp_path):
    step(tmp_path, "step_4", mark=None)
    saved = save_step(alone, tmp_path, 4)
    assert newest(tmp_path) == saved
    assert not (saved / "weights").exists()


def test_complete_step_is_not_written_twice(alone, tmp_path):
    save_step(alone, tmp_path, 3)
    writer = FileWriter()
    assert save_step(alone, tmp_path, 3, writer=writer) == tmp_path / "step_3"
    assert writer.saves == 0


# conversion


@pytest.fixture
def two_ranks(monkeypatch):
    """Calls a function of the rank on two threads, whose barrier waits 0.3 s and where a converter takes 1 s.

    Returns what the ranks returned or raised; the converter raises what `fails` holds.
    """
    barrier, calls, fails = threading.Barrier(2), [], []

    def convert(folder: Path, tag: str) -> None:
        calls.append(folder)
        (folder / f"{tag}_universal").mkdir()
        time.sleep(1.0)
        if fails:
            raise fails[0]

    def outcome(function, rank: int):
        try:
            return function(rank)
        except (OSError, ValueError, threading.BrokenBarrierError) as error:
            return error

    def run(function) -> list:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda rank: outcome(function, rank), (0, 1)))

    monkeypatch.setattr(checkpoint, "barrier", lambda: barrier.wait(0.3))
    monkeypatch.setattr(checkpoint, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(checkpoint.deepspeed_compat, "convert_to_universal", convert)
    return SimpleNamespace(run=run, calls=calls, fails=fails)


def test_long_conversion_meets_no_collective_and_is_kept(two_ranks, tmp_path):
    """What an earlier conversion left half done does not count; what it finished does."""
    (tmp_path / "state_universal" / "half").mkdir(parents=True)
    target = tmp_path / "state_universal"
    assert two_ranks.run(lambda rank: universal_form(tmp_path, rank=rank)) == [target, target]
    assert [path.name for path in target.iterdir()] == [MARK]
    assert two_ranks.run(lambda rank: universal_form(tmp_path, rank=rank)) == [target, target]
    assert two_ranks.calls == [tmp_path]


def test_failed_conversion_ends_every_rank(two_ranks, tmp_path):
    two_ranks.fails.append(OSError("No space left on device"))
    first, second = two_ranks.run(lambda rank: universal_form(tmp_path, rank=rank))
    assert first is two_ranks.fails[0]
    assert isinstance(second, CheckpointError) and "rank 0 could not convert" in str(second)
    assert "No space left" in str(second)


def test_wait_for_a_conversion_ends(two_ranks, tmp_path):
    _, second = two_ranks.run(lambda rank: universal_form(tmp_path, rank=rank, limit_seconds=0.2))
    assert isinstance(second, CheckpointError) and "after 0.2 s; is the folder on a shared disk?" in str(second)
