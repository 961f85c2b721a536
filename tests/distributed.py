"""Starts a rank program on several local processes (gloo) and brings back what its rank 0 found.

A process costs about 6 seconds of imports, so a program runs a whole matrix of cases and returns a dict of results by
case; the tests then look up theirs.
"""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
GRACE = 15.0  # seconds that ranks get to say their part once one has failed


def free_port() -> int:
    """A TCP port that nobody listens on right now, below those that the system gives to connections.

    The ranks open it seconds later; one that the system may give away meanwhile would be taken at times.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports between 15000 and 32000 is free")


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for one process of a single node."""
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return os.environ | {name: str(value) for name, value in ours.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip


def run_ranks(module: str, world: int, *arguments: str, timeout: float = 300.0) -> dict:
    """Run `python -m module RESULT ARGUMENTS...` on `world` ranks; rank 0 writes its results to RESULT as JSON.

    Raises:
        AssertionError: a rank failed, or did not end in time, or `GRACE` seconds after another had failed; with the end
            of every rank's output.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        result, logs, processes = Path(folder) / "result.json", [], []
        for rank in range(world):
            log = open(Path(folder) / f"rank_{rank}.log", "w+")  # noqa: SIM115 - closed with the folder
            logs.append(log)
            command = [sys.executable, "-m", module, str(result), *arguments]
            environment = rank_environment(rank, world, port)
            processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
        try:
            codes = _exit_codes(processes, timeout)
        finally:
            for process in processes:
                process.kill()
        tails = "\n".join(
            f"--- rank {n}, exit {code}\n{_tail(log)}" for n, (log, code) in enumerate(zip(logs, codes, strict=True))
        )
        assert codes == [0] * world, tails
        return json.loads(result.read_text())


def _exit_codes(processes: list[subprocess.Popen], timeout: float) -> list[int | None]:
    """Each rank's exit code, None for one that had to be waited for too long: it may hang in a collective."""
    deadline = time.monotonic() + timeout
    codes = [process.poll() for process in processes]
    while None in codes and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    return codes


def _tail(log) -> str:
    log.seek(0)
    text = log.read()[-3000:]
    log.close()
    return text
