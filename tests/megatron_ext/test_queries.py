"""Queries are dealt out so that every one is attended for once, and every rank works alike."""

import pytest
import torch

from megatron_ext.parallel.queries import deal_queries

PATTERNS = {
    "all": lambda t: torch.ones_like(t, dtype=torch.bool),
    "none": lambda t: torch.zeros_like(t, dtype=torch.bool),
    "a fifth": lambda t: torch.rand(t.shape) < 0.2,
    "the last quarter": lambda t: t >= 3 * t.shape[-1] // 4,
    "more and more": lambda t: torch.rand(t.shape) < t / t.shape[-1],
    "every seventh": lambda t: t % 7 == 0,
    "the last one": lambda t: t == t.shape[-1] - 1,
}


def deal(active: torch.Tensor, ranks: int) -> list[list[torch.Tensor]]:
    """Global positions that each source sends to each rank, per row of the batch."""
    batch, total = active.shape
    length = total // ranks
    sent = []
    for rank, part in enumerate(active.split(length, dim=1)):
        dealt = deal_queries(part, batch=batch, length=length, rank=rank, ranks=ranks, device=part.device)
        sent.append((dealt + rank * length).where(dealt >= 0, -1))
    return [[torch.stack(sent)[:, to, row] for to in range(ranks)] for row in range(batch)]


@pytest.mark.parametrize("length", [64, 1000, 1003])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_rank_works_alike(pattern, ranks, length):
    """A query costs its position + 1; shares differ by about one query of each slice, whatever gates are open."""
    total = length * ranks
    active = PATTERNS[pattern](torch.arange(total).expand(2, total))
    for row, by_rank in enumerate(deal(active, ranks)):
        everything = torch.cat([positions[positions >= 0] for positions in by_rank])
        assert torch.equal(everything.sort().values, active[row].nonzero().squeeze(1))
        work = torch.stack([(positions + 1).sum() for positions in by_rank])  # a free place is -1: no work
        assert work.max() - work.min() <= (ranks + 3) / 2 * total
        counts = torch.stack([(positions >= 0).sum() for positions in by_rank])
        assert counts.max() - counts.min() <= ranks


def test_rows_come_in_order_and_free_places_last():
    active = torch.rand(1, 50) < 0.3
    dealt = deal_queries(active, batch=1, length=50, rank=1, ranks=4, device=active.device)
    assert dealt.shape == (4, 1, 13)
    for places in dealt[:, 0]:
        taken = places[places >= 0]
        assert torch.equal(places[: len(taken)], taken.sort().values)


def test_none_means_all():
    everything = torch.ones(2, 21, dtype=torch.bool)
    ours = {"batch": 2, "length": 21, "rank": 2, "ranks": 4, "device": everything.device}
    assert torch.equal(deal_queries(None, **ours), deal_queries(everything, **ours))
