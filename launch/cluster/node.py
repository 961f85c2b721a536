"""One node's part of a job: runs torchrun, passes a request to stop on to its ranks, and leaves nothing behind.

A request is a signal, RUN/STOP, or a word on the standard input, through which whoever started this program says every
few seconds that it is there. When it has gone, the ranks save and end; when it cannot be heard, they are killed before
it may start them elsewhere.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from launch.cluster.chain import STOP_FILE, told_to_stop

PING_SECONDS = 2.0  # between the words of whoever started this
LEASE_SECONDS = 20.0  # of silence after which it cannot be reached any more
LOST_SECONDS = 5.0  # that ranks then have to end
SAVE_SECONDS = 1800.0  # that ranks have to finish a micro-batch and save
POLL_SECONDS = 0.2
ASK_AGAIN_SECONDS = 5.0  # ranks that are still starting do not listen yet
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Starter:
    """Whoever started this program, heard on its standard input."""

    def __init__(self) -> None:
        self.heard, self.gone, self.wants_stop = time.monotonic(), False, False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.heard = time.monotonic()
            self.wants_stop = self.wants_stop or line.strip() == "stop"
        self.gone = True

    def silent(self) -> bool:
        return not self.gone and time.monotonic() - self.heard > LEASE_SECONDS


def run_torchrun(command: list[str], environment: dict[str, str], run: Path, *, watched: bool) -> int:
    """Run torchrun until it ends; returns its exit code, 0 after a stop in order.

    Args:
        command: from `torchrun_command`.
        environment: added to this process's own.
        run: the run directory, for its file STOP.
        watched: whether whoever started this speaks on the standard input.
    """
    starter = Starter() if watched else None
    asked: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: asked.append(number))
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_become_torchrun,
    )
    try:
        return _watch(process, run, starter, asked)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def _watch(process: subprocess.Popen, run: Path, starter: Starter | None, asked: list[int]) -> int:
    kill_at, ask_at, why = None, 0.0, None
    while process.poll() is None:
        now = time.monotonic()
        if why is None and (why := _reason(run, starter, asked)):
            print(f"longpitch: {why}; the ranks finish their micro-batch and save", file=sys.stderr, flush=True)
            kill_at = now + SAVE_SECONDS
        if starter and starter.silent() and (kill_at is None or kill_at > now + LOST_SECONDS):
            why, kill_at = "the machine that started this cannot be heard", now + LOST_SECONDS
        if why and now >= ask_at:
            _ask_ranks(process.pid)
            ask_at = now + ASK_AGAIN_SECONDS
        if kill_at is not None and now > kill_at:
            print(f"longpitch: {why}, and its ranks did not end in time: killed", file=sys.stderr, flush=True)
            return 1
        time.sleep(POLL_SECONDS)
    return process.returncode


def _reason(run: Path, starter: Starter | None, asked: list[int]) -> str | None:
    if asked:
        return f"told to stop by {signal.Signals(asked[0]).name}"
    if told_to_stop(run):
        return f"{run / STOP_FILE} is there"
    if starter and starter.wants_stop:
        return "told to stop by the launcher"
    return "the launcher has gone" if starter and starter.gone else None


def _become_torchrun() -> None:
    """Between fork and exec: torchrun ignores what the ranks are told, and ends with this program."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _ask_ranks(torchrun: int) -> None:
    with suppress(psutil.Error):
        for rank in psutil.Process(torchrun).children():
            with suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that descend from it."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                one.kill()
