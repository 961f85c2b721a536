"""The training loader: one order for every layout, exact resume, and one error for every failure.

A split whose sequence i holds only i shows which sequences a rank received, and in which order.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming.base.partition import get_partitions

from data_prep import loader as loader_module
from data_prep.guard import DataError
from data_prep.loader import LONGEST_TEMPORARY_FOLDER, TrainLoader
from recipes.errors import UserError
from tests.data_prep.rig import global_batches, numbered, read_and_state, read_steps, run_ranks, write_split

COUNT, BATCH, STEPS = 103, 4, 55  # 103 sequences: 25 steps an epoch, 3 sequences left over
STEPS_PER_EPOCH = COUNT // BATCH
NUMBERS = {"global_batch": BATCH, "seed": 7, "timeout_seconds": 30.0}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    write_split(folder / "train", numbered(COUNT))
    return folder


def alone(shards, steps=STEPS, state=None, **numbers):
    with TrainLoader(shards, **({"micro_batch": 1} | NUMBERS | numbers)) as loader:
        if state:
            loader.load_state_dict(state)
        return read_steps(loader, steps), loader.state_dict()


@pytest.fixture(scope="module")
def order(shards):
    """The global batches of one process without workers, in steps."""
    return alone(shards)[0]


def test_an_epoch_has_no_sequence_twice(order):
    for first in (0, STEPS_PER_EPOCH):
        epoch = sum(order[first : first + STEPS_PER_EPOCH], [])
        assert len(set(epoch)) == len(epoch) == STEPS_PER_EPOCH * BATCH
    assert order[:STEPS_PER_EPOCH] != order[STEPS_PER_EPOCH : 2 * STEPS_PER_EPOCH]


def test_seed_and_shuffle_decide_the_order(shards, order):
    assert alone(shards, 10)[0] == order[:10]
    assert alone(shards, 10, seed=8)[0] != order[:10]
    plain = sum(alone(shards, STEPS_PER_EPOCH, shuffle=False)[0], [])
    assert plain == sorted(plain) and len(plain) == 100


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_workers_and_micro_batches_do_not_change_the_order(shards, order, workers, micro_batch):
    steps, state = alone(shards, num_workers=workers, micro_batch=micro_batch)
    assert steps == order
    assert (state["epoch"], state["samples_in_epoch"]) == (2, 5 * BATCH)


LAYOUTS = [(2, 1, 1, 0), (2, 1, 2, 2), (4, 1, 1, 1), (4, 2, 2, 0), (4, 4, 1, 0), (2, 2, 4, 1)]


def run_layout(shards, tmp_path, layout, steps, state=None, **numbers):
    """Global batches and the state afterwards of (world, replication, micro_batch, workers)."""
    world, replication, micro_batch, workers = layout
    numbers = NUMBERS | {"replication": replication, "micro_batch": micro_batch, "num_workers": workers} | numbers
    outcomes, _ = run_ranks(world, read_and_state, shards, steps, state, str(tmp_path / "job"), numbers)
    assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
    assert not (tmp_path / "job").exists()
    states = [state for _, state in outcomes]
    assert states == states[:1] * world
    return global_batches([steps for steps, _ in outcomes], replication), states[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_replicas_do_not_change_the_global_batches(shards, order, tmp_path, layout):
    got, _ = run_layout(shards, tmp_path, layout, STEPS)
    assert got == [sorted(step) for step in order]


@pytest.mark.parametrize("stop", [0, 1, 7, 24, 25, 26, 49, 50])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_anywhere(shards, order, stop, workers):
    before, state = alone(shards, stop, num_workers=workers)
    after, end = alone(shards, STEPS - stop, state, num_workers=2 - workers)
    assert before + after == order
    assert end == alone(shards)[1]


@pytest.mark.parametrize(("before", "after"), [((1, 1, 4, 0), (4, 1, 1, 0)), ((4, 2, 1, 1), (2, 1, 2, 0))])
@pytest.mark.parametrize("stop", [7, 25])
def test_resume_on_another_layout(shards, order, tmp_path, before, after, stop):
    _, state = run_layout(shards, tmp_path, before, stop)
    got, _ = run_layout(shards, tmp_path, after, 40 - stop, state)
    assert got == [sorted(step) for step in order[stop:40]]


def test_reading_ahead_is_not_counted(shards, order):
    """A step that was begun but not finished is begun again."""
    with TrainLoader(shards, micro_batch=1, **NUMBERS) as loader:
        read_steps(loader, 3)
        next(loader), next(loader)
        state = loader.state_dict()
    assert state["samples_in_epoch"] == 3 * BATCH
    assert alone(shards, 5, state)[0] == order[3:8]


@pytest.mark.parametrize("canonical", [1, 2, 4])
def test_nodes_do_not_change_the_global_batches(canonical):
    """The library's partition under our trimming, for 1, 2 and 4 nodes of 2 ranks, also from the middle."""
    split = type("Split", (), {"num_sequences": 203, "folder": "x"})()
    size, batch = loader_module._samples_per_epoch([split], [1.0], 8, canonical), 8
    for done in (0, 40):
        flat = []
        for nodes in (1, 2, 4):
            ids = get_partitions("relaxed", size, canonical, nodes, 2, 1, batch // (nodes * 2), done)
            flat.append([sorted(ids[:, :, :, step].ravel().tolist()) for step in range(ids.shape[3])])
        assert flat[0] == flat[1] == flat[2]
        assert len(set(sum(flat[0], []))) == size - done == len(sum(flat[0], []))


@pytest.mark.parametrize("canonical", [2, 3])
def test_canonical_nodes_lose_and_repeat_nothing(shards, canonical):
    with TrainLoader(shards, micro_batch=2, canonical_nodes=canonical, **NUMBERS) as loader:
        steps = loader.samples_per_epoch // BATCH
        assert loader.samples_per_epoch % (BATCH * canonical if canonical == 3 else BATCH) == 0
        epoch = sum(read_steps(loader, steps), [])
        assert len(set(epoch)) == len(epoch) and loader.state_dict()["epoch"] == 1


def test_random_numbers_of_training_are_left_alone(shards):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    alone(shards, STEPS_PER_EPOCH + 1, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


CHANGES = [
    ("seed", {"seed": 8}),
    ("global_batch", {"global_batch": 8}),
    ("shuffle", {"shuffle": False}),
    ("canonical_nodes", {"canonical_nodes": 2}),
]


@pytest.mark.parametrize(("key", "change"), CHANGES)
def test_state_of_another_order_is_refused(shards, key, change):
    _, state = alone(shards, 2)
    with pytest.raises(ValueError, match=rf"does not fit .*: {key} \(then .*, now .*\);") as error:
        alone(shards, 1, state, **change)
    assert "\n" not in str(error.value)


def test_state_of_other_data_is_refused(shards, tmp_path):
    write_split(tmp_path / "train", numbered(COUNT - 1))
    with pytest.raises(ValueError, match="index_hash"):
        alone(tmp_path, 1, alone(shards, 1)[1])


def test_steps_are_counted_by_their_micro_batches(shards):
    with TrainLoader(shards, micro_batch=2, **NUMBERS) as loader:
        next(loader)
        with pytest.raises(RuntimeError, match="1 micro-batches instead of 2"):
            loader.step_done()
        with pytest.raises(RuntimeError, match="before the first batch"):
            loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("numbers", "environment", "message"),
    [
        ({"global_batch": 104}, {}, "has 103 sequences"),
        ({"global_batch": 6, "micro_batch": 4}, {}, "does not divide"),
        ({"micro_batch": 0}, {}, "does not divide"),
        ({"seed": -1}, {}, "seed is -1"),
        ({"recall_beta": 9.0}, {}, "train.recall_beta is 9.0"),
        ({"switch_beta": 9.0}, {}, "train.switch_beta is 9.0"),
        ({"canonical_nodes": 0}, {}, "data.canonical_nodes is 0"),
        ({"replication": 2}, {}, "1 ranks do not divide"),
        ({}, {"WORLD_SIZE": "2"}, "start with torchrun"),
        ({}, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "temp_dir"),
    ],
)
def test_numbers_that_do_not_fit(shards, monkeypatch, numbers, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as error:
        TrainLoader(shards, **({"micro_batch": 1} | NUMBERS | numbers))
    assert "\n" not in str(error.value)


def test_masks_weigh(tmp_path):
    ones = np.packbits(np.ones(8, dtype=bool))
    write_split(tmp_path / "train", [sample | {"recall": ones, "switch": ones} for sample in numbered(8)])
    with TrainLoader(tmp_path, global_batch=4, micro_batch=4, seed=0, recall_beta=9, switch_beta=49) as loader:
        assert next(loader).weights.tolist() == [[59.0] * 7 + [0.0]] * 4


def test_twenty_loaders_in_one_process(shards, order, tmp_path):
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.is_dir() else 0
    for _ in range(20):
        assert alone(shards, 2, temp_dir=tmp_path / "job")[0] == order[:2]
        assert not (tmp_path / "job").exists()
    if descriptors.is_dir():
        assert len(list(descriptors.iterdir())) < before + 20  # every segment that stays open holds one


def hold_for_a_moment(shards, temp_dir):
    """Rank program: what another job does meanwhile must not matter."""
    numbers = NUMBERS | {"micro_batch": 2}
    with TrainLoader(shards, temp_dir=temp_dir, **numbers) as loader:
        return read_steps(loader, 3), loader._dataset._shm_prefix_int


def test_jobs_on_one_host_take_numbers_of_their_own(shards, tmp_path):
    """Ranks agree on a number that is not the first free one, which jobs starting together would all take."""
    jobs = [run_ranks(2, hold_for_a_moment, shards, str(tmp_path / name))[0] for name in ("a", "b", "a")]
    numbers = [{number for _, number in ranks} for ranks in jobs]
    assert [len(n) for n in numbers] == [1, 1, 1]
    assert numbers[0] == numbers[2] != numbers[1] and min(numbers[0] | numbers[1]) > 20


def test_two_loaders_at_once(shards, order, tmp_path):
    numbers = NUMBERS | {"micro_batch": 4}
    with TrainLoader(shards, temp_dir=tmp_path / "a", **numbers) as a, TrainLoader(shards, **numbers) as b:
        for step in range(30):
            assert read_steps(a, 1) == read_steps(b, 1) == order[step : step + 1]


# ---- failures


def remove_all(folder):
    for path in (folder / "train").glob("*.mds"):
        path.unlink()


def cut_all(folder):
    for path in (folder / "train").glob("*.mds"):
        os.truncate(path, path.stat().st_size - 60)  # the last sequences are gone, one is cut in two


def read_then_break(shards, workers, temp_dir, break_name, rank_that_breaks, timeout):
    """Rank program: read a step, damage the shards, read on; the number of steps until an error ends it."""
    numbers = NUMBERS | {"timeout_seconds": timeout, "num_workers": workers}
    with TrainLoader(shards, micro_batch=1, temp_dir=temp_dir, **numbers) as loader:
        read_steps(loader, 1)
        if int(os.environ.get("RANK", 0)) == rank_that_breaks:
            {"remove": remove_all, "cut": cut_all}[break_name](shards)
        read_steps(loader, 200)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_shards_that_vanish_or_shrink_during_the_run(tmp_path, world, workers, damage):
    write_split(tmp_path / "train", numbered(COUNT))
    arguments = (tmp_path, workers, str(tmp_path / "job"), damage, world - 1, 60.0)
    outcomes, seconds = run_ranks(world, read_then_break, *arguments)
    for outcome in outcomes:
        assert outcome.startswith(f"DataError: {tmp_path / 'train'}: micro-batch "), outcome
        assert (
            "shard" in outcome and "cannot be read" in outcome and "longpitch prep" in outcome and "\n" not in outcome
        )
    assert seconds < 15
    assert not (tmp_path / "job").exists()


def one_rank_stops(shards, temp_dir):
    """Rank program: rank 1 stops reading after 3 steps; rank 0 reads on into the next epoch."""
    with TrainLoader(shards, micro_batch=1, temp_dir=temp_dir, **(NUMBERS | {"timeout_seconds": 1.5})) as loader:
        read_steps(loader, 3)
        if os.environ["RANK"] == "1":
            return "stopped"
        read_steps(loader, 100)


def test_rank_whose_peer_is_gone_does_not_hang(shards, tmp_path):
    outcomes, seconds = run_ranks(2, one_rank_stops, shards, str(tmp_path / "job"))
    assert outcomes[1] == "stopped"
    assert "nothing arrived within 1.5 s" in outcomes[0] and "data.timeout_seconds" in outcomes[0]
    assert seconds < 15


@pytest.mark.parametrize("damage", ["missing", "index"])
def test_damage_before_the_start(tmp_path, damage):
    split = write_split(tmp_path / "train", numbered(COUNT))
    (split / ("shard.00003.mds" if damage == "missing" else "index.json")).unlink()
    with pytest.raises(DataError, match="shard.00003.mds" if damage == "missing" else "index.json"):
        TrainLoader(tmp_path, micro_batch=1, **NUMBERS)


def test_flipped_bits_are_found_when_asked(tmp_path):
    split = write_split(tmp_path / "train", numbered(COUNT))
    data = bytearray((split / "shard.00003.mds").read_bytes())
    data[-1] ^= 1
    (split / "shard.00003.mds").write_bytes(data)
    TrainLoader(tmp_path, micro_batch=1, **NUMBERS).close()
    with pytest.raises(DataError, match=r"shard\.00003\.mds"):
        TrainLoader(tmp_path, micro_batch=1, verify_hashes=True, **NUMBERS)


@pytest.mark.parametrize("workers", [0, 1])
def test_epoch_that_ends_early_is_an_error(shards, monkeypatch, workers):
    """Whatever ends the library's iteration without a word: the count notices."""
    real = loader_module._Sequences.__iter__
    monkeypatch.setattr(loader_module._Sequences, "__iter__", lambda self: itertools.islice(real(self), 10))
    with pytest.raises(DataError, match="the epoch ended after 10 of 100"):
        alone(shards, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_thread_of_the_library_is_an_error(shards, monkeypatch, workers):
    def fail(self, shard_id, blocking=True):
        raise OSError("no disk")

    monkeypatch.setattr(loader_module._Sequences, "prepare_shard", fail)
    with pytest.raises(DataError, match="a reading thread failed"):
        alone(shards, num_workers=workers)


def test_reading_that_hangs_is_an_error(shards, monkeypatch):
    monkeypatch.setattr(loader_module._Sequences, "get_item", lambda self, sample_id, retry=0: time.sleep(3))
    began = time.monotonic()
    with pytest.raises(DataError, match="nothing arrived within 0.5 s"):
        alone(shards, timeout_seconds=0.5)
    assert time.monotonic() - began < 6


def test_killed_worker_is_an_error(shards):
    with TrainLoader(shards, micro_batch=1, num_workers=1, **NUMBERS) as loader:
        next(loader)
        for worker in loader._dataloader._iterator._workers:
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(DataError, match="start the run again") as error:
            read_steps(loader, 60)
        assert "\n" not in str(error.value)


def abandon(shards, workers):
    """Program: leave a loader open at the end of the process, with reading in progress."""
    next(TrainLoader(shards, micro_batch=1, num_workers=workers, **NUMBERS))


def end_with_an_open_loader(shards, workers, temporary_folder):
    program = f"from tests.data_prep.test_loader import abandon; abandon({str(shards)!r}, {workers})"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(temporary_folder)},
        timeout=60,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr.decode()


@pytest.fixture
def short_folder():
    """A temporary folder whose path is short, where pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_process_with_an_open_loader_ends(shards, short_folder, workers):
    end_with_an_open_loader(shards, workers, short_folder)
    assert not list(short_folder.glob("longpitch-*"))


def test_longest_temporary_folder_works_and_a_longer_one_is_refused(shards, short_folder, monkeypatch):
    longest = short_folder / ("x" * (LONGEST_TEMPORARY_FOLDER - len(str(short_folder)) - 1))
    longest.mkdir()
    end_with_an_open_loader(shards, 1, longest)
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    with pytest.raises(UserError, match=r"76 bytes.* allow 75; set TMPDIR to a shorter one"):
        TrainLoader(shards, micro_batch=1, num_workers=1, **NUMBERS)


def read_forever(shards, temp_dir):
    """Program: read until killed, after saying which segments are its own."""
    with TrainLoader(shards, micro_batch=1, temp_dir=temp_dir, **NUMBERS) as loader:
        loader.load_state_dict(loader.state_dict())
        next(loader)
        sys.stdout.write(f"{loader._dataset._shm_prefix_int:06}\n")
        sys.stdout.flush()
        time.sleep(600)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs Linux shared memory")
def test_killed_job_is_cleaned_up_after_and_a_live_one_is_not(shards, order, tmp_path):
    job = tmp_path / "job"
    command = f"from tests.data_prep.test_loader import read_forever; read_forever({str(shards)!r}, {str(job)!r})"
    with TrainLoader(shards, micro_batch=1, temp_dir=tmp_path / "live", **NUMBERS) as live:
        assert read_steps(live, 2) == order[:2]
        ours = set(Path("/dev/shm").glob(f"{live._dataset._shm_prefix_int:06}_*"))
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        prefix = process.stdout.readline().strip()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        left = {path: path.stat().st_ino for path in Path("/dev/shm").glob(f"{prefix}_*")}
        assert any(path.name.endswith("resume") for path in left) and job.exists()
        assert alone(shards, 3, temp_dir=job)[0] == order[:3]
        assert not job.exists()
        assert not [path for path, inode in left.items() if path.exists() and path.stat().st_ino == inode]
        assert ours and all(path.exists() for path in ours)
        assert read_steps(live, 30) == order[2:32]
