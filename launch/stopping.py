"""When a run should stop early: a signal, a closed terminal, Ctrl-C, or a torchrun that is no longer there."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from launch.processes import LAUNCHER

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LAUNCHER_GONE = 1000  # beside the numbers of signals
CTRL_C = b"\nlongpitch: stopping after this micro-batch, then saving; Ctrl-C again ends at once, without saving\n"


class StopNow(Exception):
    """Leaves a step, or an evaluation, that is not finished: every rank raises it at the same place."""


class Stop:
    """Why this process should stop: the number of the signal that it got, LAUNCHER_GONE, or 0."""

    def __init__(self, *, speaks: bool = True):
        """`speaks`: whether this process answers Ctrl-C; one rank of several does."""
        self._signal, self._speaks = 0, speaks

    def wanted(self) -> int:
        """The reason now."""
        # a process without torchrun may outlive the shell that started it
        gone = "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER
        return self._signal or (LAUNCHER_GONE if gone else 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals instead of ending by them; a second Ctrl-C is a KeyboardInterrupt."""
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in before.items():
            if not (number == signal.SIGHUP and handler is signal.SIG_IGN):  # nohup: the terminal does not matter
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._signal == signal.SIGINT:
                raise KeyboardInterrupt
            if self._speaks:
                with suppress(OSError):
                    os.write(2, CTRL_C)
        self._signal = number


def words(reason: int) -> str:
    """A reason as a person reads it."""
    if reason == LAUNCHER_GONE:
        return "torchrun is gone"
    return "stopped by Ctrl-C" if reason == signal.SIGINT else f"told to stop by {signal.Signals(reason).name}"


def torchruns_patience() -> float:
    """Seconds that torchrun waits for its ranks after a signal until it kills them; infinite without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    with suppress(psutil.Error, ValueError, IndexError):
        arguments = psutil.Process(LAUNCHER).cmdline()
        for number, argument in enumerate(arguments):
            option, _, value = argument.replace("_", "-").partition("=")
            if option == "--shutdown-timeout":
                return float(value or arguments[number + 1])
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
