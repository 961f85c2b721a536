"""Own a folder while writing it, so that two preparations of the same shards do not mix."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from recipes.errors import UserError

WAIT_SECONDS = 5.0  # workers of a killed preparation hold the folder until they notice, a moment later


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and keep every other process out of it; a killed process leaves no lock behind.

    Raises:
        UserError: another process is writing it.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    descriptor = _try(folder)
    while descriptor is None:
        if time.monotonic() > deadline:
            raise UserError(f"another process is writing {folder}; wait for it, or change data.shards")
        time.sleep(0.05)
        descriptor = _try(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _try(folder: Path) -> int | None:
    """An open and locked descriptor of the folder, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the other process may have renamed it away between these two calls
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
