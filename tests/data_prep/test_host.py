"""What the ranks of a host share: one check for all, one sentence, and nothing that a killed job has left counts."""

import os
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep import guard
from data_prep.guard import DataError
from data_prep.heldout import EvalReader
from data_prep.host import host_folder, once_per_host
from data_prep.loader import TrainLoader
from data_prep.scratch import Scratch
from recipes.errors import UserError
from tests.data_prep.rig import CONTEXT, numbered, read_steps, run_ranks, write_split

NUMBERS = {"global_batch": 4, "micro_batch": 1, "seed": 7, "timeout_seconds": 30.0}
COUNT = 60  # sequences of each split, in shards of 5


@pytest.fixture
def shards(tmp_path) -> Path:
    for name in ("train", "heldout"):
        write_split(tmp_path / "shards" / name, numbered(COUNT))
    return tmp_path / "shards"


def looks_of(program, *arguments) -> tuple[object, list[str]]:
    """What a program returns, and the shards that this process checked in it."""
    real, seen = guard._check_shard, []

    def look(folder, shard, verify_hashes):
        seen.append(f"{folder.name}/{shard['raw_data']['basename']}")
        real(folder, shard, verify_hashes)

    guard._check_shard = look
    try:
        return program(*arguments), seen
    finally:
        guard._check_shard = real


def train_and_evaluate(shards, temp_dir):
    with TrainLoader(shards, temp_dir=temp_dir, **NUMBERS) as loader:
        read_steps(loader, 2)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        reader = EvalReader(shards, micro_batch=1, dp_rank=rank, dp_size=world, scratch=loader.scratch)
        read = [[batch.sample_ids for batch in reader] for _ in range(3)]
        assert read[0] == read[1] == read[2]
        read_steps(loader, 10)
        time.sleep(1)  # nobody is gone before everybody has asked
        return sum(sum(read[0], []), 0)


def counted(shards, temp_dir):
    """Rank program: what was read, and which shards this rank has checked for it."""
    return looks_of(train_and_evaluate, shards, temp_dir)


def test_each_shard_is_checked_once_for_all_ranks_and_evaluations(shards, tmp_path):
    outcomes, _ = run_ranks(4, counted, shards, str(tmp_path / "job"))
    assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
    assert sum(total for total, _ in outcomes) == sum(range(COUNT))
    looked = sorted(sum((seen for _, seen in outcomes), []))
    assert looked == sorted(f"{p.parent.name}/{p.name}" for p in shards.rglob("*.mds"))
    assert not (tmp_path / "job").exists()


def open_and_wait(shards, temp_dir, sound_after=None):
    """Rank program: the error of opening; with `sound_after` the damage is there for the first who looks only."""
    if sound_after is not None:
        real = guard._check_shard

        def look(folder, shard, verify_hashes):
            try:
                os.close(os.open(sound_after, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return real(folder, shard, verify_hashes)
            time.sleep(1)  # the others come meanwhile, and wait
            raise DataError(f"shard {shard['raw_data']['basename']} flickers")

        guard._check_shard = look
    try:
        with TrainLoader(shards, temp_dir=temp_dir, **NUMBERS):
            return "opened"
    except DataError as error:
        time.sleep(1)
        return str(error)


@pytest.mark.parametrize("flickers", [False, True])
def test_damage_is_the_same_sentence_on_every_rank(shards, tmp_path, flickers):
    if flickers:
        outcomes, _ = run_ranks(4, open_and_wait, shards, str(tmp_path / "job"), str(tmp_path / "flag"))
    else:
        os.truncate(shards / "train/shard.00007.mds", 30)
        outcomes, _ = run_ranks(4, open_and_wait, shards, str(tmp_path / "job"))
    assert len(set(outcomes)) == 1 and ("flickers" if flickers else "shard.00007.mds has 30 bytes") in outcomes[0]
    assert not (tmp_path / "job").exists()


# ---- verdicts


def give_verdict(folder, said, then_wait):
    said.put(once_per_host(folder, "x", lambda: {"by": os.getpid()}))
    if then_wait:
        time.sleep(600)


def check_for_ever(folder, said):
    def check():
        said.put("checking")
        time.sleep(600)
        return {}

    once_per_host(folder, "x", check)


def started(program, *arguments):
    said = CONTEXT.Queue()
    process = CONTEXT.Process(target=program, args=(*arguments[:1], said, *arguments[1:]))
    process.start()
    return process, said.get(timeout=60)


def test_verdict_lives_as_long_as_the_process_that_gave_it(tmp_path):
    process, given = started(give_verdict, tmp_path, True)
    assert once_per_host(tmp_path, "x", dict) == given == {"by": process.pid}
    assert once_per_host(tmp_path, "y", lambda: {"another": "name"}) == {"another": "name"}
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert once_per_host(tmp_path, "x", lambda: {"by": "me"}) == {"by": "me"}


def test_another_process_of_the_same_number_is_told_apart(tmp_path):
    once_per_host(tmp_path, "x", lambda: {"old": True})
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace(f"[{os.getpid()}, ", f'[{os.getpid()}, "1", '))
    assert once_per_host(tmp_path, "x", lambda: {"old": False}) == {"old": False}
    for garbage in ("", "[]", '{"process": 1}', '{"process": [1, "x"]}'):
        file.write_text(garbage)
        assert once_per_host(tmp_path, "x", lambda: {"garbage": False}) == {"garbage": False}


def test_process_killed_while_it_checks_blocks_nobody(tmp_path):
    process, said = started(check_for_ever, tmp_path)
    assert said == "checking"
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    assert once_per_host(tmp_path, "x", lambda: {"by": "me"}) == {"by": "me"}
    assert time.monotonic() - began < 10
    process.join(60)


@pytest.mark.parametrize("kind", [DataError, UserError, PermissionError])
def test_errors_keep_their_kind_and_sentence(tmp_path, kind):
    def fail():
        raise kind("one sentence")

    with pytest.raises(kind, match="^one sentence$"):
        once_per_host(tmp_path, "x", fail)
    with pytest.raises((kind, OSError), match="^one sentence$"):
        once_per_host(tmp_path, "x", dict)


def come_and_go(folder, said):
    """Enter and leave a job's folder over and over, always asking for a verdict inside."""
    for number in range(150):
        scratch = Scratch(folder)
        try:
            once_per_host(scratch.folder, f"{number % 3}", dict)
        except Exception as error:
            said.put(repr(error))
            return
        scratch.close()
    said.put("done")


def test_folder_is_not_removed_under_one_who_has_just_come(tmp_path):
    said = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=come_and_go, args=(str(tmp_path / "job"), said)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [said.get(timeout=60) for _ in processes] == ["done"] * 3
    for process in processes:
        process.join(60)
    assert not (tmp_path / "job").exists()


def test_folder_that_is_removed_while_it_is_made(tmp_path, monkeypatch):
    """pathlib's `exist_ok` raises when what it found there has gone before its second look."""
    make, calls = Path.mkdir, []

    def mkdir(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 1:
            raise FileExistsError(path)
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    scratch = Scratch(str(tmp_path / "job"))
    assert scratch.folder.is_dir() and len(calls) > 1
    scratch.close()


# ---- the folder of a host


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_folder_lies_on_the_host_and_belongs_to_one_run(temporary, tmp_path, monkeypatch):
    found = host_folder(tmp_path / "run")
    assert found.is_relative_to(temporary) and not (tmp_path / "run").exists()
    assert found.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {host_folder(name) for name in ("run", "~/run", str(tmp_path / "link"))} == {found}
    assert host_folder("other") != found


def test_folder_that_somebody_else_has_taken_is_refused(temporary, tmp_path):
    mine = host_folder("run").parent
    mine.chmod(0o777)
    with pytest.raises(UserError, match="set TMPDIR to a folder of your own"):
        host_folder("run")
    mine.rmdir()
    mine.symlink_to(tmp_path)
    with pytest.raises(UserError, match="set TMPDIR to a folder of your own"):
        host_folder("run")


def test_run_directory_holds_neither_cache_nor_lock_files(shards, temporary, tmp_path):
    """The cache and the job's folder of a recipe that names none, for training and for what comes after it."""
    from launch.run_directory import RunDirectory, find_shards
    from launch.train import Trainer
    from recipes.schema import DataConfig, Recipe

    (shards / "tokenizer").mkdir()
    (shards / "manifest.json").write_text('{"splits": {"train": {}, "heldout": {}}}')
    run, url = tmp_path / "run", f"file://{shards}"
    trainer = SimpleNamespace(recipe=Recipe(run_dir=str(run), data=DataConfig(shards=url)))
    opened = Trainer._open_shards(trainer, url)
    directory = RunDirectory(run, rank=1)
    directory.close()
    (run / "recipe.yaml").write_text(f"data: {{shards: '{url}'}}")
    assert find_shards(run) == opened.path
    assert opened.path.is_relative_to(host_folder(run)) and directory.temp.parent == host_folder(run).parent
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["logs"]
