"""Two machines on one: network namespaces with names and shared memory of their own, joined by a cable to cut.

Needs root and iproute2.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from launch.run_directory import read_metrics
from tests.distributed import ROOT
from tests.launch.train_program import RECIPE

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "veth0"  # the network interface's name in both
SHELL = """#!/bin/sh
# Runs the command $2 on the machine $1, which does not answer where a file says so.
[ -e "{folder}/$1.dead" ] && exit 255
exec ip netns exec "$1" unshare --mount --uts sh -c \\
    'hostname "$0" && mount -t tmpfs shm /dev/shm && exec sh -c "$1"' "$1" "$2"
"""


def possible() -> bool:
    """Whether this machine lets namespaces be made."""
    name = f"lp{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


class Network:
    """The two machines and their cable."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, [f"lp{os.getpid()}{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", "lo", "up")
        self.shell, self.hosts = folder / "shell", folder / "hosts"
        self.shell.write_text(SHELL.format(folder=folder))
        self.shell.chmod(0o755)
        pairs = zip(self.names, ADDRESSES, strict=True)
        self.hosts.write_text("".join(f"{name} {address}\n" for name, address in pairs))
        self.mend()

    def cut(self) -> None:
        """No packet gets through, and nobody is told."""
        for name in self.names:
            ip("-n", name, "link", "set", CABLE, "down")

    def mend(self) -> None:
        """Undo `cut`, and let both machines answer."""
        for name in self.names:
            ip("-n", name, "link", "set", CABLE, "up")
            (self.folder / f"{name}.dead").unlink(missing_ok=True)

    def kill_machine(self, index: int) -> None:
        """Kill all that runs on a machine, which does not answer from now on."""
        name = self.names[index]
        (self.folder / f"{name}.dead").touch()
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Remove both machines."""
        for index, name in enumerate(self.names):
            self.kill_machine(index)
            ip("netns", "delete", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Launched:
    """A `longpitch launch` in progress."""

    def __init__(self, run: Path, options: list[str], settings: list[str]):
        self.run, self.output = run, run.with_suffix(".txt")
        words = ["launch", str(RECIPE), *options, f"run_dir={run}", *settings]
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch", *words], cwd=ROOT, stdout=output, stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def said(self) -> str:
        return self.output.read_text()

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        return [record["step"] for record in read_metrics(path)] if path.exists() else []

    def losses(self) -> list[float]:
        return [record["loss"] for record in read_metrics(self.run / "metrics.jsonl")]

    def wait_for_step(self, step: int, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while max(self.steps(), default=0) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if f"run_dir={self.run}" in process.cmdline() and "RANK" in (variables := process.environ()):
                    found[int(variables["RANK"])] = process
        return found

    def end(self, seconds: float = 150) -> int:
        """The exit code; an error that shows the output if it does not come in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None
        finally:
            self.process.kill()
            for process in self.ranks().values():
                process.kill()
