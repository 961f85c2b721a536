"""Turn stored sequences into what a training step consumes: tokens, labels, weights, document starts.

Shapes: B sequences of a micro-batch, T tokens of a sequence, N document pieces of a sequence.
Labels are shifted here, on whole sequences, so that slicing a sequence over context-parallel ranks later loses none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recipes.errors import UserError


@dataclass
class MicroBatch:
    """One forward's worth of sequences on the CPU."""

    tokens: torch.Tensor  # int64 [B, T]
    labels: torch.Tensor  # int64 [B, T], the next token; 0 at the last position
    weights: torch.Tensor  # float32 [B, T], 0 where there is no label to learn
    doc_starts: torch.Tensor  # int64 [B, T], index of the first token of each position's document
    sample_ids: list[int]  # index of each sequence in its split, -1 for a sequence added as filling


def document_starts(doc_lengths: np.ndarray, seq_length: int) -> np.ndarray:
    """Index of the first token of every position's document [T]; padding counts as a document of its own."""
    valid = int(doc_lengths.sum())
    pieces = np.append(doc_lengths.astype(np.int64), seq_length - valid)
    return np.repeat(np.cumsum(pieces) - pieces, pieces)


def has_label(doc_starts: np.ndarray, valid: int) -> np.ndarray:
    """Where the next token exists, is not padding, and belongs to the same document: bool [T]."""
    mask = np.zeros(len(doc_starts), dtype=bool)
    mask[:-1] = doc_starts[1:] == doc_starts[:-1]
    mask[max(valid - 1, 0) :] = False
    return mask


def _sequence(sample: dict[str, Any], recall_beta: float, switch_beta: float) -> dict[str, np.ndarray]:
    tokens, lengths = sample["tokens"], sample["doc_lengths"]
    valid, seq_length = int(lengths.sum()), len(tokens)
    if not 0 < valid <= seq_length or lengths.min() < 1:
        raise UserError(f"sequence {sample['id']} of {seq_length} tokens has document lengths that sum to {valid}")
    starts = document_starts(lengths, seq_length)
    weights = np.ones(seq_length, dtype=np.float32)
    for column, beta in (("recall", recall_beta), ("switch", switch_beta)):
        if beta:
            weights += np.float32(beta) * np.unpackbits(sample[column], count=seq_length)
    labels = np.zeros(seq_length, dtype=np.int64)
    labels[:-1] = tokens[1:]
    return {
        "tokens": tokens.astype(np.int64),
        "labels": labels,
        "weights": weights * has_label(starts, valid),
        "doc_starts": starts,
    }


def collate(samples: Sequence[dict[str, Any]], recall_beta: float = 0.0, switch_beta: float = 0.0) -> dict[str, Any]:
    """Stack stored samples into the fields of a MicroBatch.

    A dict, because the streaming library's own loader counts samples by the length of a dict's first value.

    Args:
        samples: stored columns (`tokens`, `doc_lengths`, the packed masks if there are any) and the sample's `id`.
        recall_beta, switch_beta: a label weighs 1 + recall_beta * recall + switch_beta * switch.
    """
    rows = [_sequence(sample, recall_beta, switch_beta) for sample in samples]
    fields: dict[str, Any] = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    return fields | {"sample_ids": [int(sample["id"]) for sample in samples]}


def filling(seq_length: int) -> dict[str, Any]:
    """Fields of one sequence that weighs nothing, for a rank that has run out of sequences."""
    zeros = torch.zeros(1, seq_length, dtype=torch.int64)
    return {
        "tokens": zeros,
        "labels": zeros,
        "weights": torch.zeros(1, seq_length, dtype=torch.float32),
        "doc_starts": zeros,
        "sample_ids": [-1],
    }
