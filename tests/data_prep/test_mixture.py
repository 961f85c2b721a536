"""Mixtures: proportions are of tokens, met within 1 %, and a document is never used more often than allowed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.blocks import Corpus
from data_prep.mixture import choose, distinct, heldout_border
from recipes.schema import MixtureConfig

NAMES = ("books", "web")


def corpus(lengths, sources, seed=0, hashes=None) -> Corpus:
    """A table of documents without any text behind it."""
    count = len(lengths)
    if hashes is None:
        hashes = np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), dtype=np.uint64)
    zeros = np.zeros(count, np.uint32)
    columns = (np.array(lengths, np.uint32), zeros, zeros, hashes, np.array(sources, np.uint16))
    return Corpus(None, np.dtype(np.uint16), [], *columns)


def mix(documents, *parts, max_tokens=None, heldout=0.0, longest_first=False, deduplicate=True):
    """The choice for parts given as keyword dicts."""
    return choose(
        documents,
        names=NAMES,
        heldout_fraction=heldout,
        deduplicate=deduplicate,
        mixture=[MixtureConfig(**part) for part in parts],
        max_tokens=max_tokens,
        longest_first=longest_first,
    )


def many(seed=0, count=4000):
    """Documents of two sources, short and long."""
    rng = np.random.default_rng(seed)
    return corpus(np.exp(rng.uniform(2, 9, count)).astype(int), rng.integers(0, 2, count), seed)


PROLONG = (
    {"source": "books", "min_tokens": 2048, "proportion": 0.45},
    {"source": "web", "min_tokens": 2048, "proportion": 0.15},
    {"max_tokens": 2048, "proportion": 0.4},
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.05, 1), min_size=3, max_size=3), st.booleans())
def test_proportions_are_met_within_one_percent_of_tokens(seed, shares, longest_first):
    documents = many(seed)
    parts = [part | {"proportion": share} for part, share in zip(PROLONG, shares, strict=True)]
    choice = mix(documents, *parts, longest_first=longest_first)
    lengths, sources = documents.lengths[choice.train].astype(int), documents.sources[choice.train]
    inside = [(sources == 0) & (lengths >= 2048), (sources == 1) & (lengths >= 2048), lengths < 2048]
    for one, share, said in zip(inside, shares, choice.mixture, strict=True):
        reached = lengths[one].sum() / lengths.sum()
        assert abs(reached - share / sum(shares)) < 0.01
        assert said["reached"] == pytest.approx(reached, abs=1e-6) and said["tokens"] == lengths[one].sum()
    assert len(np.unique(choice.train)) == len(choice.train)
    assert len(choice.train) + sum(choice.left_out.values()) == len(documents.lengths)
    # nothing is wasted: the scarcest part is used up
    assert max(said["tokens"] / said["tokens_available"] for said in choice.mixture) > 0.98


def test_any_stretch_has_the_mixture():
    """A tenth of the documents in packing order has the proportions of the whole."""
    documents = many()
    choice = mix(documents, *PROLONG)
    lengths = documents.lengths[choice.train].astype(int)
    short = lengths < 2048
    ends = np.cumsum(lengths)
    for tenth in range(10):
        part = (ends > ends[-1] * tenth / 10) & (ends <= ends[-1] * (tenth + 1) / 10)
        assert lengths[part & short].sum() / lengths[part].sum() == pytest.approx(0.4, abs=0.03)


def test_repeats_use_every_document_before_any_twice():
    documents = corpus([100] * 50 + [100] * 1000, [0] * 50 + [1] * 1000)
    parts = ({"source": "books", "proportion": 0.5, "repeat": 3}, {"source": "web", "proportion": 0.5})
    choice = mix(documents, *parts, max_tokens=25_000)
    times = np.bincount(choice.train, minlength=1050)
    assert times[:50].sum() == 125 and set(times[:50]) == {2, 3} and times[50:].sum() == 125 and times[50:].max() == 1
    with pytest.raises(ValueError, match=r"max_tokens is 31000 but .* from books has 5000 tokens, enough for 30000"):
        mix(documents, *parts, max_tokens=31_000)


def test_first_part_that_fits_takes_a_document():
    documents = corpus([10, 10, 500, 510], [0, 1, 0, 1])
    choice = mix(documents, {"source": "books", "proportion": 1}, {"min_tokens": 100, "proportion": 1})
    assert sorted(choice.train) == [0, 2, 3] and choice.left_out == {"outside the mixture": 1}


def test_copy_outside_the_mixture_does_not_take_the_place_of_one_inside():
    """The web has a copy of a book, and comes first; the mixture wants books only."""
    hashes = np.random.default_rng(0).integers(0, 1 << 64, (3, 2), dtype=np.uint64)
    documents = corpus([10, 10, 10, 10], [1, 1, 0, 0], hashes=hashes[[0, 1, 0, 2]])
    choice = mix(documents, {"source": "books", "proportion": 1})
    assert sorted(choice.train) == [2, 3] and choice.left_out == {"outside the mixture": 2}
    documents = corpus([10, 10, 10, 10], [0, 1, 0, 0], hashes=hashes[[0, 1, 0, 2]])
    choice = mix(documents, {"source": "books", "proportion": 1})
    assert sorted(choice.train) == [0, 3] and choice.left_out == {"outside the mixture": 1, "duplicate": 1}


def test_max_tokens_alone():
    documents = many()
    for longest_first in (False, True):
        choice = mix(documents, max_tokens=200_000, longest_first=longest_first)
        lengths = documents.lengths[choice.train].astype(int)
        assert 0.99 * 200_000 < lengths.sum() <= 200_000
        assert choice.left_out == {"beyond max_tokens": 4000 - len(choice.train)}
        assert (np.sort(lengths)[-20:] == np.sort(documents.lengths)[-20:]).all() == longest_first
    assert len(mix(documents, max_tokens=10**12).train) == 4000


def test_documents_too_long_for_the_mixture_are_said():
    documents = corpus([1000] + [10] * 200, [0] + [1] * 200)
    with pytest.raises(ValueError, match="of 100 tokens where 0.5000 is asked, because its documents are too long"):
        mix(documents, {"source": "books", "proportion": 1}, {"source": "web", "proportion": 1}, max_tokens=200)
    with pytest.raises(ValueError, match="has no document"):
        mix(documents, {"source": "books", "max_tokens": 5, "proportion": 1}, {"proportion": 1})


# ---- split and copies


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 1000))
def test_the_first_copy_stays(values, seed):
    table = np.random.default_rng(seed).integers(0, 1 << 64, (13, 2), dtype=np.uint64)
    table[:6, 0] = table[0, 0]  # halves alone may be equal
    first = distinct(table[values])
    assert first.tolist() == [value not in values[:at] for at, value in enumerate(values)]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.floats(0, 0.99), st.integers(0, 1000))
def test_split_takes_about_the_fraction_and_never_everything(count, fraction, seed):
    documents = corpus([5] * count, [0] * count, seed)
    choice = mix(documents, heldout=fraction)
    assert sorted([*choice.train, *choice.heldout]) == list(range(count))
    assert len(choice.train) and bool(len(choice.heldout)) == (fraction > 0)
    spread = 5 * np.sqrt(count * fraction * (1 - fraction)) + 1
    assert abs(len(choice.heldout) - count * fraction) <= spread
    if count == 2:
        return
    alone = mix(corpus([5] * (count - 1), [0] * (count - 1), hashes=documents.hashes[:-1]), heldout=fraction)
    moved = set(alone.heldout) ^ set(choice.heldout) - {count - 1}
    assert len(moved) <= 1  # but for the one that keeps a side from being empty


def test_border_needs_two_documents():
    with pytest.raises(ValueError, match="only one distinct document"):
        heldout_border(7, 7, 0.1)
    assert heldout_border(7, 7, 0.0) == 0
