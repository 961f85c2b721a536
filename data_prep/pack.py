"""Cut a stream of documents into sequences of equal length, losing nothing.

Concatenation: a document that does not fit into what is left of a sequence flows on into the next, where the rest of
it counts as a piece of its own. Only the last sequence is padded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

NO_MARKS: Mapping[str, np.ndarray] = {}


@dataclass(frozen=True)
class Sequence:
    """One packed sequence: token ids [T], the lengths of its pieces (their sum is what is real), marks [T] by name."""

    tokens: np.ndarray
    doc_lengths: np.ndarray  # uint32
    marks: dict[str, np.ndarray]  # bool


class Packer:
    """Packs documents into sequences of `seq_length` tokens; what is held back is less than one sequence.

    Args:
        seq_length: tokens of a sequence.
        pad_id: fills the last sequence behind its real tokens.
        dtype: of the token ids.
        mark_names: per-token bool arrays that travel with the tokens, such as the masks of the weighted loss.
    """

    def __init__(self, seq_length: int, pad_id: int, dtype: np.dtype, mark_names: tuple[str, ...] = ()) -> None:
        self._seq_length, self._pad_id, self._dtype, self._mark_names = seq_length, pad_id, dtype, mark_names
        self._clear()

    def _clear(self) -> None:
        self._tokens = np.full(self._seq_length, self._pad_id, dtype=self._dtype)
        self._marks = {name: np.zeros(self._seq_length, dtype=bool) for name in self._mark_names}
        self._lengths: list[int] = []
        self._used = 0

    def add(self, tokens: np.ndarray, marks: Mapping[str, np.ndarray] = NO_MARKS) -> list[Sequence]:
        """Append a document; returns the sequences that it completes."""
        complete, start = [], 0
        while start < len(tokens):
            take = min(self._seq_length - self._used, len(tokens) - start)
            here, there = slice(self._used, self._used + take), slice(start, start + take)
            self._tokens[here] = tokens[there]
            for name in self._mark_names:
                self._marks[name][here] = marks[name][there]
            self._lengths.append(take)
            self._used += take
            start += take
            if self._used == self._seq_length:
                complete.append(self._take())
        return complete

    def finish(self) -> list[Sequence]:
        """The last sequence, padded, if any tokens are held back."""
        return [self._take()] if self._used else []

    def _take(self) -> Sequence:
        sequence = Sequence(self._tokens, np.array(self._lengths, dtype=np.uint32), self._marks)
        self._clear()
        return sequence
