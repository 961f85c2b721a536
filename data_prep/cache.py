"""Shards at a URL: their small files copied at once, their shards when they are read, within a limit.

The cache is a folder of its own below which nothing else lies, and every file in it is a copy of one at the URL. What
has no URL has no cache, so the limit can never delete the only copy of anything.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.fingerprint import file_hash
from data_prep.guard import DataError, parse_manifest, read_index, read_manifest, single_name
from data_prep.remote import file_system, is_url, named_errors
from recipes.errors import UserError

SHARDS_THAT_MUST_FIT = 4  # of the largest, so that reading ahead does not chase out what is read
LOCK = ".lock"


@dataclass(frozen=True)
class ShardFolder:
    """A prepared folder as this host sees it.

    Attributes:
        path: the local folder; for a URL, the cache, where shards are missing until they are read.
        url: where the originals lie, None if they lie at `path`.
        limit: bytes that training shards in the cache may take up, 0 for no limit; the held-out split stays.
    """

    path: Path
    url: str | None = None
    limit: int = 0

    def fetch(self, split: str, stated: dict[str, Any]) -> None:
        """Have a shard in the cache, whole by size and hash; any number of processes may ask at once.

        Args:
            stated: the shard's `raw_data` in its index.

        Raises:
            DataError: it cannot be had, or arrives damaged; a damaged copy is removed.
        """
        target = self.path / split / stated["basename"]
        if target.exists():
            with contextlib.suppress(OSError):
                os.utime(target)  # the limit takes what has not been used for longest
            return
        with _locked(self.path):
            if target.exists():
                return
            if self.limit:
                self._make_room(split, stated["bytes"])
            _download_shard(f"{self.url}/{split}", stated, target)

    def _make_room(self, split: str, wanted: int) -> None:
        files = sorted((self.path / split).glob("*.mds"), key=lambda file: file.stat().st_mtime)
        used = sum(file.stat().st_size for file in files)
        for file in files:
            if used + wanted <= self.limit:
                return
            used -= file.stat().st_size
            file.unlink()  # a process that has it open reads on; one that wants it again fetches it again

    def check_originals(self, split: str) -> None:
        """Check that every shard of the index lies at the URL with its size."""
        fs, place = file_system(f"{self.url}/{split}")
        with named_errors(f"{self.url}/{split} cannot be listed"):
            sizes = {info["name"].rsplit("/", 1)[-1]: info["size"] for info in fs.ls(place, detail=True)}
        for entry in read_index(self.path / split):
            stated = entry["raw_data"]
            size = sizes.get(stated["basename"])
            if size != stated["bytes"]:
                found = "does not exist" if size is None else f"has {size} bytes where the index states "
                found += "" if size is None else str(stated["bytes"])
                raise DataError(f"{self.url}/{split}/{stated['basename']} {found}; copy the prepared folder again")


def open_shards(shards: str | Path, cache: str | Path, limit: int = 0) -> ShardFolder:
    """A prepared folder, local as it is or at a URL through a cache.

    Args:
        cache: folder for copies; each URL gets its own folder in it.
        limit: bytes of the shards in it per URL, 0 for no limit.

    Raises:
        UserError: the limit is too small, the cache lies in a folder of originals, or a package for such URLs is
            missing.
        DataError: what lies at the URL is no prepared folder, or cannot be read, or names files outside itself.
    """
    if not is_url(str(shards)):
        return ShardFolder(Path(shards).expanduser().absolute())
    url = str(shards).rstrip("/")
    path = Path(cache).expanduser().absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]
    if url.startswith("file://") and path.is_relative_to(url.removeprefix("file://")):
        raise UserError(f"data.cache {cache} lies inside {url}; name a folder outside it")
    path.mkdir(parents=True, exist_ok=True)
    folder = ShardFolder(path, url, limit)
    with _locked(path):
        _copy_small_files(folder)
    largest = max(e["raw_data"]["bytes"] for name in read_manifest(path)["splits"] for e in read_index(path / name))
    if limit and limit < SHARDS_THAT_MUST_FIT * largest:
        raise UserError(
            f"data.cache_gib allows {limit} bytes but {SHARDS_THAT_MUST_FIT} shards of {url} of up to {largest} bytes"
            " must fit; raise it, or set it to 0 for no limit"
        )
    return folder


def _copy_small_files(folder: ShardFolder) -> None:
    """Manifest, tokenizer, indices and the held-out split; a changed original empties the cache first.

    Nothing is written before the names in the manifest, and no shard before those in the indices, have been checked.
    """
    fs, place = file_system(folder.url or "")
    with named_errors(f"{folder.url}/manifest.json cannot be read", "name a folder made by prep"):
        manifest = fs.cat_file(f"{place}/manifest.json")
    known = folder.path / "manifest.json"
    if known.is_file() and known.read_bytes() == manifest:
        return
    splits = list(parse_manifest(manifest, f"{folder.url}/manifest.json")["splits"])
    with named_errors(f"{folder.url} is no folder made by prep"):
        files = [info["name"] for info in fs.ls(f"{place}/tokenizer", detail=True) if info["type"] == "file"]
    tokenizer = [single_name(file.rsplit("/", 1)[-1], f"{folder.url}/tokenizer") for file in files]
    for entry in folder.path.iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name in [*(f"{split}/index.json" for split in splits), *(f"tokenizer/{file}" for file in tokenizer)]:
        _download(f"{folder.url}/{name}", folder.path / name)
    entries = {split: read_index(folder.path / split) for split in splits}
    for entry in entries.get("heldout", []):
        stated = entry["raw_data"]
        _download_shard(f"{folder.url}/heldout", stated, folder.path / "heldout" / stated["basename"])
    known.write_bytes(manifest)  # last: without it everything is copied again


def _download_shard(url: str, stated: dict[str, Any], target: Path) -> None:
    """Copy the shard that an index states from the folder at `url`."""
    digest = (stated.get("hashes") or {}).get("xxh64")
    if digest is None:
        raise DataError(f"{url}/index.json has no xxh64 hash of {stated['basename']}; prepare the shards anew")
    _download(f"{url}/{stated['basename']}", target, stated["bytes"], digest)


def _download(url: str, target: Path, size: int | None = None, digest: str | None = None) -> None:
    fs, place = file_system(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".partial")  # the lock is held
    try:
        with named_errors(f"{url} cannot be copied to {target}"):
            fs.get_file(place, str(aside))
    except DataError:
        aside.unlink(missing_ok=True)
        raise
    if (size is not None and aside.stat().st_size != size) or (digest is not None and file_hash(aside) != digest):
        aside.unlink()
        raise DataError(f"{url} is damaged: its size or hash is not what the index states; copy it there again")
    os.rename(aside, target)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of this host at a time."""
    with open(folder / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
