"""A job's own temporary folder for the streaming library's lock files, and the end of what a killed job left behind.

The library coordinates the ranks of a host through lock files in the temporary folder and segments in shared memory,
named by a number. A job that is killed leaves both. Each process of a job therefore notes in
the job's folder who it is and which number it took; the next job in that folder removes what belongs to dead
processes only.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from streaming.base.shared import prefix as library_prefix

SHARED_MEMORY = Path("/dev/shm")
NUMBERS = 10**9  # so many jobs' first numbers; the names stay short
PATIENCE = 1.0  # seconds that a process waits to leave in order; another one removes the folder then


class Scratch:
    """The part of a job's temporary folder that belongs to this host, shared by the job's processes on it.

    `close()` withdraws this process, and so does the end of the process.
    """

    def __init__(self, temp_dir: str | Path | None) -> None:
        if temp_dir is None:
            self.folder = Path(tempfile.mkdtemp(prefix="longpitch-"))
        else:
            self.folder = Path(temp_dir).absolute() / socket.gethostname()
        with _alone(self.folder):
            _sweep(self.folder)
            handle, name = tempfile.mkstemp(prefix=f"process-{os.getpid()}-", suffix=".json", dir=self.folder)
            os.close(handle)
        self._note = Path(name)
        self.close = weakref.finalize(self, _withdraw, self._note, temp_dir is not None)

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """Let what the library makes inside the block be named after this folder, alike in all processes of the job.

        The library counts from 0, so that two jobs that start together take the same number and one of them dies.
        The temporary folder is set inside the block only: the paths of sockets made later must stay short.
        """
        first = first_number(self.folder)
        temporary_folder, numbers = tempfile.tempdir, library_prefix._each_prefix_int
        tempfile.tempdir, library_prefix._each_prefix_int = str(self.folder), partial(itertools.count, first)
        try:
            yield
        finally:
            tempfile.tempdir, library_prefix._each_prefix_int = temporary_folder, numbers

    def note_segments(self, prefix: int) -> None:
        """Write down that this process owns the shared memory segments numbered `prefix`."""
        with contextlib.suppress(OSError):  # a system without /dev/shm has nothing to sweep
            inode = _locals(prefix).stat().st_ino
            self._note.write_text(json.dumps({"prefix": prefix, "inode": inode}))


def first_number(folder: Path) -> int:
    """The number from which the segments of the job in `folder` count."""
    return int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:8]) % NUMBERS


def remove_segments(prefix: int) -> None:
    """Remove the shared memory numbered `prefix`; processes that look at it go on doing so."""
    for segment in SHARED_MEMORY.glob(f"{prefix:06}_*"):
        segment.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make the folder; no other process comes or goes meanwhile, so that none is removed that has just been entered."""
    while (descriptor := _enter(folder)) is None:
        pass  # the last process of before removed it meanwhile
    try:
        yield
    finally:
        os.close(descriptor)


def _enter(folder: Path) -> int | None:
    """An open and locked descriptor of the folder that lies there now, or None."""
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(FileExistsError):  # it was there, and was removed before pathlib looked what it is
            folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_there(descriptor, folder):
            return descriptor
        os.close(descriptor)
    return None


def _is_there(descriptor: int, folder: Path) -> bool:
    """Whether the open folder is still the one of that name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    return False


def _withdraw(note: Path, has_shared_parent: bool) -> None:
    """Remove a process's note; the last process of the host removes the folder."""
    if _process_of(note) != os.getpid():  # a forked child holds a copy of what its parent must close
        return
    note.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        descriptor = os.open(note.parent, os.O_RDONLY)
        try:
            if _locked(descriptor) and _is_there(descriptor, note.parent) and not _living_notes(note.parent):
                shutil.rmtree(note.parent, ignore_errors=True)
                if has_shared_parent:
                    with contextlib.suppress(OSError):  # other hosts may still use it
                        note.parent.parent.rmdir()
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock, but not for ever: garbage collection may withdraw a process that is just coming in."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def _locals(prefix: int) -> Path:
    return SHARED_MEMORY / f"{prefix:06}_locals"


def _process_of(note: Path) -> int:
    return int(note.name.split("-")[1])


def _is_alive(note: Path) -> bool:
    try:
        os.kill(_process_of(note), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, another user's
        return True
    return True


def _living_notes(folder: Path) -> list[Path]:
    try:
        notes = sorted(folder.glob("process-*.json"))
    except FileNotFoundError:  # another process of the job was the last one
        return []
    return [note for note in notes if _is_alive(note)]


def _sweep(folder: Path) -> None:
    """Remove the notes of dead processes, and the segments that are still the ones those processes made."""
    for note in folder.glob("process-*.json"):
        if _is_alive(note):
            continue
        with contextlib.suppress(OSError, ValueError):
            owned = json.loads(note.read_text())
            if _locals(owned["prefix"]).stat().st_ino == owned["inode"]:
                remove_segments(owned["prefix"])
        note.unlink(missing_ok=True)
