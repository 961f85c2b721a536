"""Prove that a split of shards is whole, and that it fits a recipe, before anything reads it.

The streaming library meets a missing or damaged shard in a background thread and then ends the epoch early, or leaves
another rank waiting; so everything that can be seen beforehand is checked here, and named.
"""

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.fingerprint import file_hash, tokenizer_files_hash, tokenizer_hash
from data_prep.recall import MASKS_OF
from recipes.errors import UserError

WAY_OUT = "restore the file from a copy, or remove the folder and run `longpitch prep` again"


class DataError(UserError):
    """Shards that cannot be read; the message is one sentence naming the file and the way out."""


@dataclass(frozen=True)
class Split:
    """What the index of a checked split says."""

    folder: Path
    num_sequences: int
    seq_length: int
    columns: frozenset[str]
    index_hash: str  # xxh64 of index.json, which holds every shard's size and hash

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        object.__setattr__(self, "columns", frozenset(self.columns))


def check_split(folder: str | Path, *, verify_hashes: bool = False, has_shards: bool = True) -> Split:
    """Check that every shard of the index exists with its size and sample count, and by option its hash.

    Args:
        has_shards: False for a cache, whose shards come as they are read: only the index is checked.

    Raises:
        DataError: names the first file that is missing or damaged.
    """
    folder = Path(folder)
    shards = read_index(folder)
    for shard in shards if has_shards else ():
        _check_shard(folder, shard, verify_hashes)
    columns = {name: code for s in shards for name, code in zip(s["column_names"], s["column_encodings"], strict=True)}
    return Split(
        folder=folder,
        num_sequences=sum(shard["samples"] for shard in shards),
        seq_length=_seq_length(folder, columns),
        columns=frozenset(columns),
        index_hash=file_hash(folder / "index.json"),
    )


def split_facts(split: Split) -> dict[str, Any]:
    """A checked split as JSON can hold it; `Split(**facts)` is the split again."""
    return asdict(split) | {"folder": str(split.folder), "columns": sorted(split.columns)}


def check_masks(split: Split, recall_beta: float, switch_beta: float) -> None:
    """Refuse weights for masks that the split does not hold, or that speak of what a sequence does not hold."""
    for name, beta in (("recall", recall_beta), ("switch", switch_beta)):
        if beta and name not in split.columns:
            raise UserError(
                f"train.{name}_beta is {beta} but {split.folder} has no {name} masks; set it to 0, or prepare the"
                " shards with data.recall_masks: true"
            )
    if (recall_beta or switch_beta) and (split.folder.parent / "manifest.json").is_file():
        made_of = read_manifest(split.folder.parent).get("settings", {}).get("recall_masks")
        if made_of != MASKS_OF:
            raise UserError(
                f"the recall masks of {split.folder.parent} mark copies from outside their sequence too (its manifest"
                f" states recall_masks: {made_of}, not {MASKS_OF}); prepare the shards anew, or set train.recall_beta"
                " and switch_beta to 0"
            )


def read_index(folder: Path) -> list[dict[str, Any]]:
    """The entries of a split's index, one for each shard.

    Raises:
        DataError: it is damaged, or asks for what prep never writes: names that lead out of the folder, compressed
            shards, columns that are no arrays of numbers (the library would unpickle them).
    """
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; run `longpitch prep` to make the shards") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); {WAY_OUT}") from error
    needed = ("samples", "raw_data", "column_names", "column_encodings", "format", "version")
    shards = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(shards, list) or not shards:
        raise DataError(f"{path} lists no shards; {WAY_OUT}")
    for number, shard in enumerate(shards):
        absent = [key for key in needed if not isinstance(shard, dict) or key not in shard]
        if absent or not isinstance(shard["raw_data"], dict) or not {"basename", "bytes"} <= set(shard["raw_data"]):
            raise DataError(f"{path} lacks {', '.join(absent) or 'raw_data'} for shard {number}; {WAY_OUT}")
        single_name(shard["raw_data"]["basename"], path)
        if (shard["format"], shard["version"]) != ("mds", 2) or shard.get("zip_data") or shard.get("compression"):
            raise DataError(
                f"{path}: shard {number} is none that prep writes (uncompressed MDS of version 2); {WAY_OUT}"
            )
        others = [code for code in shard["column_encodings"] if not str(code).startswith("ndarray:")]
        if others:
            raise DataError(
                f"{path}: shard {number} holds {others[0]} where only arrays of numbers are read; {WAY_OUT}"
            )
    return shards


def single_name(name: Any, path: str | Path) -> str:
    """A file's or folder's name that `path` states, which must not lead out of the folder that it is meant for.

    Raises:
        DataError: it is more than one component of a path, or none.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(letter in name for letter in "/\\\0"):
        raise DataError(f"{path} names {name!r} where a file name without folders belongs; do not use these shards")
    return name


def _check_shard(folder: Path, shard: dict[str, Any], verify_hashes: bool) -> None:
    path, stated = folder / shard["raw_data"]["basename"], shard["raw_data"]
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = file.read(4)
    except OSError as error:
        raise DataError(f"shard {path} cannot be read ({error.strerror}); {WAY_OUT}") from error
    if size != stated["bytes"] or len(header) < 4:
        raise DataError(f"shard {path} has {size} bytes where the index states {stated['bytes']}; {WAY_OUT}")
    (samples,) = struct.unpack("<I", header)
    if samples != shard["samples"]:
        raise DataError(f"shard {path} holds {samples} sequences where the index states {shard['samples']}; {WAY_OUT}")
    if verify_hashes:
        expected = stated.get("hashes", {}).get("xxh64")
        if expected is None:
            raise DataError(f"shard {path} has no xxh64 hash in its index; set data.verify_hashes: false")
        if file_hash(path) != expected:
            raise DataError(f"shard {path} has other contents than its hash states; {WAY_OUT}")


def _seq_length(folder: Path, columns: dict[str, str]) -> int:
    kind, _, rest = columns.get("tokens", "").partition(":")
    dtype, _, length = rest.partition(":")
    if kind != "ndarray" or dtype not in ("uint16", "uint32") or not length.isdigit() or "doc_lengths" not in columns:
        raise DataError(f"{folder} holds no packed token sequences; point data.shards at a folder made by prep")
    return int(length)


def read_manifest(shards: str | Path) -> dict[str, Any]:
    """The manifest of a finished folder of shards."""
    path = Path(shards) / "manifest.json"
    try:
        return parse_manifest(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; run `longpitch prep` to make the shards") from error


def parse_manifest(content: bytes, path: str | Path) -> dict[str, Any]:
    """The manifest in `content`, which was read from `path`; its splits are names of folders beside it."""
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); {WAY_OUT}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("splits"), dict):
        raise DataError(f"{path} lists no splits; {WAY_OUT}")
    for name in manifest["splits"]:
        single_name(name, path)
    return manifest


def check_manifest(
    shards: str | Path,
    *,
    seq_length: int,
    vocab_size: int,
    tokenizer: str | None = None,
    expected_tokenizer: str | None = None,
) -> dict[str, Any]:
    """Check that finished shards fit a recipe and are unchanged since their manifest was written; returns it.

    Args:
        seq_length, vocab_size: of the model.
        tokenizer: data.tokenizer of the recipe, if it names one.
        expected_tokenizer: hash of the tokenizer that a checkpoint was trained with, if there is one.

    Raises:
        UserError: the recipe asks for something else than the shards hold.
        DataError: an index or the tokenizer is not the one that the manifest names.
    """
    shards, manifest = Path(shards), read_manifest(shards)
    for name in ("seq_length", "vocab_size", "tokenizer_hash"):
        if name not in manifest:
            raise DataError(f"{shards / 'manifest.json'} lacks {name}; {WAY_OUT}")
    if manifest["seq_length"] != seq_length:
        raise UserError(
            f"{shards} holds sequences of {manifest['seq_length']} tokens but model.seq_length is {seq_length};"
            " change one, or prepare other shards"
        )
    if manifest["vocab_size"] > vocab_size:
        raise UserError(
            f"the tokenizer of {shards} has {manifest['vocab_size']} entries but model.vocab_size is {vocab_size};"
            f" raise it to at least {manifest['vocab_size']}"
        )
    _check_named_tokenizer(shards, manifest, tokenizer)
    if expected_tokenizer not in (None, manifest["tokenizer_hash"]):
        raise UserError(
            f"{shards} was tokenized with another tokenizer than the checkpoint or other shards; prepare it anew"
        )
    for name, split in manifest["splits"].items():
        index = shards / name / "index.json"
        if not index.is_file() or file_hash(index) != split["index_hash"]:
            raise DataError(f"{index} is not the one that manifest.json names; {WAY_OUT}")
    try:
        unchanged = tokenizer_hash(shards / "tokenizer") == manifest["tokenizer_hash"]
    except (OSError, ValueError):
        unchanged = False
    if not unchanged:
        raise DataError(f"{shards / 'tokenizer'} is not the one that manifest.json names; {WAY_OUT}")
    return manifest


def _check_named_tokenizer(shards: Path, manifest: dict[str, Any], tokenizer: str | None) -> None:
    """Refuse shards that another tokenizer made than the one a recipe names, where that one is at hand."""
    then = manifest.get("settings", {}).get("tokenizer_files_hash")
    if tokenizer is None or then is None:
        return
    if tokenizer_files_hash(tokenizer) not in (None, then):
        raise UserError(f"{shards} was tokenized with another tokenizer than {tokenizer}; prepare it with that one")
