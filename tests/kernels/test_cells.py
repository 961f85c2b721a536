"""Cells, their summaries, the pools, and selection and readout from a partial table."""

import itertools
import math

import pytest
import torch

from kernels.cells import (
    _products,
    cell_mean,
    cell_priority,
    choose_cells,
    combine,
    number_cells,
    offered_cells,
    read_cells,
    split_cells,
    take_cells,
)
from tests.numerics import assert_close, out_and_grads

RANKING = {"query_block": 32, "top_k": 3, "sigma": 4.0, "lam": 1.0, "retain": 5, "recent": 3}


def random_tokens(B=1, T=256, H=4, G=2, D=16, dtype=torch.float64):
    """Queries, and keys that repeat whole cells of 8, so that ranking meets exact ties."""
    q, v = torch.randn(B, T, H, D, dtype=dtype), torch.randn(B, T, G, D, dtype=dtype)
    k = torch.randn(B, T // 8, 8, G, D, dtype=dtype)
    k = k[:, torch.randint(0, T // 8, (T // 8,))].flatten(1, 2)
    return {"q": q, "k": k, "v": v}


def pool_by_hand(priority, index, retain, recent):
    """One row, plain Python: positions kept, ascending."""
    present = [n for n, c in enumerate(index) if c >= 0]
    largest = sorted(present, key=lambda n: (-priority[n], n))[:retain]
    return sorted({*largest, *present[-recent:]})


# Cells and summaries


@pytest.mark.parametrize(("T", "num_cells"), [(1, 0), (7, 0), (8, 1), (23, 2)])
def test_only_complete_cells_exist(T, num_cells):
    x = torch.randn(2, T, 3, 5)
    cells = split_cells(x, 8)
    assert cells.shape == (2, 3, num_cells, 8, 5)
    for c in range(num_cells):
        assert torch.equal(cells[:, :, c], x[:, 8 * c : 8 * c + 8].transpose(1, 2))
    assert number_cells(cells, first=4)[1, 2].tolist() == list(range(4, 4 + num_cells))
    assert cell_mean(cells).shape == (2, 3, num_cells, 5) and cell_priority(cells).shape == (2, 3, num_cells)


@pytest.mark.parametrize("cell_size", [1, 7, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_summaries_are_float64_and_right(cell_size, dtype):
    cells = torch.randn(2, 2, 5, cell_size, 40).to(dtype).requires_grad_()
    mean, priority = cell_mean(cells), cell_priority(cells)
    assert mean.dtype == priority.dtype == torch.float64
    assert not mean.requires_grad and not priority.requires_grad
    assert_close("mean", mean, cells.double().mean(3), rtol=1e-14)
    assert_close("priority", priority, cells.double().norm(dim=-1).amax(-1), rtol=1e-14)


def test_summaries_have_the_same_bits_in_every_table():
    cells = torch.randn(1, 2, 37, 32, 96)
    for columns in ([3], [0, 36], [5, 6, 7, 20, 21]):
        part = cells[:, :, columns]
        assert torch.equal(cell_mean(part), cell_mean(cells)[:, :, columns])
        assert torch.equal(cell_priority(part), cell_priority(cells)[:, :, columns])


def test_products_have_the_same_bits_in_every_table_and_block():
    q, cells = torch.randn(1, 2, 3, 50, 96, dtype=torch.float64), torch.randn(1, 2, 37, 96, dtype=torch.float64)
    whole = _products(q, cells)
    assert_close("products", whole, torch.einsum("bgrtd,bgcd->bgrtc", q, cells), rtol=1e-14)
    for columns in ([3], [0, 36], list(range(5, 30))):
        for rows in (slice(0, 1), slice(7, 50), slice(49, 50)):
            assert torch.equal(_products(q[:, :, :, rows], cells[:, :, columns]), whole[:, :, :, rows, columns])


def test_summaries_leave_their_input_alone():
    cells = torch.randn(1, 1, 3, 7, 5, dtype=torch.float64)
    before = cells.clone()
    cell_mean(cells), cell_priority(cells)
    assert torch.equal(cells, before)


def test_take_cells_passes_gradient_to_what_it_took():
    table = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    columns = torch.tensor([[[0, 4], [1, 2]], [[3, 4], [2, -1]]])
    taken = take_cells(table, columns)
    for b, g, n in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)):
        assert torch.equal(taken[b, g, n], table[b, g, columns[b, g, n]])
    taken[:, :, 0].sum().backward()
    assert table.grad.sum(-1).nonzero().tolist() == [[0, 0, 0], [0, 1, 1], [1, 0, 3], [1, 1, 2]]


# Pools


@pytest.mark.parametrize(("retain", "recent"), [(1, 1), (4, 3), (3, 40), (40, 1)])
@pytest.mark.parametrize("num_cells", [0, 1, 2, 20])
def test_pool_is_the_largest_and_the_last(retain, recent, num_cells):
    priority = torch.randint(0, 6, (2, 3, num_cells)).double()  # many ties
    index = torch.arange(num_cells).where(torch.rand(2, 3, num_cells) < 0.7, -1)
    got = offered_cells(priority, index, retain=retain, recent=recent)
    assert got.shape == (2, 3, min(num_cells, retain + recent)) and got.dtype == torch.int64
    for b in range(2):
        for g in range(3):
            want = pool_by_hand(priority[b, g].tolist(), index[b, g].tolist(), retain, recent)
            assert got[b, g].tolist() == want + [-1] * (got.shape[-1] - len(want))


def test_what_a_pool_drops_never_returns():
    priority, index = torch.randint(0, 9, (1, 2, 60)).double(), torch.arange(60).expand(1, 2, 60)
    keep = {"retain": 6, "recent": 4}
    whole = offered_cells(priority, index, **keep)
    for cut in range(61):
        early = offered_cells(priority[..., :cut], index[..., :cut], **keep)
        merged = torch.cat([early, index[..., cut:]], dim=-1)
        padding = merged < 0
        columns = offered_cells(priority.gather(-1, merged.clamp(min=0)).masked_fill(padding, 99), merged, **keep)
        got = merged.gather(-1, columns.clamp(min=0)).masked_fill(columns < 0, -1)
        width = min(got.shape[-1], whole.shape[-1])
        assert torch.equal(got[..., :width], whole[..., :width])
        assert (got[..., width:] == -1).all() and (whole[..., width:] == -1).all()


def test_pools_tell_what_share_of_the_cells_they_hold():
    tokens = random_tokens(B=2, T=250)
    k_cells, v_cells = split_cells(tokens["k"], 8), split_cells(tokens["v"], 8)  # 31 cells, blocks of 4
    index, priority = number_cells(k_cells), cell_priority(k_cells)
    retained = read_cells(tokens["q"], k_cells, v_cells, index, **RANKING).retained
    assert retained.shape == (2, 2, 8) and retained.dtype == torch.float64
    assert (retained[..., 0] == 1).all()  # none available
    for b, g, block in itertools.product(range(2), range(2), range(1, 8)):
        pool = pool_by_hand(priority[b, g, : 4 * block].tolist(), range(4 * block), 5, 3)
        assert retained[b, g, block].item() == pytest.approx(len(pool) / (4 * block), rel=1e-15)
    assert read_cells(tokens["q"], k_cells, v_cells, index, **{**RANKING, "retain": None}).retained is None
    # a table without the cells that no pool holds gives the same answer
    part = slice_of_rank(tokens, 3, 64, 5, 3)
    assert torch.equal(read_cells(*part, query_start=192, **RANKING).retained, retained[..., 6:])


# Selection and readout


def slice_of_rank(tokens, rank, size, retain, recent):
    """What a context-parallel rank holds: its queries, and a table of earlier ranks' offers before its own cells."""
    k_cells, v_cells = split_cells(tokens["k"], 8), split_cells(tokens["v"], 8)
    index, priority = number_cells(k_cells), cell_priority(k_cells)
    columns = []
    for earlier in range(rank):
        own = slice(earlier * size // 8, (earlier + 1) * size // 8)
        offer = index[..., own]
        if retain is not None:
            offer = offered_cells(priority[..., own], offer, retain=retain, recent=recent)
            offer = (offer + own.start).masked_fill(offer < 0, -1)
        columns.append(offer)
    columns = torch.cat([*columns, index[..., rank * size // 8 : (rank + 1) * size // 8]], dim=-1)
    padding = (columns < 0)[..., None, None]
    table = [take_cells(x, columns).masked_fill(padding, torch.nan) for x in (k_cells, v_cells)]
    return tokens["q"][:, rank * size : (rank + 1) * size], *table, columns


@pytest.mark.parametrize("retain", [None, 1, 5, 100])
@pytest.mark.parametrize("size", [32, 64, 128])  # 32 offers 4 cells, fewer than retain + recent
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_choose_and_read_as_one_process(retain, size, dtype):
    tokens = random_tokens(B=2, dtype=dtype)
    d_out, ranking = torch.randn_like(tokens["q"]), {**RANKING, "retain": retain}

    def whole(q, k, v):
        k_cells, v_cells = split_cells(k, 8), split_cells(v, 8)
        return read_cells(q, k_cells, v_cells, number_cells(k_cells), **ranking).u

    def ranks(q, k, v):
        parts = [slice_of_rank({"q": q, "k": k, "v": v}, r, size, retain, recent=3) for r in range(256 // size)]
        return torch.cat([read_cells(*part, query_start=r * size, **ranking).u for r, part in enumerate(parts)], dim=1)

    k_cells = split_cells(tokens["k"], 8)
    chosen = choose_cells(tokens["q"], k_cells, number_cells(k_cells), **ranking)
    for rank in range(256 // size):
        q, k_table, _, index = slice_of_rank(tokens, rank, size, retain, recent=3)
        got = choose_cells(q, k_table, index, query_start=rank * size, **ranking)
        assert torch.equal(got, chosen[:, rank * size : (rank + 1) * size])
    want = out_and_grads(whole, tokens, d_out)
    for name, got in out_and_grads(ranks, tokens, d_out).items():
        assert_close(name, got, want[name], rtol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("retain", [None, 5])
def test_padding_may_stand_anywhere(retain):
    tokens, ranking = random_tokens(B=2), {**RANKING, "retain": retain}
    k_cells, v_cells = split_cells(tokens["k"], 8), split_cells(tokens["v"], 8)
    index = number_cells(k_cells)
    want = read_cells(tokens["q"], k_cells, v_cells, index, **ranking).u
    columns = torch.full((2, 2, 71), -1)
    columns[..., 7::2] = index  # padding first, last and between
    columns[1, 1] = columns[1, 1].roll(-3)
    tables = [take_cells(x, columns).masked_fill((columns < 0)[..., None, None], torch.nan) for x in (k_cells, v_cells)]
    assert_close("u", read_cells(tokens["q"], *tables, columns, **ranking).u, want, rtol=1e-12)


def test_equal_cells_tie_exactly_and_the_smaller_index_wins():
    cell = torch.randn(1, 8, 1, 24)
    k_cells = split_cells(cell.repeat(1, 64, 1, 1), 8)  # 64 cells, all alike
    q = torch.randn(1, 512, 3, 24)
    chosen = choose_cells(q, k_cells, number_cells(k_cells), **{**RANKING, "retain": None, "lam": 0.0})
    assert (chosen[:, 32:] == torch.tensor([0, 1, 2])).all()
    # the positional term is 1 for all but the nearest cells: the far ones tie as well
    chosen = choose_cells(q, k_cells, number_cells(k_cells), **{**RANKING, "retain": None})
    assert (chosen[:, 96:] == torch.tensor([0, 1, 2])).all()


def test_nothing_available_reads_exact_zeros():
    tokens = random_tokens(T=64)
    k_cells = split_cells(tokens["k"], 8)
    columns = number_cells(k_cells).clone()
    columns[:, 0, :5] = -1  # head 0 has nothing before block 1 ends, head 1 has
    k_cells[:, 0, :5] = torch.nan
    inputs = {"q": tokens["q"], "k_cells": k_cells, "v_cells": split_cells(tokens["v"], 8)}
    got = out_and_grads(
        lambda q, k_cells, v_cells: read_cells(q, k_cells, v_cells, columns, **RANKING).u,
        inputs,
        torch.ones(1, 64, 4, 16).double(),
    )
    assert (choose_cells(tokens["q"], k_cells, columns, **RANKING)[:, :, :2] == -1).all()
    for name in ("out", "dq"):
        assert (got[name][:, :32] == 0).all() and (got[name][:, :, :2] == 0).all()
        assert (got[name][:, 32:, 2:] != 0).any()
    for name in ("dk_cells", "dv_cells"):
        assert got[name].isfinite().all() and (got[name][:, 0] == 0).all() and (got[name][:, :, 4:] == 0).all()


def test_unavailable_cells_do_not_touch_the_result():
    tokens = random_tokens(T=96)
    k_cells, v_cells = split_cells(tokens["k"], 8), split_cells(tokens["v"], 8)
    want = read_cells(tokens["q"], k_cells, v_cells, number_cells(k_cells), **RANKING).u
    k_cells[:, :, 8:], v_cells[:, :, 8:] = torch.nan, torch.inf
    assert torch.equal(read_cells(tokens["q"], k_cells, v_cells, number_cells(k_cells), **RANKING).u, want)


def test_sigma_and_lam_per_head():
    tokens = random_tokens()
    k_cells = split_cells(tokens["k"], 8)
    sigma, lam = torch.tensor([0.5, 4.0, 9.0, 70.0]), torch.tensor([0.0, 1.0, 2.0, -1.0])
    together = choose_cells(tokens["q"], k_cells, number_cells(k_cells), **{**RANKING, "sigma": sigma, "lam": lam})
    for head in range(4):
        alone = {**RANKING, "sigma": sigma[head].item(), "lam": lam[head].item()}
        got = choose_cells(tokens["q"], k_cells, number_cells(k_cells), **alone)
        assert torch.equal(got[:, :, head], together[:, :, head])


def test_combine():
    local, u = torch.randn(2, 5, 3, 8).double(), torch.randn(2, 5, 3, 8).double() * 1e-4  # eps matters
    alpha, gain = torch.randn(3).double(), torch.randn(8).double()
    got = combine(local, u, alpha, gain, eps=1e-8)
    for b, t, h in ((0, 0, 0), (1, 4, 2), (0, 3, 1)):
        rms = math.sqrt(sum(x * x for x in u[b, t, h].tolist()) / 8 + 1e-8)
        assert_close("o", got[b, t, h], local[b, t, h] + alpha[h] * gain * u[b, t, h] / rms, rtol=1e-14)
    low = combine(local.bfloat16(), u.float(), alpha, gain, eps=1e-8)
    assert low.dtype == torch.bfloat16
    assert torch.equal(combine(local, torch.zeros_like(u), alpha, gain, eps=1e-8), local)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start": 16}, "query_start 16 is not a multiple of query_block 32"),
        ({"query_block": 20}, "query_block 20 is not a multiple of cell_size 8"),
        ({"retain": 0}, "retain must be at least 1, got 0"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"top_k": -1}, "top_k must be at least 1, got -1"),
        ({"sigma": torch.ones(3)}, r"sigma must be a number or \[4\].*got \[3\]"),
        ({"lam": torch.ones(1, 4)}, r"lam must be a number or \[4\].*got \[1, 4\]"),
        ({"v_cells": torch.zeros(1, 2, 7, 8, 16)}, "must have the same shape"),
        ({"cell_index": torch.zeros(1, 2, 7).long()}, r"cell_index must be \[1, 2, 8\], got \[1, 2, 7\]"),
        ({"k_cells": torch.zeros(1, 2, 16), "v_cells": torch.zeros(1, 2, 16)}, r"got \[1, 2, 16\]"),
        ({"q": torch.zeros(1, 64, 5, 16)}, "5 query heads are not a multiple of 2"),
    ],
)
def test_errors(change, message):
    cells = torch.randn(1, 2, 8, 8, 16)
    arguments = {"q": torch.randn(1, 64, 4, 16), "k_cells": cells, "v_cells": cells, "cell_index": number_cells(cells)}
    with pytest.raises(ValueError, match=message):
        read_cells(**{**arguments, **RANKING, **change})


def test_other_errors():
    with pytest.raises(ValueError, match="cell_size must be at least 1, got 0"):
        split_cells(torch.zeros(1, 4, 1, 2), 0)
    with pytest.raises(ValueError, match="recent must be at least 1, got 0"):
        offered_cells(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2).long(), retain=1, recent=0)
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="same shape"):
        combine(x, x[:, :1], torch.ones(3), torch.ones(4), eps=1e-8)
    with pytest.raises(ValueError, match=r"alpha must be \[3\] and gain \[4\], got \[2\] and \[4\]"):
        combine(x, x, torch.ones(2), torch.ones(4), eps=1e-8)
