"""Write packed sequences as MDS shards, one at a time and always the same, and count what a manifest states of them.

Columns: `tokens` (uint16 or uint32, seq_length of them), `doc_lengths` (uint32, one for each piece in the sequence) and
with masks also `recall` and `switch` (a bit for each token, the first in the highest bit of a byte), made of each piece
by itself: what the model cannot see cannot be recalled.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from streaming import MDSWriter

from data_prep.blocks import Corpus, write_file
from data_prep.fingerprint import file_hash
from data_prep.pack import Plan, pack
from data_prep.recall import MASKS, recall_masks

LARGEST_SHARD_MIB = 4095  # offsets within a shard are 32-bit
SHARD_HEAD, SAMPLE_HEAD = 1024, 24  # bytes at most besides the columns: description; offset, sizes, shape


@dataclass(frozen=True)
class SplitPlan:
    """One split: which documents, packed how, in shards that hold which sequences."""

    name: str
    documents: np.ndarray  # int64, of the corpus; the plan counts positions in this list
    plan: Plan
    shards: list[tuple[int, int]]  # first sequence of each, and the one behind its last
    hash: str  # of the texts and of what is made of them


def plan_split(
    name: str, documents: np.ndarray, corpus: Corpus, *, seq_length: int, packing: str, masks: int, shard_mib: int
) -> SplitPlan:
    """Pack a split's documents and cut the sequences into shards."""
    plan = pack(corpus.lengths[documents], seq_length, packing)
    shards = plan_shards(plan, corpus.dtype.itemsize, masks, shard_mib)
    digest = xxhash.xxh64(repr((name, seq_length, packing, masks, shard_mib)))
    for array in (corpus.hashes[documents], plan.documents, plan.starts, plan.lengths, plan.borders):
        digest.update(np.ascontiguousarray(array).data)
    return SplitPlan(name, documents, plan, shards, digest.hexdigest())


def plan_shards(plan: Plan, token_bytes: int, masks: int, shard_mib: int) -> list[tuple[int, int]]:
    """Cut sequences into shards of at most `shard_mib`, but at least one sequence each."""
    fixed = plan.seq_length * token_bytes + masks * -(-plan.seq_length // 8) + SAMPLE_HEAD
    ends = np.cumsum(fixed + 4 * np.diff(plan.borders))
    limit, shards, first, before = (shard_mib << 20) - SHARD_HEAD, [], 0, 0
    while first < plan.num_sequences:
        last = max(int(np.searchsorted(ends, before + limit, side="right")), first + 1)
        shards.append((first, last))
        first, before = last, int(ends[last - 1])
    return shards


def columns(dtype: np.dtype, seq_length: int, masks: int) -> dict[str, str]:
    """Encodings of a shard's columns."""
    names = {"tokens": f"ndarray:{dtype.name}:{seq_length}", "doc_lengths": "ndarray:uint32"}
    return names | dict.fromkeys(MASKS[:masks], f"ndarray:uint8:{-(-seq_length // 8)}")


def write_shard(folder: Path, split: SplitPlan, number: int, corpus: Corpus, *, pad_id: int, masks: int) -> dict:
    """Write shard `number` of a split to `folder/<split>/`; returns its entry in the index.

    A record of it, and how often each token is a label, stay in `folder/work` until the manifest is written.
    """
    aside = folder / "work" / f"{split.name}.{number:05}"
    shutil.rmtree(aside, ignore_errors=True)
    first, last = split.shards[number]
    labels: list[np.ndarray] = []
    with MDSWriter(
        columns=columns(corpus.dtype, split.plan.seq_length, masks),
        out=str(aside),
        hashes=["xxh64"],
        size_limit=None,
    ) as writer:
        for sequence in range(first, last):
            sample = gather(split, sequence, corpus, pad_id, masks)
            labels.append(label_tokens(sample))
            writer.write(sample)
    name = f"shard.{number:05}.mds"
    (entry,) = json.loads((aside / "index.json").read_text())["shards"]
    entry["raw_data"]["basename"] = name
    (folder / split.name).mkdir(exist_ok=True)
    (aside / "shard.00000.mds").rename(folder / split.name / name)
    shutil.rmtree(aside)
    ids, counts = np.unique(np.concatenate(labels), return_counts=True)
    record = record_path(folder, split.name, number)
    write_file(record.with_suffix(".labels"), np.stack([ids, counts]).astype(np.uint32).tobytes())
    write_file(record, json.dumps({"plan": split.hash, "entry": entry}).encode())
    return entry


def record_path(folder: Path, split: str, number: int) -> Path:
    """Where the record of a finished shard lies until the manifest is written."""
    return folder / "work" / "shards" / f"{split}.{number:05}.json"


def finished_shard(folder: Path, split: SplitPlan, number: int) -> dict[str, Any] | None:
    """The entry of a shard that an earlier run wrote by the same plan, if it is there whole by size and hash."""
    try:
        record = json.loads(record_path(folder, split.name, number).read_bytes())
        stated = record["entry"]["raw_data"]
        file = folder / split.name / stated["basename"]
        whole = file.stat().st_size == stated["bytes"] and file_hash(file) == stated["hashes"]["xxh64"]
    except FileNotFoundError:
        return None
    return record["entry"] if whole and record["plan"] == split.hash else None


def gather(split: SplitPlan, sequence: int, corpus: Corpus, pad_id: int, masks: int) -> dict[str, np.ndarray]:
    """The columns of one sequence."""
    plan = split.plan
    pieces = range(int(plan.borders[sequence]), int(plan.borders[sequence + 1]))
    tokens = np.full(plan.seq_length, pad_id, dtype=corpus.dtype)
    marks = np.zeros((masks, plan.seq_length), dtype=bool)
    at = 0
    for piece in pieces:
        document, count = int(split.documents[plan.documents[piece]]), int(plan.lengths[piece])
        tokens[at : at + count] = corpus.read(document, int(plan.starts[piece]), count)
        if masks:
            marks[:, at : at + count] = recall_masks(tokens[at : at + count])
        at += count
    sample = {"tokens": tokens, "doc_lengths": plan.lengths[pieces.start : pieces.stop].astype(np.uint32)}
    return sample | {name: np.packbits(mark) for name, mark in zip(MASKS, marks, strict=False)}


def label_tokens(sample: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens that are labels: every real one but the first of each piece."""
    ends = np.cumsum(sample["doc_lengths"], dtype=np.int64)
    is_label = np.ones(ends[-1], dtype=bool)
    is_label[np.append(0, ends[:-1])] = False
    return sample["tokens"][: ends[-1]][is_label]


def write_index(folder: Path, entries: list[dict[str, Any]]) -> None:
    """The index by which the streaming library finds the shards of a split."""
    write_file(folder / "index.json", json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode())


def label_counts(folder: Path, split: SplitPlan, vocab_size: int) -> np.ndarray:
    """How often each token is a label in the whole split: int64 [vocab_size]."""
    total = np.zeros(vocab_size, dtype=np.int64)
    for number in range(len(split.shards)):
        path = record_path(folder, split.name, number).with_suffix(".labels")
        ids, counts = np.fromfile(path, dtype=np.uint32).reshape(2, -1)
        total[ids] += counts
    return total


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the empirical distribution: no model that ignores context has a lower mean loss on these labels."""
    total = counts.sum()
    if not total:
        return 0.0
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())
