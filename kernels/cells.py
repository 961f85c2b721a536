"""Cells: runs of tokens that FreeSolo summarises, ranks and reads again long after they left the window.

The functions take a *table* of cells in ascending order of global index. It may be the whole sequence or any subset of
it (what earlier context-parallel ranks offered, then the rank's own cells): a cell's summaries and scores have the same
bits in every table, so all ranks choose alike. Equations: FreeSolo, arXiv 2610.17191 (cells, availability, score,
FS and FS-L, readout).

Shapes: B batch, T queries, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells in the table,
C candidate cells of one query block, K cells read per query.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import check_heads, compute_dtype, group_heads, masked_attention, recompute, ungroup_heads
from kernels.triton_freesolo import triton_cell_priority, triton_choose_cells, triton_read_cells
from kernels.triton_tools import use_triton

_MAX_PRODUCTS = 2**18  # float64 products held at once while scoring: about one L2 cache


# Cells and their summaries


def split_cells(x: Tensor, cell_size: int) -> Tensor:
    """Cut keys or values [B, T, G, D] into their complete cells [B, G, N, s, D]; N is 0 when T < s."""
    _check_at_least_one(cell_size=cell_size)
    num_cells = x.shape[1] // cell_size
    cells = x[:, : num_cells * cell_size].unflatten(1, (num_cells, cell_size))
    return cells.permute(0, 3, 1, 2, 4).contiguous()


def number_cells(cells: Tensor, first: int = 0) -> Tensor:
    """Global indices int64 [B, G, N] of consecutive cells [B, G, N, s, D], the first of which is `first`."""
    B, G, N = cells.shape[:3]
    return torch.arange(first, first + N, device=cells.device).expand(B, G, N)


def take_cells(table: Tensor, columns: Tensor) -> Tensor:
    """Entries [B, G, C, ...] of a table [B, G, N, ...] at positions `columns` [B, G, C], differentiable in the table.

    Padding (-1) takes whatever the table holds first; it is for the caller to mask.
    """
    B, G, N = table.shape[:3]
    first_row = N * torch.arange(B * G, device=table.device)[:, None]
    rows = (columns.clamp(min=0).view(B * G, -1) + first_row).flatten()
    return table.reshape(B * G * N, *table.shape[3:]).index_select(0, rows).view(*columns.shape, *table.shape[3:])


@torch.no_grad()
def cell_mean(k_cells: Tensor) -> Tensor:
    """Mean key of each cell: [B, G, N, s, D] of any float dtype -> float64 [B, G, N, D], without gradient."""
    return (_ordered_sum(k_cells.double().movedim(3, 0)) / k_cells.shape[3]).contiguous()


@torch.no_grad()
def cell_priority(k_cells: Tensor, backend: str = "auto") -> Tensor:
    """a_c, the largest L2 norm of a cell's keys: [B, G, N, s, D] -> [B, G, N], without gradient.

    In float64, or in the fp32 that the Triton kernels rank by, so that what is offered and what is chosen agree.
    """
    if use_triton("cell_priority", backend, k_cells):
        return triton_cell_priority(k_cells)
    keys = k_cells.double().movedim(4, 0)
    return _ordered_sum(keys * keys).sqrt().amax(dim=-1)


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum over the first dim by folding it in half again and again.

    Elementwise additions in a fixed order give the same bits whatever surrounds a number, and equal cells equal sums.
    Matmul and `sum` promise neither: they choose their order by shape.
    """
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x, rest = x[:half] + x[half : 2 * half], x[2 * half :]
        if rest.shape[0]:
            x[0] += rest[0]
    return x[0]


# Pools: what FS-L keeps


@torch.no_grad()
def offered_cells(priority: Tensor, index: Tensor, *, retain: int, recent: int) -> Tensor:
    """The cells that FS-L keeps of a table: the `retain` of largest priority and the `recent` last ones.

    Keeping is associative: the pool of (offer of the first cells + later cells) is the pool of all of them. So a rank
    offers these to later ranks and nothing else of it can ever be chosen there.

    Args:
        priority: a_c [B, G, N]; equal priorities prefer the smaller index.
        index: global cell indices, int64 [B, G, N], ascending; -1 is padding and never kept.
        retain, recent: P and W.

    Returns:
        Positions in the table, int64 [B, G, min(N, retain + recent)], ascending, -1 padded.

    Raises:
        ValueError: `retain` or `recent` below 1.
    """
    _check_at_least_one(retain=retain, recent=recent)
    N, present = index.shape[-1], index >= 0
    ranked = priority.masked_fill(~present, -math.inf).argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(present).scatter(-1, ranked[..., :retain], True)
    age = present.flip(-1).cumsum(dim=-1).flip(-1)  # 1 is the last cell
    keep = (keep | (age <= recent)) & present
    columns = torch.arange(N, device=index.device).where(keep, N).sort(dim=-1).values[..., : retain + recent]
    return columns.masked_fill(columns == N, -1)


# Selection


def choose_cells(
    q: Tensor,
    k_cells: Tensor,
    cell_index: Tensor | None,
    *,
    query_start: int = 0,
    query_block: int,
    top_k: int,
    sigma: float | Tensor,
    lam: float | Tensor,
    retain: int | None,
    recent: int,
    backend: str = "auto",
) -> Tensor:
    """The cells each query reads; arguments and errors as in `read_cells`.

    Returns:
        Global cell indices, int32 [B, T, H, K], ascending, then -1 where fewer than K cells are available.
    """
    ranking = {"top_k": top_k, "sigma": sigma, "lam": lam, "retain": retain, "recent": recent}
    if use_triton("choose_cells", backend, q, k_cells):
        _check_table(q, k_cells, cell_index)
        check_ranking(q, k_cells.shape[3], query_start, query_block, **ranking)
        place = {"query_start": query_start, "query_block": query_block}
        return triton_choose_cells(q, k_cells, cell_index, **place, **ranking)
    cell_index = number_cells(k_cells) if cell_index is None else cell_index
    chosen = []
    for columns, picks in _select(q, k_cells, cell_index, query_start, query_block, **ranking):
        index = F.pad(take_cells(cell_index, columns), (0, 1), value=-1)  # one more, for the picks that are padding
        index = index[:, :, None, None].expand(*picks.shape[:-1], -1)
        chosen.append(index.gather(-1, picks))
    return ungroup_heads(torch.cat(chosen, dim=3)).int()


class _Block(NamedTuple):
    """What the queries of one block read."""

    columns: Tensor  # [B, G, C] candidates as positions in the table, -1 is padding
    picks: Tensor  # [B, G, R, T, K] chosen candidates, ascending, C is padding


@torch.no_grad()
def _select(
    q: Tensor,
    k_cells: Tensor,
    cell_index: Tensor,
    query_start: int,
    query_block: int,
    *,
    top_k: int,
    sigma: float | Tensor,
    lam: float | Tensor,
    retain: int | None,
    recent: int,
) -> list[_Block]:
    """Candidates and picks of every query block."""
    _check_table(q, k_cells, cell_index)
    (_, T, _, _), (_, G, _, cell_size, _) = q.shape, k_cells.shape
    ranking = {"top_k": top_k, "sigma": sigma, "lam": lam, "retain": retain, "recent": recent}
    check_ranking(q, cell_size, query_start, query_block, **ranking)
    sigma, lam = (_per_head(x, G, q.device) for x in (sigma, lam))
    mean, priority = cell_mean(k_cells), cell_priority(k_cells, "reference")

    starts = range(query_start, query_start + T, query_block)
    widths = _prefix_widths(cell_index, cell_size, starts)
    blocks = []
    for start, width, queries in zip(starts, widths, group_heads(q, G).split(query_block, dim=3), strict=True):
        available = _available(cell_index[..., :width], start, cell_size)
        if retain is None:
            columns = torch.arange(width, device=q.device).where(available >= 0, -1)
        else:
            columns = offered_cells(priority[..., :width], available, retain=retain, recent=recent)
        position = torch.arange(start, start + queries.shape[3], device=q.device)
        centre = (take_cells(cell_index, columns).double() + 0.5) * cell_size
        recency = _recency(position, centre, take_cells(priority, columns), sigma, lam)
        scores = _products(queries.double(), take_cells(mean, columns)) / math.sqrt(q.shape[-1]) + recency
        blocks.append(_Block(columns, _best(scores, columns >= 0, top_k)))
    return blocks


def _available(index: Tensor, block_start: int, cell_size: int) -> Tensor:
    """`index` with -1 in place of the cells that do not end at or before `block_start`."""
    return index.where((index + 1) * cell_size <= block_start, -1)


def _prefix_widths(index: Tensor, cell_size: int, block_starts: Sequence[int]) -> list[int]:
    """How many leading columns of the table hold every cell that is available at each block start."""
    never = torch.iinfo(index.dtype).max
    ends = ((index + 1) * cell_size).where(index >= 0, never).amin(dim=(0, 1))  # the earliest in each column
    ends = ends.flip(0).cummin(dim=0).values.flip(0)
    return torch.searchsorted(ends, torch.tensor(block_starts, device=ends.device), right=True).tolist()


def _products(q: Tensor, mean: Tensor) -> Tensor:
    """Float64 q_i . kbar_c: [B, G, R, T, D] and [B, G, C, D] -> [B, G, R, T, C], the same bits in any table."""
    rows = max(1, _MAX_PRODUCTS * q.shape[3] // max(1, q.numel() * mean.shape[2]))
    mean = mean.movedim(-1, 0).contiguous()[:, :, :, None, None]  # [D, B, G, 1, 1, C]
    q = q.movedim(-1, 0)[..., None]  # [D, B, G, R, T, 1]
    return torch.cat([_ordered_sum(part * mean) for part in q.split(rows, dim=4)], dim=3)


def _recency(position: Tensor, centre: Tensor, priority: Tensor, sigma: Tensor, lam: Tensor) -> Tensor:
    """lambda a_c erf((i - p_c) / (2 sigma)): [T] and [B, G, C] -> [B, G, 1 or R, T, C]."""
    centre, priority = centre[:, :, None, None], priority[:, :, None, None]
    return lam * priority * torch.erf((position[:, None] - centre) / (2 * sigma))


def _best(scores: Tensor, available: Tensor, top_k: int) -> Tensor:
    """Positions of the `top_k` best available candidates, ascending, C padded; equal scores prefer the smaller."""
    C, available = scores.shape[-1], available[:, :, None, None]
    # a stable sort and not topk, which promises no order among equals
    ranked = scores.masked_fill(~available, -math.inf).argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    picks = ranked.where(available.expand_as(scores).gather(-1, ranked), C).sort(dim=-1).values
    return F.pad(picks, (0, top_k - picks.shape[-1]), value=C)


# Readout


class Readout(NamedTuple):
    """What the queries read of their cells."""

    u: Tensor  # [B, T, H, D] in the dtype of the queries
    # [B, G, query blocks] fp32 or fp64: share of the available cells that FS-L's pool holds, 1 where none is available
    retained: Tensor | None


def read_cells(
    q: Tensor,
    k_cells: Tensor,
    v_cells: Tensor,
    cell_index: Tensor | None,
    *,
    query_start: int = 0,
    query_block: int,
    top_k: int,
    sigma: float | Tensor,
    lam: float | Tensor,
    retain: int | None,
    recent: int,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Readout:
    """u_i: one softmax over all tokens of the cells that query i chooses, without rotation or positional term.

    A query in block b = query_block * (i // query_block) may choose cells that end at or before b, by
    r_ic = q_i . kbar_c / sqrt(D) + lam_h a_c erf((i - p_c) / (2 sigma_h)). Selection passes no gradient; q, and k and v
    of the chosen cells, get it through the softmax. Blocks are recomputed in the backward pass.

    Args:
        q: unrotated queries [B, T, H, D] of any float dtype, at global positions query_start ...
        k_cells, v_cells: the table [B, G, N, s, D], unrotated keys and values, H a multiple of G.
        cell_index: global cell indices, int64 [B, G, N], ascending; -1 is padding and may stand over any content.
            None: the table is the whole sequence up to there, cells 0 .. N-1.
        query_start: position of the first query, a multiple of `query_block`.
        query_block: Bq, a multiple of the cell size.
        top_k: K.
        sigma, lam: width and weight of the positional term, a number or one per query head [H].
        retain: P of FS-L; None is FS, which ranks every available cell.
        recent: W of FS-L.
        backend: "auto" (Triton on CUDA, for fp64 and elsewhere the reference), "reference" or "triton".
        deterministic: same gradient bits in every run; None follows `torch.are_deterministic_algorithms_enabled`.
            The reference always is; Triton pays for a sort.

    Returns:
        u, exactly 0 (with gradient exactly 0) where nothing is chosen, and what the pools hold; see `Readout`.

    Raises:
        ValueError: shapes that do not fit, or numbers outside the ranges above.
    """
    if v_cells.shape != k_cells.shape:
        raise ValueError(f"k_cells {list(k_cells.shape)} and v_cells {list(v_cells.shape)} must have the same shape")
    ranking = {"top_k": top_k, "sigma": sigma, "lam": lam, "retain": retain, "recent": recent}
    if use_triton("read_cells", backend, q, k_cells, v_cells):
        _check_table(q, k_cells, cell_index)
        check_ranking(q, k_cells.shape[3], query_start, query_block, **ranking)
        place = {"query_start": query_start, "query_block": query_block}
        return Readout(
            *triton_read_cells(q, k_cells, v_cells, cell_index, **place, **ranking, deterministic=deterministic)
        )
    cell_index = number_cells(k_cells) if cell_index is None else cell_index
    blocks = _select(q, k_cells, cell_index, query_start, query_block, **ranking)
    # a masked token still enters the softmax, with weight 0: padding that holds NaN must not come through
    padding = (cell_index < 0)[..., None, None]
    k_cells, v_cells = k_cells.masked_fill(padding, 0), v_cells.masked_fill(padding, 0)
    queries = group_heads(q, k_cells.shape[1]).split(query_block, dim=3)
    out = [recompute(_read, part, k_cells, v_cells, *block) for part, block in zip(queries, blocks, strict=True)]
    u = ungroup_heads(torch.cat(out, dim=3)).to(q.dtype)
    return Readout(u, None if retain is None else _retained(blocks, query_start, query_block, k_cells.shape[3]))


def _retained(blocks: list[_Block], query_start: int, query_block: int, cell_size: int) -> Tensor:
    """`Readout.retained`: how many cells are available follows from a block's place, whatever the table lacks."""
    held = torch.stack([(block.columns >= 0).sum(dim=-1) for block in blocks], dim=-1)
    starts = torch.arange(query_start, query_start + len(blocks) * query_block, query_block, device=held.device)
    available = starts // cell_size
    return (held / available.double()).masked_fill(available == 0, 1)


def _read(q: Tensor, k_cells: Tensor, v_cells: Tensor, columns: Tensor, picks: Tensor) -> Tensor:
    """Readout of one block: all candidates' tokens in one matmul per kv head, each query masked to its picks."""
    C, cell_size = columns.shape[-1], k_cells.shape[3]
    k, v = (take_cells(cells, columns).flatten(2, 3) for cells in (k_cells, v_cells))  # [B, G, C * s, D]
    chosen = torch.zeros(*picks.shape[:-1], C + 1, dtype=torch.bool, device=q.device).scatter(-1, picks, True)
    visible = chosen[..., :C].repeat_interleave(cell_size, dim=-1)
    return masked_attention(q, k, v, visible, q.shape[-1] ** -0.5)


def combine(local: Tensor, u: Tensor, alpha: Tensor, gain: Tensor, *, eps: float) -> Tensor:
    """o = local + alpha_h * RMSNorm(u), the sum of FreeSolo's two branches.

    Args:
        local, u: window branch and readout [B, T, H, D], any float dtype; computed in fp32, or fp64 for fp64 inputs.
        alpha: weight of the readout per query head [H].
        gain: RMSNorm gain [D].
        eps: RMSNorm epsilon.

    Returns:
        [B, T, H, D] in the dtype of `local`.

    Raises:
        ValueError: shapes that do not fit.
    """
    H, D = local.shape[2:]
    if u.shape != local.shape:
        raise ValueError(f"local {list(local.shape)} and u {list(u.shape)} must have the same shape")
    if alpha.shape != (H,) or gain.shape != (D,):
        raise ValueError(f"alpha must be {[H]} and gain {[D]}, got {list(alpha.shape)} and {list(gain.shape)}")
    dtype = compute_dtype(local)
    u, alpha, gain = u.to(dtype), alpha.to(dtype), gain.to(dtype)
    normed = gain * u * (u.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (local.to(dtype) + alpha[:, None] * normed).to(local.dtype)


# Small tools


def _per_head(value: float | Tensor, num_kv_heads: int, device: torch.device) -> Tensor:
    """A number, or one per query head, as float64 that broadcasts against [B, G, R, T, C]."""
    value = torch.as_tensor(value, dtype=torch.float64, device=device)
    return value.view(num_kv_heads, -1, 1, 1) if value.dim() else value


def _check_table(q: Tensor, k_cells: Tensor, cell_index: Tensor | None) -> None:
    if k_cells.dim() != 5:
        raise ValueError(f"k_cells must be [batch, kv heads, cells, cell_size, head_dim], got {list(k_cells.shape)}")
    check_heads(q, k_cells.flatten(2, 3).transpose(1, 2))
    if cell_index is not None and cell_index.shape != k_cells.shape[:3]:
        raise ValueError(f"cell_index must be {list(k_cells.shape[:3])}, got {list(cell_index.shape)}")


def check_ranking(
    q: Tensor,
    cell_size: int,
    query_start: int,
    query_block: int,
    *,
    top_k: int,
    sigma: float | Tensor,
    lam: float | Tensor,
    retain: int | None,
    recent: int,
) -> None:
    """Raise ValueError for numbers out of range."""
    _check_at_least_one(
        cell_size=cell_size, top_k=top_k, recent=recent, **({} if retain is None else {"retain": retain})
    )
    if query_block % cell_size:
        raise ValueError(f"query_block {query_block} is not a multiple of cell_size {cell_size}")
    if query_start % query_block:
        raise ValueError(f"query_start {query_start} is not a multiple of query_block {query_block}")
    H = q.shape[2]
    for name, value in (("sigma", sigma), ("lam", lam)):
        if isinstance(value, Tensor) and value.dim() and value.shape != (H,):
            raise ValueError(f"{name} must be a number or [{H}], one per query head, got {list(value.shape)}")


def _check_at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
