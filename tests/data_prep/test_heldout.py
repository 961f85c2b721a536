"""The held-out reader: every sequence once over all ranks, equally many batches on each."""

import numpy as np
import pytest

from data_prep.guard import DataError
from data_prep.heldout import EvalReader
from tests.data_prep.rig import numbered, write_split


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    write_split(folder / "heldout", numbered(13))
    return folder


@pytest.mark.parametrize("dp_size", [1, 2, 3, 20])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("limit", [None, 1, 8, 100])
def test_each_sequence_once_and_ranks_in_step(shards, dp_size, micro_batch, limit):
    readers = [
        EvalReader(shards, micro_batch=micro_batch, dp_rank=r, dp_size=dp_size, max_sequences=limit)
        for r in range(dp_size)
    ]
    per_rank = [list(reader) for reader in readers]
    assert {len(batches) for batches in per_rank} == {len(readers[0])}
    ids = []
    for batches in per_rank:
        for batch in batches:
            assert batch.tokens.shape == (micro_batch, 8) and len(batch.sample_ids) == micro_batch
            for row, number in enumerate(batch.sample_ids):
                assert batch.weights[row].sum() == (7 if number >= 0 else 0)
                assert batch.tokens[row, 0] == max(number, 0)
            ids += [number for number in batch.sample_ids if number >= 0]
    assert sorted(ids) == list(range(min(13, limit or 13))) and readers[0].num_sequences == len(ids)


def test_second_reading_equals_the_first(shards):
    reader = EvalReader(shards, micro_batch=4)
    assert [b.sample_ids for b in reader] == [b.sample_ids for b in reader]


def test_nothing_to_read_at_limit_zero(shards):
    assert list(EvalReader(shards, micro_batch=1, max_sequences=0)) == []


def test_errors_in_one_sentence(shards, tmp_path):
    with pytest.raises(DataError, match=r"index\.json does not exist"):
        EvalReader(tmp_path, micro_batch=1)
    with pytest.raises(ValueError, match="train.recall_beta is 1"):
        EvalReader(shards, micro_batch=1, recall_beta=1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        EvalReader(shards, micro_batch=1, dp_rank=2, dp_size=2)


def test_shard_that_vanishes(tmp_path):
    folder = write_split(tmp_path / "heldout", numbered(12))
    reader = EvalReader(tmp_path, micro_batch=1)
    (folder / "shard.00002.mds").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(reader)


def test_masks_weigh_when_asked(tmp_path):
    ones = np.packbits(np.ones(8, dtype=bool))
    write_split(tmp_path / "heldout", [sample | {"recall": ones, "switch": ones} for sample in numbered(3)])
    for betas, total in (((0, 0), 7), ((2, 0), 21), ((0, 3), 28)):
        (batch,) = EvalReader(tmp_path, micro_batch=3, recall_beta=betas[0], switch_beta=betas[1])
        assert batch.weights[0].sum() == total
