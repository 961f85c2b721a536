"""What the processes of a job share on one host: a folder outside the run directory, and checks that one does for all.

A run directory lies on a file system that all hosts share; what belongs to one host lies on its own disk. The folder is
known by user, host and run directory: a job that goes on finds there what its predecessor left.
"""

import fcntl
import hashlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.guard import DataError
from recipes.errors import UserError

ERRORS = {"DataError": DataError, "UserError": UserError}


def host_folder(run_dir: str | Path) -> Path:
    """This host's folder for a run, in the system's temporary folder ($TMPDIR); it is not made yet.

    Raises:
        UserError: somebody else has taken the user's folder there.
    """
    mine = Path(tempfile.gettempdir()).absolute() / f"longpitch-{os.getuid()}"
    mine.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = mine.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise UserError(f"{mine} can be written by somebody else; remove it, or set TMPDIR to a folder of your own")
    name = f"{socket.gethostname()}:{Path(run_dir).expanduser().resolve()}"
    return mine / hashlib.sha256(name.encode()).hexdigest()[:16]


def once_per_host(folder: Path, name: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `check()` returns or raises, called by one process for all that ask meanwhile for the same `name`.

    A verdict holds while the process that gave it is alive, so that nothing a killed job leaves behind counts. A
    process that dies while it checks leaves the check to the next one.

    Args:
        folder: of this job on this host; it exists.
        check: returns what JSON can hold.
    """
    path = folder / f"checked-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        verdict: dict[str, Any] | None = _living_verdict(path, name)
        if verdict is None:
            try:
                verdict = {"found": check()}
            except Exception as error:
                _write(path, {"error": type(error).__name__, "sentence": str(error), "name": name})
                raise
            _write(path, verdict | {"name": name})
    if "error" in verdict:
        raise ERRORS.get(verdict["error"], OSError)(verdict["sentence"])
    return verdict["found"]


def _write(path: Path, verdict: dict[str, Any]) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(verdict | {"process": [os.getpid(), _started(os.getpid())]}))
    os.rename(aside, path)


def _living_verdict(path: Path, name: str) -> dict[str, Any] | None:
    try:
        verdict = json.loads(path.read_bytes())
        number, started = verdict["process"]
        same = verdict["name"] == name and _started(number) == started
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if same else None


def _started(process: int) -> str | None:
    """When a living process started, by which it is told from a later one of the same number; None if it is dead.

    Raises:
        OSError: there is no such process any more.
    """
    os.kill(process, 0)
    status = Path(f"/proc/{process}/stat")
    if not status.exists():  # a system without /proc: the number must do
        return ""
    fields = status.read_text().rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # dead ones whose parent has not noticed
