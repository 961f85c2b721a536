"""Decide which tokens of which documents make up each sequence of equal length; nothing is read, nothing is lost.

    concat      documents one behind the other, flowing on over the borders of sequences; only the last is padded
    best_fit    documents stay whole where they fit into a sequence; what is left over is padded, and reported
    long_first  like best_fit, but over the whole corpus, each sequence beginning with the longest document left and
                filled up with the longest that still fit; what there is of long documents comes first

A document that is longer than a sequence fills whole sequences; the rest of it is a piece like any other.
Letters: D documents, P pieces, S sequences, T tokens of a sequence.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from recipes.errors import UserError
from recipes.schema import PACKINGS

WINDOW = 256  # sequences' worth of documents among which best_fit chooses


@dataclass(frozen=True)
class Plan:
    """What every sequence is made of, in order."""

    seq_length: int
    documents: np.ndarray  # int64 [P], position of the piece's document in the given list
    starts: np.ndarray  # int64 [P], first token of the piece in its document
    lengths: np.ndarray  # int64 [P], tokens of the piece
    borders: np.ndarray  # int64 [S + 1], sequence s holds pieces borders[s] .. borders[s + 1]

    @property
    def num_sequences(self) -> int:
        """Sequences of the plan."""
        return len(self.borders) - 1

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> int:
        """Tokens that fill sequences up."""
        return self.num_sequences * self.seq_length - self.tokens

    def cut_documents(self) -> int:
        """Documents in more than one piece."""
        return int((np.bincount(self.documents) > 1).sum()) if len(self.documents) else 0


def pack(lengths: np.ndarray, seq_length: int, policy: str) -> Plan:
    """Pack documents.

    Args:
        lengths: tokens of each document, at least 1, in the order in which they are wanted: int [D].
        seq_length: tokens of a sequence.
        policy: concat | best_fit | long_first.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if policy not in PACKINGS:
        raise UserError(f"data.packing is {policy!r}; give one of {', '.join(PACKINGS)}")
    if policy == "concat":
        return _concat(lengths, seq_length)
    whole, rest = lengths // seq_length, lengths % seq_length
    if policy == "long_first":
        order = np.argsort(-lengths, kind="stable")
        long, short = order[whole[order] > 0], order[rest[order] > 0]
        bins = [*_full(long, whole), *_longest_that_fits(short, rest[short], seq_length)]
    else:
        bins = []
        window = np.cumsum(lengths) // (WINDOW * seq_length)
        for first, last in _runs(window):
            inside = np.arange(first, last)
            bins += _full(inside[whole[first:last] > 0], whole)
            short = inside[rest[first:last] > 0]
            bins += _best_fit(short, rest[short], seq_length)
    return _plan(bins, lengths, seq_length)


Piece = tuple[int, int]  # document, and which multiple of the sequence's length it begins at


def _concat(lengths: np.ndarray, seq_length: int) -> Plan:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.arange(seq_length, total + seq_length, seq_length).clip(max=total)) if total else ends
    begins = np.concatenate([[0], cuts[:-1]]).astype(np.int64) if total else cuts
    documents = np.searchsorted(ends, begins, side="right")
    num_sequences = -(-total // seq_length)
    borders = np.searchsorted(begins, np.arange(num_sequences + 1) * seq_length)
    return Plan(seq_length, documents, begins - (ends - lengths)[documents], cuts - begins, borders)


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(values)) + 1
    return list(zip([0, *edges], [*edges, len(values)], strict=True)) if len(values) else []


def _full(documents: np.ndarray, whole: np.ndarray) -> list[list[Piece]]:
    """The sequences that long documents fill by themselves."""
    return [[(int(document), number)] for document in documents for number in range(whole[document])]


def _best_fit(documents: np.ndarray, lengths: np.ndarray, seq_length: int) -> list[list[Piece]]:
    """Longest first, each piece into the fullest sequence that has room for it."""
    bins: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # tokens that are left, and where; sorted
    for at in np.argsort(-lengths, kind="stable").tolist():
        document, length = int(documents[at]), int(lengths[at])
        found = bisect_left(room, (length, -1))
        left, number = room.pop(found) if found < len(room) else (seq_length, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append((document, -1))
        if left > length:
            insort(room, (left - length, number))
    return bins


def _longest_that_fits(documents: np.ndarray, lengths: np.ndarray, seq_length: int) -> list[list[Piece]]:
    """Sequence by sequence, each time the longest piece that still fits.

    `nearest[n]` leads to the largest length up to n of which a piece is left: lengths that are used up point on.
    """
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=seq_length + 1)
    first = (np.cumsum(counts) - counts).tolist()  # in `order`, the next piece of each length
    counts, queue = counts.tolist(), documents[order].tolist()
    nearest = [n if counts[n] else n - 1 for n in range(seq_length + 1)]
    nearest[0] = 0

    def longest(limit: int) -> int:
        end = limit
        while nearest[end] != end:
            end = nearest[end]
        while nearest[limit] != end:
            nearest[limit], limit = end, nearest[limit]
        return end

    bins: list[list[Piece]] = []
    for _ in range(len(queue)):
        room, pieces = seq_length, []
        while length := longest(room):
            pieces.append((queue[first[length]], -1))
            first[length] += 1
            counts[length] -= 1
            if not counts[length]:
                nearest[length] = length - 1
            room -= length
        if not pieces:
            break
        bins.append(pieces)
    return bins


def _plan(bins: list[list[Piece]], lengths: np.ndarray, seq_length: int) -> Plan:
    pieces = np.array([piece for one in bins for piece in one], dtype=np.int64).reshape(-1, 2)
    documents, numbers = pieces[:, 0], pieces[:, 1]
    whole = numbers >= 0
    starts = np.where(whole, numbers, lengths[documents] // seq_length) * seq_length
    sizes = np.where(whole, seq_length, lengths[documents] % seq_length)
    borders = np.cumsum([0, *(len(one) for one in bins)], dtype=np.int64)
    return Plan(seq_length, documents, starts, sizes, borders)
