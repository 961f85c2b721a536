"""Packing loses, doubles and reorders nothing."""

import numpy as np
import pytest

from data_prep.pack import Packer

PAD = 9999


def pack(documents, seq_length, **kwargs):
    packer = Packer(seq_length, PAD, np.dtype(np.uint16), **kwargs)
    sequences = [s for d in documents for s in packer.add(d, {"mark": d % 2 == 1} if kwargs else {})]
    return sequences + packer.finish()


def random_documents(seed: int, longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(1, longest)).astype(np.uint16) for _ in range(rng.integers(1, 40))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("seq_length", "longest"), [(7, 5), (16, 100), (64, 64), (2, 9)])
def test_documents_come_back(seed, seq_length, longest):
    documents = random_documents(seed, longest)
    sequences = pack(documents, seq_length, mark_names=("mark",))
    real = [s.tokens[: s.doc_lengths.sum()] for s in sequences]
    np.testing.assert_array_equal(np.concatenate(real), np.concatenate(documents))
    for sequence in sequences:
        valid = sequence.doc_lengths.sum()
        assert sequence.tokens.shape == (seq_length,) and sequence.doc_lengths.min() >= 1
        np.testing.assert_array_equal(sequence.marks["mark"][:valid], sequence.tokens[:valid] % 2 == 1)
        assert not sequence.marks["mark"][valid:].any()
    assert all(s.doc_lengths.sum() == seq_length for s in sequences[:-1])
    assert (sequences[-1].tokens[sequences[-1].doc_lengths.sum() :] == PAD).all()


@pytest.mark.parametrize("seed", range(10))
def test_piece_borders_are_document_or_sequence_borders(seed):
    documents, seq_length = random_documents(seed, 50), 16
    sequences = pack(documents, seq_length)
    ends = np.cumsum([len(d) for d in documents])
    want = sorted(set(ends) | set(range(seq_length, ends[-1], seq_length)))
    got = np.cumsum(np.concatenate([s.doc_lengths for s in sequences]))
    assert got.tolist() == want


def test_a_document_longer_than_a_sequence_is_fresh_in_each():
    sequences = pack([np.arange(10, dtype=np.uint16), np.array([77], dtype=np.uint16)], 4)
    assert [s.doc_lengths.tolist() for s in sequences] == [[4], [4], [2, 1]]
    assert sequences[2].tokens.tolist() == [8, 9, 77, PAD]


def test_nothing_in_nothing_out():
    assert pack([], 4) == []


def test_sequences_do_not_share_memory():
    first, second = pack([np.arange(8, dtype=np.uint16)], 4)
    assert first.tokens.tolist() == [0, 1, 2, 3] and second.tokens.tolist() == [4, 5, 6, 7]
