"""The masks of the retrieval-weighted loss against the stored vectors and a definition written as loops."""

import time

import numpy as np
import pytest

from data_prep.recall import recall_masks
from tests.numerics import load_arrays


def recall_masks_ref(x: list[int], gap: int) -> tuple[list[bool], list[bool]]:
    """The definition: for every position, look through everything before it."""

    def match(i: int) -> int:
        if i < 0 or i + 4 > len(x):
            return -1
        earlier = [e for e in range(i) if x[e : e + 4] == x[i : i + 4]]
        return earlier[0] if len(earlier) == 1 and i - earlier[0] > gap else -1

    recall, switch, last_start = [False] * len(x), [False] * len(x), None
    for t in range(len(x) - 1):
        e = match(t + 1)
        if e >= 1 and x[e - 1] != x[t]:
            recall[t] = True
            switch[t] = last_start is not None and t - last_start[0] <= 64 and abs(e - last_start[1]) > 64
            last_start = (t, e)
        else:
            e = match(t - 3)
            recall[t] = e >= 0 and x[e + 4] == x[t + 1]
    return recall, switch


@pytest.mark.parametrize("name", ["recall_small", "recall_text_like"])
def test_stored_vectors(name):
    vectors = load_arrays(name)
    recall, switch = recall_masks(vectors["tokens"])
    assert recall.any() and switch.any()
    np.testing.assert_array_equal(recall, vectors["recall"])
    np.testing.assert_array_equal(switch, vectors["switch"])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("alphabet", [2, 5, 12])
@pytest.mark.parametrize("gap", [0, 3, 20])
def test_definition(seed, alphabet, gap):
    rng = np.random.default_rng([seed, alphabet, gap])
    x = rng.integers(0, alphabet, rng.integers(5, 400))
    recall, switch = recall_masks(x, gap=gap)
    want_recall, want_switch = recall_masks_ref(x.tolist(), gap)
    np.testing.assert_array_equal(recall, want_recall)
    np.testing.assert_array_equal(switch, want_switch)


def test_switch_between_two_far_sources():
    """Copies of two distant passages, one right after the other: the second copy is a switch."""
    x = np.arange(1000)
    x = np.concatenate([x, x[100:120], x[700:720], x[720:740]])
    recall, switch = recall_masks(x, gap=16)
    np.testing.assert_array_equal(recall, recall_masks_ref(x.tolist(), 16)[0])
    assert np.flatnonzero(switch).tolist() == [1019]


@pytest.mark.parametrize("length", range(7))
def test_short_documents_have_no_marks(length):
    recall, switch = recall_masks(np.zeros(length, dtype=np.uint16))
    assert recall.shape == switch.shape == (length,)
    assert not recall.any() and not switch.any()


def test_ids_of_any_dtype_and_size():
    x = np.random.default_rng(0).integers(0, 4, 300)
    want = recall_masks(x, gap=5)
    for ids in (x.astype(np.uint16), (x * 1_000_000_000).astype(np.uint32), x.astype(np.int64) << 60):
        got = recall_masks(ids, gap=5)
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    assert want[0].any()


def test_a_million_tokens_take_seconds_not_minutes():
    x = np.random.default_rng(0).integers(0, 50, 1_000_000).astype(np.uint16)
    began = time.process_time()
    recall, _ = recall_masks(x)
    assert time.process_time() - began < 5
    assert recall.any()
