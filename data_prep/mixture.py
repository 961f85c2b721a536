"""Choose the documents of each split: copies left out, held-out ones set apart, the rest mixed as the recipe asks.

Everything here looks at lengths and hashes only. The choice depends on texts, settings and the order of the corpus.
Letters: D documents of the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_prep.blocks import Corpus
from recipes.errors import UserError
from recipes.schema import MixtureConfig

TOLERANCE = 0.01  # of the tokens, by which a part of the mixture may miss its proportion
ROUNDS = 20  # tries to come within half of it
HASH_END = 1 << 64


@dataclass
class Choice:
    """Which documents are written."""

    train: np.ndarray  # int64, documents in the order in which they are packed; one may be there several times
    heldout: np.ndarray  # int64
    left_out: dict[str, int] = field(default_factory=dict)  # documents, by reason
    mixture: list[dict[str, Any]] = field(default_factory=list)  # what was asked and what was reached


def distinct(hashes: np.ndarray) -> np.ndarray:
    """Whether a document is the first of its text: bool [D]."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: copies stay in the order of the corpus
    again = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    first = np.ones(len(hashes), dtype=bool)
    first[order[1:][again]] = False
    return first


def heldout_border(smallest: int, largest: int, fraction: float) -> int:
    """Documents whose hash is below it are held out: about `fraction` of them, but at least one, and not all.

    Raises:
        UserError: there is only one distinct document.
    """
    border = int(fraction * HASH_END)
    if fraction <= 0:
        return border
    if smallest == largest:
        raise UserError(
            f"data.heldout_fraction is {fraction} but the corpus holds only one distinct document; add documents, or"
            " set it to 0"
        )
    return min(max(border, smallest + 1), largest)


def choose(
    corpus: Corpus,
    *,
    names: Sequence[str],
    heldout_fraction: float,
    deduplicate: bool,
    mixture: Sequence[MixtureConfig],
    max_tokens: int | None,
    longest_first: bool,
) -> Choice:
    """Choose the documents of both splits.

    Args:
        names: of the sources, by their index.
        mixture: parts of the training tokens; none takes everything.
        max_tokens: of the training split.
        longest_first: where not all documents are wanted, take the longest; else any, by their hash.
    """
    parts = _parts(corpus, names, mixture)
    kept = parts >= 0
    left_out = {"outside the mixture": int((~kept).sum())}
    if deduplicate:  # among what is wanted: a copy that is not must not take the place of one that is
        kept[kept] = distinct(corpus.hashes[kept])
    left_out["duplicate"] = int((parts >= 0).sum() - kept.sum())
    high = corpus.hashes[:, 0]
    border = heldout_border(int(high.min()), int(high.max()), heldout_fraction)
    is_heldout = high < border
    train = np.flatnonzero(kept & ~is_heldout)
    choice = Choice(train, np.flatnonzero(kept & is_heldout), left_out)
    if mixture or max_tokens is not None:
        _mix(choice, corpus, parts, names, mixture, max_tokens, longest_first)
        left_out["beyond max_tokens"] = len(train) - len(np.unique(choice.train))
    choice.left_out = {reason: count for reason, count in left_out.items() if count}
    return choice


def _parts(corpus: Corpus, names: Sequence[str], mixture: Sequence[MixtureConfig]) -> np.ndarray:
    """The part of the mixture that each document belongs to, -1 for none: int64 [D]."""
    parts = np.full(len(corpus.lengths), -1 if mixture else 0, dtype=np.int64)
    for number, part in reversed(list(enumerate(mixture))):
        fits = corpus.lengths >= part.min_tokens
        if part.max_tokens is not None:
            fits &= corpus.lengths < part.max_tokens
        if part.source is not None:
            if part.source not in names:
                raise UserError(
                    f"data.mixture names the source {part.source!r} but there are {', '.join(map(repr, names))}; set"
                    " name in data.sources"
                )
            fits &= corpus.sources == names.index(part.source)
        parts[fits] = number
    return parts


def _mix(
    choice: Choice,
    corpus: Corpus,
    parts: np.ndarray,
    names: Sequence[str],
    mixture: Sequence[MixtureConfig],
    max_tokens: int | None,
    longest_first: bool,
) -> None:
    """Replace the training documents by a choice of the asked proportions, each part spread evenly over the whole."""
    asked = list(mixture) or [MixtureConfig(proportion=1.0)]
    shares = np.array([part.proportion for part in asked], dtype=np.float64)
    shares /= shares.sum()
    members = [choice.train[parts[choice.train] == number] for number in range(len(asked))]
    available = [int(corpus.lengths[one].sum(dtype=np.int64)) for one in members]
    total = _total(asked, shares, available, names, max_tokens)
    picked, reached = members, np.array(available)
    for _ in range(ROUNDS):
        picked = [
            _take(corpus, documents, round(total * share), part.repeat, longest_first)
            for part, share, documents in zip(asked, shares, members, strict=True)
        ]
        reached = np.array([corpus.lengths[taken].sum(dtype=np.int64) for taken in picked])
        if not reached.all() or np.abs(reached / reached.sum() - shares).max() <= TOLERANCE / 2:
            break
        total = float((reached / shares).min())  # long documents left a gap: the other parts come down to it
    choice.train = _spread(corpus, picked)
    for number, part in enumerate(asked):
        share = float(reached[number] / max(reached.sum(), 1))
        choice.mixture.append(
            {
                "source": part.source,
                "min_tokens": part.min_tokens,
                "max_tokens": part.max_tokens,
                "asked": round(float(shares[number]), 6),
                "reached": round(share, 6),
                "tokens": int(reached[number]),
                "tokens_available": available[number],
                "documents": len(np.unique(picked[number])),
            }
        )
        if abs(share - shares[number]) > TOLERANCE:
            raise UserError(
                f"{_title(part, names)} can be {share:.4f} of {reached.sum()} tokens where {shares[number]:.4f} is"
                " asked, because its documents are too long for so few tokens; raise data.max_tokens or add documents"
            )


def _spread(corpus: Corpus, picked: list[np.ndarray]) -> np.ndarray:
    """The documents of all parts in one list, each part evenly spread over it by tokens."""
    at = []
    for taken in picked:
        ends = np.cumsum(corpus.lengths[taken], dtype=np.float64)
        at.append((ends - corpus.lengths[taken] / 2) / (ends[-1] if len(ends) else 1.0))
    return np.concatenate(picked)[np.argsort(np.concatenate(at), kind="stable")]


def _title(part: MixtureConfig, names: Sequence[str]) -> str:
    bounds = f"{part.min_tokens} to {part.max_tokens or 'any number of'} tokens"
    return f"the part of data.mixture with documents of {bounds} from {part.source or 'all sources'}"


def _total(
    asked: Sequence[MixtureConfig],
    shares: np.ndarray,
    available: Sequence[int],
    names: Sequence[str],
    max_tokens: int | None,
) -> float:
    """Training tokens: as many as the scarcest part allows, or as are wanted."""
    for part, tokens in zip(asked, available, strict=True):
        if not tokens and part.proportion:
            raise UserError(f"{_title(part, names)} has no document; change the mixture or add documents")
    possible = [
        part.repeat * tokens / share if share else float("inf")
        for part, share, tokens in zip(asked, shares, available, strict=True)
    ]
    most = min(possible)
    # one part alone is a limit; with several, fewer tokens than asked would be another mixture's length
    if max_tokens is not None and max_tokens > most and len(asked) > 1:
        scarce = int(np.argmin(possible))
        raise UserError(
            f"data.max_tokens is {max_tokens} but {_title(asked[scarce], names)} has {available[scarce]} tokens, enough"
            f" for {int(most)}; lower data.max_tokens, or raise its repeat"
        )
    return min(most, max_tokens) if max_tokens is not None else most


def _take(corpus: Corpus, documents: np.ndarray, target: int, repeat: int, longest_first: bool) -> np.ndarray:
    """Documents of about `target` tokens, never more, in the order of their hashes; all of them before any twice."""
    by_hash = documents[np.argsort(corpus.hashes[documents, 1], kind="stable")]
    total = int(corpus.lengths[documents].sum(dtype=np.int64))
    rounds = min(target // total, repeat) if total else 0
    taken = [by_hash] * rounds
    left = target - rounds * total
    if rounds < repeat and left > 0:
        rest = (
            by_hash[np.argsort(-corpus.lengths[by_hash].astype(np.int64), kind="stable")] if longest_first else by_hash
        )
        some = _fill(rest, corpus.lengths[rest].astype(np.int64), left)
        taken.append(by_hash[np.isin(by_hash, some)])
    return np.concatenate([np.zeros(0, np.int64), *taken])


def _fill(documents: np.ndarray, lengths: np.ndarray, room: int) -> np.ndarray:
    """Documents from the front that together fit; one that does not fit is passed over."""
    taken = []
    while len(documents):
        ends = np.cumsum(lengths)
        count = int(np.searchsorted(ends, room, side="right"))
        taken.append(documents[:count])
        room -= int(ends[count - 1]) if count else 0
        fits = lengths[count:] <= room
        documents, lengths = documents[count:][fits], lengths[count:][fits]
    return np.concatenate([np.zeros(0, np.int64), *taken])
