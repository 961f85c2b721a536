"""Packing loses, doubles and reorders nothing, whatever the policy and the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.pack import pack
from recipes.schema import PACKINGS

LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 6), st.just(16)), max_size=60)


def pieces(plan) -> list[list[tuple[int, int, int]]]:
    """(document, start, length) of every piece, sequence by sequence."""
    columns = zip(plan.documents.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
    every = list(columns)
    borders = plan.borders.tolist()
    assert borders[0] == 0 and borders[-1] == len(every)
    return [every[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(2, 33), st.sampled_from(PACKINGS))
def test_every_token_is_in_exactly_one_place(lengths, seq_length, policy):
    plan = pack(np.array(lengths, dtype=np.uint32), seq_length, policy)
    sequences = pieces(plan)
    for sequence in sequences:
        assert sequence and 0 < sum(length for *_, length in sequence) <= seq_length
        assert all(length >= 1 for *_, length in sequence)
    seen = sorted((document, start, length) for sequence in sequences for document, start, length in sequence)
    reached = dict.fromkeys(range(len(lengths)), 0)
    for document, start, length in seen:
        assert start == reached[document]
        reached[document] += length
    assert list(reached.values()) == lengths
    assert plan.tokens == sum(lengths) and plan.padding == len(sequences) * seq_length - sum(lengths)
    cut = {document for document, start, _ in seen if start}
    assert plan.cut_documents() == len(cut)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(2, 33))
def test_concat_keeps_the_order_and_pads_the_last_only(lengths, seq_length):
    sequences = pieces(pack(np.array(lengths), seq_length, "concat"))
    flat = [piece for sequence in sequences for piece in sequence]
    assert flat == sorted(flat)
    assert all(sum(length for *_, length in sequence) == seq_length for sequence in sequences[:-1])
    ends = np.cumsum(lengths)
    want = sorted({*ends.tolist(), *range(seq_length, int(ends[-1]) if len(ends) else 0, seq_length)})
    assert np.cumsum([length for *_, length in flat]).tolist() == want


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(2, 33), st.sampled_from(["best_fit", "long_first"]))
def test_documents_that_fit_stay_whole(lengths, seq_length, policy):
    for sequence in pieces(pack(np.array(lengths), seq_length, policy)):
        for document, start, length in sequence:
            whole = (start, length) == (0, lengths[document])
            rest = start % seq_length == 0 and start + length == lengths[document]
            assert whole or length == seq_length or rest
            assert lengths[document] > seq_length or whole


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(2, 33))
def test_long_first_takes_the_longest_that_fits(lengths, seq_length):
    left = sorted((n % seq_length for n in lengths if n % seq_length), reverse=True)
    for sequence in pieces(pack(np.array(lengths), seq_length, "long_first")):
        if sequence[0][2] == seq_length:
            continue
        room = seq_length
        for *_, length in sequence:
            assert length == next(n for n in left if n <= room)
            left.remove(length)
            room -= length
        assert not any(n <= room for n in left)
    assert not left


def test_best_fit_wastes_little_on_real_lengths(tmp_path):
    """Python's library: files by their sizes, as if a token were four bytes."""
    import sysconfig
    from pathlib import Path

    sizes = [f.stat().st_size // 4 for f in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))[:2000]]
    lengths = np.array([size for size in sizes if size])
    for policy in ("best_fit", "long_first"):
        plan = pack(lengths, 8192, policy)
        assert plan.padding < 0.02 * plan.tokens, policy
        assert plan.cut_documents() == (lengths > 8192).sum()


def test_long_documents_come_first():
    lengths = np.array([3, 20, 2, 9, 30])
    first = pieces(pack(lengths, 10, "long_first"))
    assert [sequence[0] for sequence in first[:5]] == [(4, 0, 10), (4, 10, 10), (4, 20, 10), (1, 0, 10), (1, 10, 10)]
    assert first[5:] == [[(3, 0, 9)], [(0, 0, 3), (2, 0, 2)]]


def test_many_documents_are_packed_in_seconds():
    import time

    lengths = np.random.default_rng(0).integers(1, 5000, 100_000)
    for policy in PACKINGS:
        began = time.process_time()
        pack(lengths, 4096, policy)
        assert time.process_time() - began < 8, policy


def test_unknown_policy():
    with pytest.raises(ValueError, match="data.packing is 'tight'"):
        pack(np.array([1]), 4, "tight")
