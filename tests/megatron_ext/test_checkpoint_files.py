"""Damaged checkpoints are told from whole ones, nobody's files are removed, and no kill leaves a folder for good."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint import check_trained
from megatron_ext.checkpoint_files import (
    MARK,
    CheckpointError,
    complete_checkpoints,
    damage,
    find,
    make_room,
    newest_whole,
    publish,
    remove_old,
    sweep,
)


def whole(folder: Path, number: int) -> Path:
    """A checkpoint with two files, as ranks 0 and 1 have written them."""
    partial = make_room(folder, number)
    assert partial is not None
    for name in ("state/part_0", "state/part_1", "random_rank_0.pt"):
        (partial / name).write_text("12345")
    publish(partial, folder / f"step_{number}", {"files": [{"state/part_0": 5}, {"state/part_1": 5}]})
    return folder / f"step_{number}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["missing", "short", "long", "no list", "no json"])
def damaged(request, tmp_path) -> tuple[Path, str]:
    """Three steps, of which the newest is damaged, and what is said of it."""
    for number in (3, 6, 9):
        newest = whole(tmp_path, number)
    file, mark = newest / "state" / "part_1", newest / MARK
    if request.param == "missing":
        file.unlink()
        return newest, "its state/part_1 is missing"
    if request.param in ("short", "long"):
        file.write_text("1" * (3 if request.param == "short" else 8))
        return newest, f"its state/part_1 has {3 if request.param == 'short' else 8} bytes and not 5"
    mark.write_text("[]" if request.param == "no list" else '{"files"')
    return newest, f"its {MARK} cannot be read ("


def test_a_checkpoint_is_complete_the_moment_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda old, new: seen.append((old / MARK).exists()) or rename(old, new))
    assert damage(whole(tmp_path, 3)) is None
    assert seen == [True] and names(tmp_path) == ["step_3"]


def test_damage_is_named_and_an_older_one_found(damaged):
    newest, what = damaged
    assert (damage(newest) or "").startswith(what)
    found, said = newest_whole(newest.parent)
    assert found == newest.parent / "step_6"
    assert len(said) == 1 and said[0].startswith(f"{newest} is damaged: {what}")
    assert newest_whole(newest.parent, before=found) == (newest.parent / "step_3", [])


def test_reading_a_damaged_one_points_to_the_one_before(damaged, tmp_path):
    newest, what = damaged
    run = tmp_path / "run"
    run.mkdir()
    shutil.move(tmp_path / "step_6", run / "step_6")
    shutil.move(newest, run / newest.name)
    run.rename(tmp_path / "checkpoints")
    for path in (tmp_path, tmp_path / "checkpoints" / newest.name):
        with pytest.raises(CheckpointError, match=r"restore it, or name .*step_6, which is whole") as caught:
            find(path)
        assert what in str(caught.value)
    assert find(tmp_path / "checkpoints" / "step_6").name == "step_6"


def test_a_damaged_step_is_saved_again_and_kept(damaged):
    newest, _ = damaged
    before = {path.name: path.read_bytes() for path in newest.rglob("*") if path.is_file()}
    for number in ("", "_2"):
        whole(newest.parent, 9)
        assert damage(newest) is None
        aside = newest.parent / f"step_9.damaged{number}"
        if not number:
            assert {path.name: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == before
        (newest / "state" / "part_0").unlink()
    assert aside.is_dir() and newest not in newest_whole(newest.parent)


def test_a_whole_step_is_not_written_again(tmp_path):
    whole(tmp_path, 3)
    assert make_room(tmp_path, 3) is None
    assert names(tmp_path) == ["step_3"]


@pytest.mark.parametrize(("file", "left"), [("random_rank_3.pt", []), ("notes.txt", ["step_3.damaged"])])
def test_folder_without_its_mark_is_replaced(tmp_path, file, left):
    """One with somebody's own file in it is set aside."""
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / file).write_text("mine")
    whole(tmp_path, 3)
    assert names(tmp_path) == ["step_3", *left]


def test_damaged_ones_do_not_count_among_those_kept(damaged):
    newest, _ = damaged
    whole(newest.parent, 12)
    remove_old(newest.parent, 2)
    assert names(newest.parent) == ["step_12", "step_6", "step_9"]


def test_kill_in_the_middle_of_a_removal(tmp_path, monkeypatch):
    """Wherever it strikes, no half folder counts, and the next save removes it."""

    class Killed(BaseException):
        pass

    def die(path: Path, **_options) -> None:
        if path.exists():
            (path / "state" / "part_0").unlink()
            raise Killed

    for number in (3, 6):
        whole(tmp_path, number)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Killed):
            remove_old(tmp_path, 1)
    assert complete_checkpoints(tmp_path) == [tmp_path / "step_6"] and len(names(tmp_path)) == 2
    whole(tmp_path, 9)
    remove_old(tmp_path, 2)
    assert names(tmp_path) == ["step_6", "step_9"]


def test_sweeping_removes_only_what_is_ours_and_old(tmp_path):
    whole(tmp_path, 6)
    for name in ("step_3/state", "step_4/notes", "step_9/state", ".step_8.partial/state", ".step_2.removed/state",
                 "step_6.damaged/state", "step_5_copy/state", ".step_x.partial"):  # fmt: skip
        (tmp_path / name).mkdir(parents=True)
    sweep(tmp_path)
    assert names(tmp_path) == [".step_x.partial", "step_4", "step_5_copy", "step_6", "step_6.damaged", "step_9"]


def test_sweeping_a_folder_without_a_complete_checkpoint(tmp_path):
    (tmp_path / "step_3" / "state").mkdir(parents=True)
    sweep(tmp_path)
    sweep(tmp_path / "absent")
    assert names(tmp_path) == ["step_3"]


# what trains

TRAINED = {"a": {"shape": [2, 2], "decays": True}, "b": {"shape": [2], "decays": False}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"a": TRAINED["a"]}, "b was trained in it and is frozen in the recipe"),
        (TRAINED | {"c": TRAINED["b"]}, "c was frozen in it and trains in the recipe"),
        ({"c": TRAINED["a"], "b": TRAINED["b"]}, r"c was frozen in it and trains in the recipe \(and 1 more differ\)"),
        (TRAINED | {"b": {"shape": [3], "decays": False}}, r"b is \{'shape': \[2\]"),
        (TRAINED | {"a": {"shape": [2, 2], "decays": False}}, "a is .*'decays': True"),
        ({"b": TRAINED["b"], "a": TRAINED["a"]}, "in another order"),
    ],
)
def test_what_trains_must_be_what_trained(tmp_path, now, said):
    facts = json.loads(json.dumps({"trained": TRAINED}))
    check_trained(tmp_path, facts, dict(TRAINED))
    check_trained(tmp_path, {}, now)
    with pytest.raises(CheckpointError, match=f"{said}.*set train.freeze and train.train_only back, or start another"):
        check_trained(tmp_path, facts, now)
