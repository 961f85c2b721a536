"""Under the real torchrun: killed ranks start again by themselves, signals save, and nobody waits for ever."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from data_prep.host import host_folder
from data_prep.scratch import first_number
from launch.run_directory import read_metrics
from tests.distributed import ROOT, free_port, rank_environment
from tests.launch.train_program import RECIPE

QUICK = ("train.warmup_steps=0", "model.attention.kind=swa", "train.eval_sequences=0")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
            "localhost:0")  # fmt: skip
PATIENCE = 120  # seconds, on a machine that is busy


class Job:
    """A run of two ranks under torchrun, and what can be done to it."""

    def __init__(self, run: Path, shards: Path, *settings: str, options: tuple[str, ...] = ()):
        self.run, self.output = run, run.with_suffix(".txt")
        command = [sys.executable, *TORCHRUN, *options, "-m", "launch", "train", str(RECIPE), f"run_dir={run}",
                   f"data.shards={shards}", *QUICK, *settings]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(self.output, "a") as output:
            self.torchrun = psutil.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        self.seen: set[psutil.Process] = set()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train now, by rank."""
        found = {}
        for one in self.torchrun.children():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                if "RANK" in (variables := one.environ()):
                    found[int(variables["RANK"])] = one
        self.seen |= set(found.values())
        return found

    def steps(self) -> list[int]:
        """The steps that metrics.jsonl holds."""
        path = self.run / "metrics.jsonl"
        return [record["step"] for record in read_metrics(path)] if path.exists() else []

    def wait(self, condition, what: str) -> float:
        """Seconds until `condition` holds."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < PATIENCE, f"no {what} in time:\n{self.output.read_text()[-3000:]}"
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_for_step(self, step: int) -> float:
        """Seconds until the step is in the metrics."""
        return self.wait(lambda: step in self.steps() and bool(self.ranks()), f"step {step}")

    def kill_rank(self, rank: int, *, after: int) -> float:
        """SIGKILL a rank after a step; seconds until its successor has trained one."""
        self.wait_for_step(after)
        killed, begin = self.ranks()[rank], time.monotonic()
        killed.kill()
        self.wait(lambda: self.ranks().get(rank, killed) != killed, "new rank")
        done = len(self.steps())
        self.wait(lambda: len(self.steps()) != done, "step")
        return time.monotonic() - begin

    def newest(self) -> int:
        """The step of the newest complete checkpoint."""
        return max(int(mark.parent.name[5:]) for mark in self.run.glob("checkpoints/step_*/complete.json"))

    def end(self) -> None:
        """Leave no process."""
        for one in {self.torchrun, *self.seen}:
            if one.is_running():
                one.kill()


@pytest.fixture
def start(shards, tmp_path) -> Iterator:
    """Start a job in the test's run directory; it is ended with the test."""
    jobs = []

    def make(*settings: str, options: tuple[str, ...] = ()) -> Job:
        jobs.append(Job(tmp_path / "run", shards, *settings, options=options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


@pytest.mark.slow  # `longpitch launch` does the same by its own means, tested in test_launch.py
def test_killed_ranks_start_again_by_themselves(start):
    """First rank 1, then rank 0; the torchrun of this test goes on to the last step both times."""
    job = start("train.steps=400", "checkpoint.interval=10", options=("--max-restarts", "2"))
    for rank, step in ((1, 20), (0, 120)):
        print("rank", rank, "killed: trains again after", job.kill_rank(rank, after=step), "s")
    assert job.torchrun.wait(PATIENCE) == 0, job.output.read_text()[-3000:]
    assert job.steps() == list(range(1, 401)) and job.newest() == 400
    assert job.output.read_text().count("resumed from") == 2


def test_torchrun_killed_alone_leaves_no_ranks(start):
    """They save the last whole step and end; then SIGTERM to a torchrun, which passes it to reading processes too."""
    job = start("train.steps=100000", "checkpoint.interval=0")
    job.wait_for_step(5)
    ranks = job.ranks()
    job.torchrun.kill()
    job.wait(lambda: not any(one.is_running() for one in ranks.values()), "end of the ranks")
    assert job.newest() == job.steps()[-1] >= 5
    assert f"torchrun is gone: step {job.newest()} is saved" in job.output.read_text()

    again = start("train.steps=100000", "checkpoint.interval=0", "data.num_workers=1")
    done = job.newest()
    again.wait_for_step(done + 3)
    for one in again.ranks().values():  # the signal to a rank's process group does not end what reads for it
        assert any(os.getpgid(child.pid) == child.pid for child in one.children())
    again.torchrun.send_signal(signal.SIGTERM)
    again.torchrun.wait(PATIENCE)
    assert again.newest() == again.steps()[-1] >= done + 3
    assert f"told to stop by SIGTERM: step {again.newest()} is saved" in again.output.read_text()
    assert "Traceback" not in "".join(log.read_text() for log in again.run.glob("logs/rank_*.log"))


def start_ranks(world: int, run: Path, shards: Path, *settings: str) -> list[subprocess.Popen]:
    """Ranks without torchrun."""
    port = free_port()
    command = [sys.executable, "-m", "launch", "train", str(RECIPE), f"run_dir={run}", f"data.shards={shards}"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen([*command, *QUICK, *settings], env=rank_environment(rank, world, port), **options)
        for rank in range(world)
    ]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_does_not_come_is_named(shards, tmp_path, how):
    """Its number, the step and the collective, in one sentence, by those that wait; shared memory is given back."""
    run, rank = tmp_path / "run", 0 if how == signal.SIGKILL else 1
    folder = host_folder(run).with_suffix(".job") / socket.gethostname()
    segments = f"{first_number(folder):06}_*"
    settings = ("train.steps=100000", "train.tokens_per_step=960", "train.micro_batch=1", "checkpoint.interval=2")
    ranks = start_ranks(3, run, shards, *settings, "parallel.timeout_seconds=12")
    try:
        deadline = time.monotonic() + PATIENCE
        while not (run / "metrics.jsonl").exists() or len(read_metrics(run / "metrics.jsonl")) < 3:
            assert time.monotonic() < deadline and all(one.poll() is None for one in ranks)
            time.sleep(0.05)
        assert list(Path("/dev/shm").glob(segments))
        ranks[rank].send_signal(how)
        begin = time.monotonic()
        output = "".join(one.communicate(timeout=PATIENCE)[0] for n, one in enumerate(ranks) if n != rank)
        took, left = time.monotonic() - begin, list(Path("/dev/shm").glob(segments))
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = [line for line in output.splitlines() if line.startswith("longpitch (rank")]
    assert len(said) == (1 if how == signal.SIGSTOP else 2), output[-3000:]  # rank 0 was the one to ask who says it
    assert took < (12 if how == signal.SIGSTOP else 0) + 20, said
    named = (
        "rank 1 did not come within 12 s in step" if how == signal.SIGSTOP else "rank 0 has ended or does not answer"
    )
    assert all(named in line and "goes on from the last checkpoint" in line for line in said), said
    assert "Traceback" not in output
    assert "Traceback" in (run / "logs" / "rank_2.log").read_text()
    assert left == []
