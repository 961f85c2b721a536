"""Tokenized blocks on disk: what a preparation has done so far, whole or absent whenever it is killed.

    KEY.bin     token ids | document lengths (uint32) | document hashes (2 x uint64)
    KEY.json    how much of each, and which part of which files it holds; written last

A document's hash is that of its text.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from recipes.errors import UserError

OPEN_FILES = 128  # kept open by a process that gathers documents
IN_A_FOLDER = 1000


def block_path(folder: Path, key: str, suffix: str) -> Path:
    """Where a part of a block lies; files of a corpus are spread over folders."""
    return folder / f"{int(key.split('-')[0]) // IN_A_FOLDER:06}" / f"{key}{suffix}"


def write_file(path: Path, *parts: bytes, sync: bool = True) -> None:
    """Write a file so that it is whole or absent, also after a loss of power.

    Args:
        sync: False spares the wait for the disk; a loss of power may then leave the file empty or cut off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with open(aside, "wb") as file:
        for part in parts:
            file.write(part)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.rename(aside, path)


def write_block(
    folder: Path,
    key: str,
    facts: dict[str, Any],
    documents: Sequence[np.ndarray],
    hashes: Sequence[tuple[int, int]],
    dtype: np.dtype,
) -> dict[str, Any]:
    """Write one block; returns its facts with what was added to them.

    Args:
        documents: token ids of each.
        hashes: two 64-bit halves for each document.
        dtype: of the token ids.
    """
    tokens = np.concatenate([np.zeros(0, dtype), *documents])
    lengths = np.array([len(document) for document in documents], dtype=np.uint32)
    table = np.array(hashes, dtype=np.uint64).reshape(-1, 2)
    write_file(block_path(folder, key, ".bin"), tokens.tobytes(), lengths.tobytes(), table.tobytes())
    facts = facts | {"documents": len(documents), "tokens": len(tokens)}
    write_file(block_path(folder, key, ".json"), json.dumps(facts, ensure_ascii=False).encode(), sync=False)
    return facts


def read_facts(folder: Path, key: str) -> dict[str, Any] | None:
    """What is known of a finished block; None if there is no such, or its file did not outlive a loss of power."""
    try:
        return json.loads(block_path(folder, key, ".json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True)
class Corpus:
    """All documents of the finished blocks, in the order of the corpus. Letters: D documents."""

    folder: Path
    dtype: np.dtype
    keys: list[str]  # of the blocks
    lengths: np.ndarray  # uint32 [D], tokens
    blocks: np.ndarray  # uint32 [D], index of the block
    starts: np.ndarray  # uint32 [D], first token in the block
    hashes: np.ndarray  # uint64 [D, 2]
    sources: np.ndarray  # uint16 [D], index of the source

    def read(self, document: int, start: int, count: int) -> np.ndarray:
        """Token ids [count] from token `start` of a document on."""
        block = int(self.blocks[document])
        file = _descriptor(self.folder, self.keys[block]).number
        size, first = self.dtype.itemsize, int(self.starts[document]) + start
        tokens = np.frombuffer(os.pread(file, count * size, first * size), dtype=self.dtype)
        if len(tokens) != count:
            raise UserError(f"{self.keys[block]}.bin in {self.folder} is cut off; remove the folder and prepare again")
        return tokens


@lru_cache(maxsize=OPEN_FILES)
def _descriptor(folder: Path, key: str) -> "_Descriptor":
    return _Descriptor(block_path(folder, key, ".bin"))


class _Descriptor:
    """A file that is closed when the cache lets go of it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


def load_corpus(folder: Path, facts: dict[str, dict[str, Any]], dtype: np.dtype) -> Corpus:
    """The table of all documents.

    Args:
        facts: of every block, by key.
    """
    keys = sorted(facts)
    lengths, hashes, starts = [np.zeros(0, np.uint32)], [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.uint32)]
    for key in keys:
        count = facts[key]["documents"]
        with open(block_path(folder, key, ".bin"), "rb") as file:
            file.seek(facts[key]["tokens"] * dtype.itemsize)
            lengths.append(np.frombuffer(file.read(4 * count), dtype=np.uint32))
            hashes.append(np.frombuffer(file.read(16 * count), dtype=np.uint64).reshape(-1, 2))
        starts.append((np.cumsum(lengths[-1], dtype=np.int64) - lengths[-1]).astype(np.uint32))
    counts = [facts[key]["documents"] for key in keys]
    return Corpus(
        folder,
        dtype,
        keys,
        np.concatenate(lengths),
        np.repeat(np.arange(len(keys), dtype=np.uint32), counts),
        np.concatenate(starts),
        np.concatenate(hashes),
        np.repeat(np.array([facts[key]["source"] for key in keys], dtype=np.uint16), counts),
    )
