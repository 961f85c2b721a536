"""Labels, weights and document starts, against the rule written position by position."""

import numpy as np
import pytest

from data_prep.batch import collate, filling


def sample(lengths, seq_length=12, masks=None, number=3):
    rng = np.random.default_rng(len(lengths))
    stored = {"tokens": rng.integers(0, 100, seq_length).astype(np.uint16), "id": np.int64(number)}
    stored["doc_lengths"] = np.array(lengths, dtype=np.uint32)
    for name, bits in (masks or {}).items():
        stored[name] = np.packbits(bits)
    return stored


def expected(stored, recall_beta=0.0, switch_beta=0.0, recall=None, switch=None):
    """The rule: a position learns its next token when both are real and of one document."""
    tokens, lengths = stored["tokens"], stored["doc_lengths"]
    T = len(tokens)
    owner, start = [None] * T, [int(lengths.sum())] * T
    position = 0
    for document, length in enumerate(lengths.tolist()):
        for t in range(position, position + length):
            owner[t], start[t] = document, position
        position += length
    labels, weights = [0] * T, [0.0] * T
    for t in range(T - 1):
        labels[t] = int(tokens[t + 1])
        if owner[t] is not None and owner[t] == owner[t + 1]:
            weights[t] = 1.0
            weights[t] += recall_beta * recall[t] if recall is not None else 0.0
            weights[t] += switch_beta * switch[t] if switch is not None else 0.0
    return labels, weights, start


@pytest.mark.parametrize(
    "lengths",
    [[12], [5, 7], [1, 1, 10], [4, 4, 4], [5], [1], [3, 2], [11], [1] * 12],
    ids=lambda x: "-".join(map(str, x)),
)
def test_labels_weights_and_starts(lengths):
    stored = sample(lengths)
    fields = collate([stored])
    labels, weights, starts = expected(stored)
    assert fields["tokens"][0].tolist() == stored["tokens"].tolist()
    assert fields["labels"][0].tolist() == labels
    assert fields["weights"][0].tolist() == weights
    assert fields["doc_starts"][0].tolist() == starts
    assert fields["sample_ids"] == [3]


def test_dtypes_and_shapes():
    fields = collate([sample([12]), sample([5, 7], number=8)])
    assert [str(fields[k].dtype) for k in ("tokens", "labels", "weights", "doc_starts")] == [
        "torch.int64",
        "torch.int64",
        "torch.float32",
        "torch.int64",
    ]
    assert {tuple(fields[k].shape) for k in ("tokens", "labels", "weights", "doc_starts")} == {(2, 12)}
    assert fields["sample_ids"] == [3, 8]


@pytest.mark.parametrize("seq_length", [8, 12, 13, 17])
def test_masks_raise_weights_only_where_there_is_a_label(seq_length):
    rng = np.random.default_rng(seq_length)
    recall, switch = rng.random(seq_length) < 0.5, rng.random(seq_length) < 0.5
    stored = sample([3, seq_length - 5], seq_length, {"recall": recall, "switch": switch})
    fields = collate([stored], recall_beta=9.0, switch_beta=49.0)
    assert fields["weights"][0].tolist() == expected(stored, 9.0, 49.0, recall, switch)[1]


def test_masks_are_ignored_at_beta_zero():
    ones = np.ones(12, dtype=bool)
    fields = collate([sample([12], masks={"recall": ones, "switch": ones})])
    assert fields["weights"][0].tolist() == [1.0] * 11 + [0.0]


@pytest.mark.parametrize("lengths", [[13], [0, 12], [6, 7]])
def test_impossible_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="document lengths"):
        collate([sample(lengths)])


def test_filling_weighs_nothing():
    fields = filling(5)
    assert fields["weights"].sum() == 0 and fields["sample_ids"] == [-1]
    assert fields["tokens"].shape == (1, 5)
