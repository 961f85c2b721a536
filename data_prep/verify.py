"""Prove that a finished folder of shards is whole: every file, byte, sequence and count that its manifest states."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.fingerprint import file_hash, manifest_hash, tokenizer_hash
from data_prep.guard import WAY_OUT, DataError, read_index, read_manifest
from data_prep.pool import num_cores, run_tasks
from data_prep.recall import MASKS
from data_prep.shards import entropy_nats, label_tokens

MOST_SAID = 20  # faults that are listed; the rest is counted


def verify(shards: str | Path, workers: int = 0) -> dict[str, Any]:
    """Read everything in a folder that `prepare` wrote; returns its manifest.

    Args:
        workers: processes; 0 takes one for each core.

    Raises:
        DataError: something is missing, damaged, too much, or not what the manifest states; every file is named.
    """
    shards = Path(shards).expanduser()
    manifest = read_manifest(shards)
    faults = []
    if manifest.get("hash") != manifest_hash(manifest):
        faults.append(f"{shards / 'manifest.json'} was changed after it was written")
    for name in ("seq_length", "vocab_size", "tokenizer_hash", "tokens", "sequences", "bytes"):
        if name not in manifest:
            raise DataError(f"{shards / 'manifest.json'} lacks {name}; {WAY_OUT}")
    faults += _tokenizer_faults(shards, manifest)
    for name, stated in manifest["splits"].items():
        faults += _split_faults(shards, name, stated, manifest, workers or num_cores())
    for name in ("tokens", "sequences", "bytes"):
        total = sum(split[name] for split in manifest["splits"].values())
        if total != manifest[name]:
            faults.append(f"manifest.json states {manifest[name]} {name} but its splits {total}")
    known = {*manifest["splits"], "tokenizer", "manifest.json", "left_out.txt"}
    faults += [f"{entry} does not belong here" for entry in sorted(shards.iterdir()) if entry.name not in known]
    if faults:
        more = f"; and {len(faults) - MOST_SAID} more" if len(faults) > MOST_SAID else ""
        raise DataError(f"{'; '.join(faults[:MOST_SAID])}{more}; {WAY_OUT}")
    return manifest


def _tokenizer_faults(shards: Path, manifest: dict[str, Any]) -> list[str]:
    try:
        same = tokenizer_hash(shards / "tokenizer") == manifest["tokenizer_hash"]
    except (OSError, ValueError):
        same = False
    return [] if same else [f"{shards / 'tokenizer'} is not the tokenizer that made the shards"]


def _split_faults(shards: Path, name: str, stated: dict[str, Any], manifest: dict[str, Any], workers: int) -> list[str]:
    folder = shards / name
    try:
        entries = read_index(folder)
    except DataError as error:
        return [str(error).removesuffix(f"; {WAY_OUT}")]
    faults = []
    if file_hash(folder / "index.json") != stated["index_hash"]:
        faults.append(f"{folder / 'index.json'} is not the one that manifest.json names")
    names = [entry["raw_data"]["basename"] for entry in entries]
    here = {file.name for file in folder.iterdir()}
    faults += [f"{folder / one} does not belong here" for one in sorted(here - {*names, "index.json"})]

    def work(number: int) -> tuple[list[str], dict[str, int], np.ndarray]:
        return _shard(folder, entries[number], manifest)

    counts = np.zeros(manifest["vocab_size"], dtype=np.int64)
    totals = {"sequences": 0, "tokens": 0, "padding": 0}
    for found, figures, labels in run_tasks(work, range(len(entries)), min(workers, len(entries))):
        faults += found
        counts += labels
        totals = {key: totals[key] + figures.get(key, 0) for key in totals}
    if faults:
        return sorted(faults)
    totals["labels"] = int(counts.sum())
    totals["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
    for key, value in totals.items():
        if value != stated[key]:
            faults.append(f"{folder} holds {value} {key} where manifest.json states {stated[key]}")
    if not faults and abs(entropy_nats(counts) - stated["unigram_entropy_nats"]) > 1e-9:
        faults.append(f"{folder} has another unigram entropy than manifest.json states")
    return faults


def _shard(folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> tuple[list[str], dict[str, int], Any]:
    """Faults, figures and counted labels of one shard."""
    path, stated = folder / entry["raw_data"]["basename"], entry["raw_data"]
    nothing = np.zeros(manifest["vocab_size"], dtype=np.int64)
    try:
        size = path.stat().st_size
        if size != stated["bytes"]:
            return [f"{path} has {size} bytes where its index states {stated['bytes']}"], {}, nothing
        if file_hash(path) != stated.get("hashes", {}).get("xxh64"):
            return [f"{path} has other contents than its hash states"], {}, nothing
        with open(path, "rb") as file:
            (samples,) = struct.unpack("<I", file.read(4))
        if samples != entry["samples"]:
            return [f"{path} holds {samples} sequences where its index states {entry['samples']}"], {}, nothing
        return _sequences(path, entry, manifest)
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})"], {}, nothing
    except (ValueError, IndexError, KeyError) as error:
        return [f"{path} cannot be decoded ({error})"], {}, nothing


def _sequences(path: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> tuple[list[str], dict[str, int], Any]:
    from streaming.base.format import reader_from_json

    reader = reader_from_json(str(path.parent), "", entry)
    seq_length, vocab_size = manifest["seq_length"], manifest["vocab_size"]
    counts, tokens = np.zeros(vocab_size, dtype=np.int64), 0
    for number in range(entry["samples"]):
        sample = reader[number]
        lengths = sample["doc_lengths"]
        valid = int(lengths.sum(dtype=np.int64))
        if len(sample["tokens"]) != seq_length or not 0 < valid <= seq_length or lengths.min() < 1:
            return [f"sequence {number} of {path} has document lengths that sum to {valid}"], {}, counts
        if int(sample["tokens"].max()) >= vocab_size:
            return [f"sequence {number} of {path} holds a token beyond the vocabulary"], {}, counts
        if any(len(sample[name]) != -(-seq_length // 8) for name in MASKS if name in sample):
            return [f"sequence {number} of {path} has masks of another length"], {}, counts
        counts += np.bincount(label_tokens(sample), minlength=vocab_size)
        tokens += valid
    return (
        [],
        {"sequences": entry["samples"], "tokens": tokens, "padding": entry["samples"] * seq_length - tokens},
        counts,
    )
