"""All ranks go on from one checkpoint in one folder: rank 0 decides, and the others say whether they see it."""

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext import deepspeed_files
from megatron_ext.checkpoint_files import MARK, CheckpointError, newest_whole, read_facts, sweep
from megatron_ext.parallel.collectives import from_rank_0, gather_objects
from megatron_ext.parallel.layout import Layout
from recipes.errors import UserError

SEEN_LIMIT = 60.0  # seconds after which a file that another node has written is on no shared disk
POLL_SECONDS = 0.1


def on_rank_0(function: Callable[[], Any], rank: int) -> Any:
    """What `function` returns on rank 0, on every rank; an error of a person's is raised on all of them. Collective."""
    outcome, failed = (None, "rank 0 has failed"), None
    if rank == 0:
        try:
            outcome = (function(), None)
        except UserError as error:
            outcome = (None, str(error))
        except OSError as error:
            outcome = (None, f"{error.filename or 'a file'}: {error.strerror or error}; free space or see to the disk")
        except BaseException as error:
            failed = error
    found, sentence = from_rank_0(outcome)
    if failed is not None:
        raise failed
    if sentence is not None:
        raise CheckpointError(sentence)
    return found


def agree(problem: str | None) -> None:
    """Raise the first rank's problem on all ranks, None where there is none. Collective."""
    problems = [(rank, said) for rank, said in enumerate(gather_objects(problem)) if said]
    if problems:
        others = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
        raise CheckpointError(f"rank {problems[0][0]}{others}: {problems[0][1]}")


def comes(ready: Callable[[], bool], limit_seconds: float) -> bool:
    """Whether `ready()` becomes true in time."""
    end = time.monotonic() + limit_seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def check_shared(folder: Path, rank: int, *, limit_seconds: float = SEEN_LIMIT) -> None:
    """Prove that `folder` is one and the same for all ranks: they see what rank 0 writes there. Collective.

    Raises:
        CheckpointError: some do not, after `limit_seconds`.
    """

    def write() -> tuple[str, str]:
        for left in folder.glob(".shared_*"):
            left.unlink(missing_ok=True)
        token = folder / f".shared_{secrets.token_hex(8)}"
        token.touch()
        return token.name, socket.gethostname()

    name, host = on_rank_0(write, rank)
    problem = None
    if not comes((folder / name).exists, limit_seconds):
        problem = (
            f"{folder} on {socket.gethostname()} is not the folder of rank 0 on {host}, which wrote what is not there "
            f"after {limit_seconds:g} s; choose a run_dir on a disk that all nodes share"
        )
    try:
        agree(problem)
    finally:
        if rank == 0:
            (folder / name).unlink(missing_ok=True)


def choose(
    folder: Path, layout: Layout, *, warn: Callable[[str], None], limit_seconds: float = SEEN_LIMIT
) -> Path | None:
    """The newest whole checkpoint under `folder`, None where there is none; rank 0 decides, all see it. Collective.

    What kills have left there is removed.

    Args:
        warn: takes a sentence on each newer one that is damaged; called on rank 0.

    Raises:
        CheckpointError: all are damaged, a file of the newest whole one cannot be read, or a rank does not see it.
    """

    def look() -> tuple[str, str, str | None] | None:
        sweep(folder)
        path, damaged = newest_whole(folder)
        for what in damaged if path else ():
            warn(f"{what}; going on from {path}, which is whole")
        if damaged and path is None:
            raise CheckpointError(
                f"{damaged[0]}; no checkpoint of this run is whole: restore it, or move {folder} away to start again"
            )
        if path is None:
            return None
        older = newest_whole(folder, before=path)[0]
        return path.name, _digest(path), older and str(older)

    found = on_rank_0(look, layout.rank)
    if found is None:
        return None
    name, digest, older = found
    path = folder / name
    seen = comes(lambda: _digest(path) == digest, limit_seconds)
    agree(None if seen else f"{path / MARK} is not what rank 0 sees, after {limit_seconds:g} s; is that one folder?")
    written = read_facts(path).get("files", [])[layout.rank :: layout.world]
    files = [path / file for each in written for file in each]
    problem = deepspeed_files.unreadable(files, layout.device)
    way_out = f"the same command then goes on from {older}" if older else "no older one is whole"
    agree(problem and f"{problem} ({way_out})")
    return path


def _digest(checkpoint: Path) -> str:
    try:
        return hashlib.sha256((checkpoint / MARK).read_bytes()).hexdigest()
    except OSError:
        return ""


def check_alike(facts: dict, what: str) -> None:
    """Refuse to go on where `facts`, which JSON can hold, are not the same on all ranks. Collective."""
    everyone = gather_objects(json.dumps(facts, sort_keys=True, default=str))
    wrong = [rank for rank, one in enumerate(everyone) if one != everyone[0]]
    if wrong:
        raise CheckpointError(f"{what}: rank {wrong[0]} has {everyone[wrong[0]][:300]}, rank 0 has {everyone[0][:300]}")
