"""Write packed sequences as MDS shards, and count what a manifest states about them."""

from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter

from data_prep.fingerprint import file_hash
from data_prep.pack import Packer, Sequence
from data_prep.recall import recall_masks

MASKS: tuple[str, ...] = ("recall", "switch")
LARGEST_SHARD_MIB = 4095  # offsets within a shard are 32-bit


class SplitWriter:
    """One split: documents in, a folder of shards and its figures out.

    Columns: `tokens` (uint16 or uint32, seq_length of them), `doc_lengths` (uint32, one for each piece in the sequence)
    and with `masks` also `recall` and `switch` (a bit for each token, the first in the highest bit of a byte).

    Args:
        folder: where the shards go; must not exist or be empty.
        seq_length: tokens of a sequence.
        pad_id: fills the last sequence.
        dtype: of the token ids.
        vocab_size: one more than the largest id.
        masks: compute the masks of the retrieval-weighted loss, on whole documents.
        shard_mib: size of one shard.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seq_length: int,
        pad_id: int,
        dtype: np.dtype,
        vocab_size: int,
        masks: bool,
        shard_mib: int,
    ) -> None:
        self._folder, self._masks = folder, MASKS if masks else ()
        self._packer = Packer(seq_length, pad_id, dtype, self._masks)
        columns = {"tokens": f"ndarray:{dtype.name}:{seq_length}", "doc_lengths": "ndarray:uint32"}
        columns |= dict.fromkeys(self._masks, f"ndarray:uint8:{-(-seq_length // 8)}")
        self._writer = MDSWriter(columns=columns, out=str(folder), hashes=["xxh64"], size_limit=shard_mib << 20)
        self._label_counts = np.zeros(vocab_size, dtype=np.int64)
        self.documents, self.tokens, self.sequences = 0, 0, 0

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, which ends in EOS."""
        marks = dict(zip(MASKS, recall_masks(tokens), strict=True)) if self._masks else {}
        for sequence in self._packer.add(tokens, marks):
            self._write(sequence)
        self.documents += 1
        self.tokens += len(tokens)

    def _write(self, sequence: Sequence) -> None:
        sample = {"tokens": sequence.tokens, "doc_lengths": sequence.doc_lengths}
        self._writer.write(sample | {name: np.packbits(marks) for name, marks in sequence.marks.items()})
        self.sequences += 1
        ends = np.cumsum(sequence.doc_lengths, dtype=np.int64)
        is_label = np.ones(ends[-1], dtype=bool)  # every real token but the first of each piece
        is_label[np.append(0, ends[:-1])] = False
        labels = sequence.tokens[: ends[-1]][is_label]
        self._label_counts += np.bincount(labels, minlength=len(self._label_counts))

    def finish(self) -> dict[str, Any]:
        """Write what is held back and the index; returns the split's part of the manifest."""
        for sequence in self._packer.finish():
            self._write(sequence)
        self._writer.finish()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "labels": int(self._label_counts.sum()),
            "unigram_entropy_nats": entropy_nats(self._label_counts),
            "bytes": sum(file.stat().st_size for file in self._folder.iterdir()),
            "index_hash": file_hash(self._folder / "index.json"),
        }


def entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the empirical distribution: no model that ignores context has a lower mean loss on these labels."""
    total = counts.sum()
    if not total:
        return 0.0
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())
