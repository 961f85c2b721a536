"""The machines of a job that is started over SSH: their list, how a command gets there, and which of them answer."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.load import RecipeError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o",
       "ServerAliveCountMax=3")  # fmt: skip
ANSWER_SECONDS = 20.0
TAKEN_ALONG = ("DATA_ROOT", "MODEL_ROOT", "PATH", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS")
TAKEN_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "LONGPITCH_")


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: as the remote shell knows it; None is this machine, without a remote shell.
        address: by which the other machines reach it.
    """

    name: str | None
    address: str | None


def read_hosts(path: Path) -> list[Host]:
    """One machine a line: its name and, where the others know it by another one, its address; # begins a comment.

    Raises:
        RecipeError: the file cannot be read, names nothing, or names a machine twice.
    """
    try:
        lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--hosts {path} cannot be read: {error}") from error
    hosts = []
    for number, words in enumerate(lines, 1):
        if len(words) > 2:
            raise RecipeError(f"{path}, line {number}: a line is HOST or HOST ADDRESS, not {' '.join(words)!r}")
        if words:
            hosts.append(Host(words[0], words[-1]))
    names = [host.name for host in hosts]
    if not hosts or len(set(names)) < len(names):
        raise RecipeError(f"{path} {'names a machine twice' if hosts else 'names no machine'}; give one line to each")
    return hosts


def remote_command(host: Host, shell: Sequence[str], words: Sequence[str]) -> list[str]:
    """The command that runs `words` on `host`, in this folder and with what of this environment concerns training."""
    if host.name is None:
        return list(words)
    chosen = {
        name: value for name, value in os.environ.items() if name in TAKEN_ALONG or name.startswith(TAKEN_PREFIXES)
    }
    settings = [f"{name}={value}" for name, value in sorted(chosen.items())]
    return [*shell, host.name, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *words])}"]


@dataclass(frozen=True)
class Reached:
    """Which machines answer and reach the first of them, in their order, and what the others said."""

    hosts: list[Host]
    silent: dict[str, str]


def reach(hosts: Sequence[Host], shell: Sequence[str], port: int) -> Reached:
    """Find the machines that answer and reach one of them at `port`, on which nothing may listen yet.

    The machine that hosts the rendezvous is the first one that answers; those that do not reach it are left out.
    """
    if len(hosts) == 1 and hosts[0].name is None:
        return Reached(list(hosts), {})
    silent: dict[str, str] = {}
    left = list(hosts)
    while left:
        head, rest = left[0], left[1:]
        listener = _start(head, shell, ["listen", str(port), str(ANSWER_SECONDS)])
        try:
            if (why := _first_line(listener)) != "listening":
                silent[str(head.name)] = why
                left = rest
                continue
            connect = partial(_connect, shell=shell, place=f"{head.address}:{port}")
            with ThreadPoolExecutor(max(1, len(rest))) as pool:
                said = list(pool.map(connect, rest))
        finally:
            listener.kill()
        reached = [host for host, word in zip(rest, said, strict=True) if word == "connected"]
        silent |= {str(host.name): word for host, word in zip(rest, said, strict=True) if word != "connected"}
        return Reached([head, *reached], silent)
    return Reached([], silent)


def _connect(host: Host, *, shell: Sequence[str], place: str) -> str:
    return _first_line(_start(host, shell, ["connect", place]))


def _start(host: Host, shell: Sequence[str], words: list[str]) -> subprocess.Popen:
    command = remote_command(host, shell, [sys.executable, "-m", "launch.cluster.reachable", *words])
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _first_line(process: subprocess.Popen) -> str:
    """What a program answers in time: its first line; its last one if it fails."""
    assert process.stdout is not None
    deadline = time.monotonic() + ANSWER_SECONDS
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(process.stdout.readline)
        while not line.done() and time.monotonic() < deadline:
            time.sleep(0.05)
        if not line.done():
            process.kill()
            return f"no answer within {ANSWER_SECONDS:.0f} s"
    return line.result().strip() or "no answer"
