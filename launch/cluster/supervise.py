"""Starts a job on its machines, passes on what rank 0 says, and starts it again after a fault while it gets further."""

import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch.cluster.chain import STOP_FILE, note_start, told_to_stop
from launch.cluster.faults import first_fault
from launch.cluster.hosts import Host, reach, remote_command
from launch.cluster.node import LEASE_SECONDS, LOST_SECONDS, PING_SECONDS, STOP_SIGNALS
from recipes.errors import UserError

# a machine that cannot be heard has ended its ranks by then, and a job on others does not meet them
LOST_AFTER_SECONDS = LEASE_SECONDS + LOST_SECONDS + 10
GRACE_SECONDS = 30.0  # that the others have to say their part once one machine has failed


@dataclass
class Job:
    """What is to be started.

    Attributes:
        recipe, overrides: as on the command line.
        run: the run directory, which all machines see.
        hosts: machines, of which as many are used as answer and a count allows.
        counts: how many machines an attempt may have, ascending.
        gpus: processes a machine.
        shell: the remote shell, as words before the host's name and the command.
        port: of the rendezvous on the first machine; 0: any free one, for one machine.
        interface: network interface for gloo and NCCL.
    """

    recipe: Path
    overrides: list[str]
    run: Path
    hosts: list[Host]
    counts: Sequence[int]
    gpus: int
    shell: Sequence[str]
    port: int
    interface: str | None


@dataclass
class _Attempt:
    """The programs of one attempt, one a machine."""

    hosts: list[Host]
    logs: Path
    processes: list[subprocess.Popen] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    stopping: bool = False

    def start_reading(self, process: subprocess.Popen, index: int) -> None:
        """Keep what a machine says, and print what the first one does: there is rank 0."""
        path = self.logs / f"node_{index}.log"
        self.readers.append(threading.Thread(target=_read, args=(process, path, index == 0), daemon=True))
        self.readers[-1].start()

    def say(self, word: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with suppress(OSError, ValueError):  # it has ended
                process.stdin.write(word + "\n")
                process.stdin.flush()

    def stop(self) -> None:
        self.stopping = True
        self.say("stop")


def _read(process: subprocess.Popen, path: Path, aloud: bool) -> None:
    with open(path, "w") as file:
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            if aloud:
                sys.stdout.write(line)
                sys.stdout.flush()


def supervise(job: Job) -> None:
    """Run a job to its end, through restarts. Returns after the last step, or after a stop in order.

    Raises:
        NoProgressError: it failed again without a newer checkpoint.
        UserError: fewer machines answer than it needs.
    """
    again = False
    while not told_to_stop(job.run):
        hosts = _reach_enough(job)
        step = note_start(job.run, again=again)
        attempt = _Attempt(hosts, attempt_folder(job.run, time.strftime("%Y%m%d-%H%M%S")))
        if again:
            where = "1 machine" if len(hosts) == 1 else f"{len(hosts)} machines"
            print(f"longpitch: started again from step {step} on {where}", flush=True)
        codes = _run(attempt, job)
        if not any(codes):
            return
        if attempt.stopping:
            raise UserError(f"stopped, but not in order on all machines; their output is in {attempt.logs}")
        print(f"longpitch: {_what_failed(attempt, codes)}", file=sys.stderr, flush=True)
        again = True
    print(f"{job.run / STOP_FILE} is there: nothing is started; remove it to go on", flush=True)


def attempt_folder(run: Path, name: str) -> Path:
    """A new folder for the output of one attempt; its name is the attempt's."""
    attempts = run / "logs" / "launch"
    for number in range(1, 1000):
        folder = attempts / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise UserError(f"{attempts} holds 1,000 attempts of one second; remove some")


def commands(job: Job, hosts: Sequence[Host], name: str) -> list[list[str]]:
    """The command on each machine of the attempt called `name`, the remote shell included."""
    place = f"{hosts[0].address or 'localhost'}:{job.port or _free_port()}"
    return [remote_command(host, job.shell, _node(job, host, index, len(hosts), place, name))
            for index, host in enumerate(hosts)]  # fmt: skip


def _node(job: Job, host: Host, index: int, nodes: int, place: str, name: str) -> list[str]:
    return [
        sys.executable, "-m", "launch", "node", "--watched",
        "--nodes", str(nodes), "--node", str(index), "--gpus", str(job.gpus),
        "--rendezvous", place, "--job", name,
        *(["--address", host.address] if host.address else []),
        *(["--interface", job.interface] if job.interface else []),
        str(job.recipe), *job.overrides,
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _reach_enough(job: Job) -> list[Host]:
    found = reach(job.hosts, job.shell, job.port)
    for name, why in found.silent.items():
        print(f"longpitch: {name} is left out: {why}", file=sys.stderr, flush=True)
    fitting = [count for count in job.counts if count <= len(found.hosts)]
    if not fitting:
        raise UserError(
            f"{len(found.hosts)} of {len(job.hosts)} machines can be used and --nodes asks for {job.counts[0]}; see to "
            f"{', '.join(found.silent) or 'the list of machines'}, or let fewer do with --nodes MIN:MAX"
        )
    return found.hosts[: fitting[-1]]


def _run(attempt: _Attempt, job: Job) -> list[int]:
    """Exit codes of all machines' programs."""
    before = {number: signal.signal(number, lambda *_: attempt.stop()) for number in STOP_SIGNALS}
    try:
        for index, command in enumerate(commands(job, attempt.hosts, attempt.logs.name)):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
            attempt.processes.append(process)
            attempt.start_reading(process, index)
        return _watch(attempt)
    finally:
        for process in attempt.processes:
            process.kill()  # the program on the machine ends its ranks when its standard input is closed
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(attempt: _Attempt) -> list[int]:
    """Wait for all machines; those that cannot be heard after one has failed are given up in time."""
    failed_at, ping_at = math.inf, 0.0
    while any(process.poll() is None for process in attempt.processes):
        now = time.monotonic()
        if failed_at == math.inf and any(process.poll() for process in attempt.processes):
            failed_at = now
        silent = now > failed_at + GRACE_SECONDS  # which makes the others end
        if now >= ping_at and not silent:
            attempt.say("stop" if attempt.stopping else "ping")
            ping_at = now + PING_SECONDS
        if silent and now > failed_at + GRACE_SECONDS + LOST_AFTER_SECONDS:
            for process in attempt.processes:
                process.kill()
        time.sleep(0.1)
    for reader in attempt.readers:
        reader.join(5)
    return [process.wait() for process in attempt.processes]


def _what_failed(attempt: _Attempt, codes: Sequence[int]) -> str:
    """The first fault that a rank has left, with its last lines; else how the programs ended."""
    if fault := first_fault(attempt.logs):
        return fault
    ended = ", ".join(
        f"{host.name or 'this machine'}: exit code {code}"
        for host, code in zip(attempt.hosts, codes, strict=True)
        if code
    )
    return f"no rank has said why it failed ({ended}); all output is in {attempt.logs}"
