"""Own a folder while writing it, so that two preparations of the same shards do not mix."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make `folder` empty and keep every other process out of it; a killed process leaves no lock behind.

    Raises:
        ValueError: another process is writing it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the other process may have renamed it away between these two calls
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise BlockingIOError
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    except BlockingIOError as error:
        raise ValueError(f"another process is writing {folder}; wait for it, or change data.shards") from error
    finally:
        os.close(descriptor)
