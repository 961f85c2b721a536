"""Weights on disk as safetensors: read one tensor at a time, written in shards with an index as Hugging Face lays them.

Neither side ever holds the whole model: a tensor is mapped when it is asked for, and a shard leaves memory when full.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from recipes.errors import UserError
from recipes.files import check_whole, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 1 << 30


class WeightsError(UserError):
    """Weights that cannot be read, or a place where they cannot be written; the message names it and the way out."""


class StoredWeights(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name; each is read from disk when it is asked for, and kept by nobody.

    Raises:
        WeightsError: the folder holds no safetensors, or an index that names a file that is not there.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._files = self._locate()

    def _locate(self) -> dict[str, Path]:
        single, index = self.folder / SINGLE, self.folder / INDEX
        if index.exists():
            places = read_json(index).get("weight_map")
            if not (isinstance(places, dict) and all(isinstance(file, str) for file in places.values())):
                raise WeightsError(f"{index} has no weight_map of names of files; copy it again")
            for file in places.values():
                if file in ("", "..") or Path(file).name != file or not file.isprintable():
                    raise WeightsError(f"{index} names {file!r}, which does not lie beside it; put all files there")
            found = {name: self.folder / file for name, file in places.items()}
            for file in sorted(set(found.values())):
                self._check_listed(file, {name for name in found if found[name] == file})
            return found
        if single.exists():
            return dict.fromkeys(self._names_in(single), single)
        raise WeightsError(f"{self.folder} holds neither {SINGLE} nor {INDEX}; name a folder with safetensors weights")

    def _names_in(self, file: Path) -> list[str]:
        try:
            check_whole(file)
            with safe_open(file, "pt") as opened:
                return list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} cannot be read ({error}); copy it again") from error

    def _check_listed(self, file: Path, listed: set[str]) -> None:
        """The index and the file must agree: a tensor that only one of them has would be lost without a word."""
        differing = sorted(listed ^ set(self._names_in(file)))
        if differing:
            raise WeightsError(f"{file} and {self.folder / INDEX} disagree about {some(differing)}; copy both again")

    def __getitem__(self, name: str) -> torch.Tensor:
        # opened anew each time: the pages that were read go with the tensor
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, without reading it."""
        with safe_open(self._files[name], "pt") as opened:
            return list(opened.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class ShardWriter:
    """Writes tensors in the order they are added: one file, or numbered files with an index when they exceed a size."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES):
        self.folder, self.shard_bytes = folder, shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._size, self.total_bytes = 0, 0
        self._places: list[list[str]] = []  # names in each file so far
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; nothing may write to its memory afterwards."""
        assert tensor.numel() > 0, name
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._size + size > self.shard_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._size += size
        self.total_bytes += size

    def _flush(self) -> None:
        path = self._partial(len(self._places))
        path.touch()
        mode = path.stat().st_mode
        save_file(self._shard, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors lets nobody but the owner read
        self._places.append(list(self._shard))
        self._shard, self._size = {}, 0

    def _partial(self, number: int) -> Path:
        return self.folder / f"partial-{number}.safetensors"

    def close(self) -> None:
        """Write what is left, give the files their names, and write the index if there are several."""
        self._flush()
        count = len(self._places)
        if count == 1:
            self._partial(0).rename(self.folder / SINGLE)
            return
        where = {}
        for number, names in enumerate(self._places):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._partial(number).rename(self.folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1))


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` at the end, and only if all went well.

    Raises:
        WeightsError: `path` exists and is not an empty folder.
    """
    path = Path(path).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WeightsError(f"{path} exists already; remove it or name another --out")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def some(names: list[str]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
