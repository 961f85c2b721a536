"""Reading the chosen cells on the GPU, pair by pair: a pair is one query with one of the K cells it chose.

Pairs lie in the order of their cells, so a tile of TILE pairs multiplies its queries with one cell's keys and values.
Each pair's softmax over its cell is stored with its log-sum-exp; the K of a query are merged later. The backward
kernel owns a cell and walks its pairs, so dk and dv need no atomics; dq is stored per pair and summed later.
Heads are taken in chunks: what is stored per pair exists for one chunk at a time.

Shapes: B batch, T queries, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells, K cells per
query, BG = B * G.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_cells import TILE, Choice, run_length
from kernels.triton_tools import (
    LOG2E,
    cdiv,
    dot,
    fine_dtype,
    head_lanes,
    padded_dim,
    shared_memory,
    token_strides,
    with_rest,
)
from kernels.triton_window import gradient_scale, merge_slots

NORM_ROWS = 128  # rows that one program of the RMSNorm's backward takes


@triton.jit
def _store_scaled(part_ptr, size_ptr, x, row, real, lane, there, D: tl.constexpr):
    """Store rows in units of their largest entry, so that fp16 holds them to 11 bits whatever their size."""
    size = tl.max(tl.abs(x), 1)
    x = x * (1.0 / tl.where(size > 0, size, 1.0))[:, None]
    here = real[:, None] & there[None, :]
    tl.store(part_ptr + row[:, None] * D + lane[None, :], x.to(part_ptr.dtype.element_ty), mask=here)
    tl.store(size_ptr + row, size, mask=real)


@triton.jit
def _read_fwd_kernel(
    q_ptr, k_ptr, v_ptr, picks_ptr, order_ptr, part_ptr, part_lse_ptr, part_size_ptr,
    q_sb, q_st, q_sh, k_sb, k_sg, k_sn, k_ss, v_sb, v_sg, v_sn, v_ss, T, G, head_start, capacity, scale,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles = capacity // TILE
    pid = tl.program_id(0)
    chunk_g = (pid // tiles).to(tl.int64)
    group = head_start + chunk_g
    b, g = group // G, group % G
    order_ptr += group * capacity + (pid % tiles).to(tl.int64) * TILE
    leader = tl.load(order_ptr)
    if leader >= 0:
        picks_ptr += b * T * (G * R * K) + g * R * K
        cell = tl.load(picks_ptr + (leader // (R * K)).to(tl.int64) * (G * R * K) + leader % (R * K)).to(tl.int64)
        pair = tl.load(order_ptr + tl.arange(0, TILE))
        real = pair >= 0
        t, r = (pair // (R * K)).to(tl.int64), pair // K % R
        lane = tl.arange(0, DP)
        there = lane < D
        q = tl.load(
            q_ptr + b * q_sb + t[:, None] * q_st + (g * R + r)[:, None] * q_sh + lane[None, :],
            mask=real[:, None] & there[None, :],
            other=0.0,
        )
        token = tl.arange(0, S)
        k = tl.load(
            k_ptr + b * k_sb + g * k_sg + cell * k_sn + token[:, None] * k_ss + lane[None, :],
            mask=there[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_ptr + b * v_sb + g * v_sg + cell * v_sn + token[:, None] * v_ss + lane[None, :],
            mask=there[None, :], other=0.0,
        )  # fmt: skip
        logits = dot(q, tl.trans(k)) * (scale * LOG2E)  # [TILE, S]
        peak = tl.max(logits, 1)
        weights = tl.exp2(logits - peak[:, None])
        total = tl.sum(weights, 1)
        FINE: tl.constexpr = part_ptr.dtype.element_ty
        out = dot(weights.to(FINE), v.to(FINE)) / total[:, None]
        row = chunk_g * T * (R * K) + pair
        _store_scaled(part_ptr, part_size_ptr, out, row, real, lane, there, D)
        tl.store(part_lse_ptr + row, peak + tl.log2(total), mask=real)


@triton.jit
def _merge_kernel(
    part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, u_ptr, lse_ptr, T, G, head_start,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """u [B, T, H, D] and its log-sum-exp from the parts of a chunk of heads."""
    tiles = tl.cdiv(T, BM)
    pid = tl.program_id(0)
    rows = pid % tiles * BM + tl.arange(0, BM)
    in_rows = rows < T
    chunk_g, r = (pid // tiles // R).to(tl.int64), pid // tiles % R
    group = head_start + chunk_g
    b, g = group // G, group % G
    token = (b * T + rows) * (G * R) + g * R + r
    pair = (chunk_g * T + rows) * R + r
    lane = tl.arange(0, DP)
    there = lane < D
    u, lse = merge_slots(
        part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, pair, token, in_rows, lane, there, K, D, DP, BM
    )
    here = in_rows[:, None] & there[None, :]
    tl.store(u_ptr + token[:, None] * D + lane[None, :], u.to(u_ptr.dtype.element_ty), mask=here)
    tl.store(lse_ptr + token, lse, mask=in_rows)


@triton.jit
def _norm_bwd_kernel(
    part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, out_ptr, rest_ptr, do_ptr, v_ptr, alpha_ptr, gain_ptr,
    du_ptr, du_size_ptr, lse_ptr, delta_u_ptr, delta_local_ptr, d_alpha_ptr, d_gain_ptr, bound_ptr,
    do_sb, do_st, do_sh, v_sb, v_st, v_sh, T, G, head_start, eps,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_REST: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Backward of out = local + alpha * gain * u / rms(u) for a tile of rows of one head.

    u is merged anew from its parts, and local is what out has besides. du goes to the chunk [heads, T, R, D] in units
    of its size [heads, T, R]; lse, sum_d u * du and sum_d local * d_out to [B, T, H]; each tile's share of d_alpha and
    d_gain to [BG, R, tiles(, D)]. `bound` [BG, 3] gets the largest norms of rows of d_out, v and du.
    """
    tiles = tl.cdiv(T, BM)
    pid = tl.program_id(0)
    rows = pid % tiles * BM + tl.arange(0, BM)
    in_rows = rows < T
    chunk_g, r = (pid // tiles // R).to(tl.int64), pid // tiles % R
    group = head_start + chunk_g
    b, g = group // G, group % G
    h = g * R + r
    token = (b * T + rows) * (G * R) + h
    pair = (chunk_g * T + rows) * R + r
    lane = tl.arange(0, DP)
    there = lane < D
    here = in_rows[:, None] & there[None, :]
    u, lse = merge_slots(
        part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, pair, token, in_rows, lane, there, K, D, DP, BM
    )
    d_out = tl.load(do_ptr + b * do_sb + h * do_sh + rows.to(tl.int64)[:, None] * do_st + lane[None, :], mask=here,
                    other=0.0).to(tl.float32)  # fmt: skip
    alpha = tl.load(alpha_ptr + h).to(tl.float32)
    gain = tl.load(gain_ptr + lane, mask=there, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(u * u, 1) / D + eps)
    unit = u * inverse[:, None]
    d_unit = d_out * gain[None, :]
    share = tl.sum(d_unit * unit, 1)
    du = alpha * inverse[:, None] * (d_unit - unit * (share / D)[:, None])
    _store_scaled(du_ptr, du_size_ptr, du, pair, in_rows, lane, there, D)
    tl.store(lse_ptr + token, lse, mask=in_rows)
    tl.store(delta_u_ptr + token, tl.sum(du * u, 1), mask=in_rows)
    out = tl.load(out_ptr + token[:, None] * D + lane[None, :], mask=here, other=0.0)
    if HAS_REST:  # local may be far smaller than what rounding took from out
        out = with_rest(out, tl.load(rest_ptr + token[:, None] * D + lane[None, :], mask=here, other=0))
    out = out.to(tl.float32)
    tl.store(delta_local_ptr + token, tl.sum(out * d_out, 1) - alpha * share, mask=in_rows)
    tl.atomic_max(bound_ptr + 3 * group, largest_norm(d_out), sem="relaxed")
    # rows that chose nothing have a du that nobody reads
    chose = tl.load(picks_ptr + token * K, mask=in_rows, other=-1) >= 0
    tl.atomic_max(bound_ptr + 3 * group + 2, largest_norm(tl.where(chose[:, None], du, 0.0)), sem="relaxed")
    if r == 0:
        v = tl.load(v_ptr + b * v_sb + g * v_sh + rows.to(tl.int64)[:, None] * v_st + lane[None, :], mask=here,
                    other=0.0).to(tl.float32)  # fmt: skip
        tl.atomic_max(bound_ptr + 3 * group + 1, largest_norm(v), sem="relaxed")
    tile = (group * R + r) * tiles + pid % tiles
    tl.store(d_alpha_ptr + tile, tl.sum(tl.where(in_rows, share, 0.0), 0))
    tl.store(d_gain_ptr + tile * D + lane, alpha * tl.sum(d_out * unit, 0), mask=there)


@triton.jit
def largest_norm(x):
    """The largest L2 norm of a row."""
    return tl.sqrt(tl.max(tl.sum(x * x, 1), 0))


@triton.jit
def _scale_rows_kernel(
    u_ptr, du_ptr, v_ptr, index_ptr, scaled_ptr, size_ptr, delta_ptr, bound_ptr,
    du_sb, du_st, du_sh, v_sb, v_sg, v_sn, v_ss, T, N, G, head_start,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, HAS_INDEX: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """For a readout whose du comes from outside: what `_norm_bwd_kernel` makes of a tile of rows.

    Programs beyond the last tile take one cell's v each; padding of the table does not count.
    """
    tiles = tl.cdiv(T, BM) * R
    pid = tl.program_id(0)
    tile = pid % (tiles + N)
    chunk_g = (pid // (tiles + N)).to(tl.int64)
    group = head_start + chunk_g
    b, g = group // G, group % G
    lane = tl.arange(0, DP)
    there = lane < D
    if tile < tiles:
        rows = tile // R * BM + tl.arange(0, BM)
        in_rows = rows < T
        here = in_rows[:, None] & there[None, :]
        h = g * R + tile % R
        token = (b * T + rows) * (G * R) + h
        du_at = du_ptr + b * du_sb + h * du_sh + rows.to(tl.int64)[:, None] * du_st + lane[None, :]
        du = tl.load(du_at, mask=here, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + token[:, None] * D + lane[None, :], mask=here, other=0.0).to(tl.float32)
        _store_scaled(scaled_ptr, size_ptr, du, (chunk_g * T + rows) * R + tile % R, in_rows, lane, there, D)
        tl.store(delta_ptr + token, tl.sum(u * du, 1), mask=in_rows)
        tl.atomic_max(bound_ptr + 3 * group + 2, largest_norm(du), sem="relaxed")
    else:
        cell = (tile - tiles).to(tl.int64)
        inside = tl.arange(0, S)
        present = inside < S
        if HAS_INDEX:
            present = present & (tl.load(index_ptr + group * N + cell) >= 0)
        v_at = v_ptr + b * v_sb + g * v_sg + cell * v_sn + inside[:, None] * v_ss + lane[None, :]
        v = tl.load(v_at, mask=present[:, None] & there[None, :], other=0.0).to(tl.float32)
        tl.atomic_max(bound_ptr + 3 * group + 1, largest_norm(v), sem="relaxed")


@triton.jit
def _read_bwd_kernel(
    q_ptr, k_ptr, v_ptr, du_ptr, du_size_ptr, lse_ptr, delta_ptr, bound_ptr, order_ptr, lists_ptr, part_ptr,
    part_size_ptr, dk_ptr, dv_ptr, q_sb, q_st, q_sh, k_sb, k_sg, k_sn, k_ss, v_sb, v_sg, v_sn, v_ss,
    T, N, G, head_start, max_extra, capacity, scale,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """One run of a cell's pairs: its share of the cell's dk and dv, and the dq that each pair gets from the cell.

    Shares lie in fp32 [heads, N + max_extra, S, D]: those of first runs by cell, then those of the extra runs.
    Products are taken in the dtype of the parts: fp16, for which gradients are scaled, holds 11 bits of each factor.
    """
    pid = tl.program_id(0)
    chunk_g = (pid // (N + max_extra)).to(tl.int64)
    group = head_start + chunk_g
    b, g = group // G, group % G
    lists_ptr += group * 3 * (N + 1)
    # extra runs, which are full, start first
    extra = pid % (N + max_extra)
    cell = extra - max_extra
    start = 0
    slot = cell
    if extra < max_extra:
        slot = N + extra
        cell = 0
        if extra >= tl.load(lists_ptr + 3 * N + 2):
            cell = N  # no such run
        else:
            above = N
            while above - cell > 1:
                middle = (cell + above) // 2
                if tl.load(lists_ptr + 2 * (N + 1) + middle) <= extra:
                    cell = middle
                else:
                    above = middle
            start = (extra - tl.load(lists_ptr + 2 * (N + 1) + cell) + 1) * RUN
    if cell < N:
        FINE: tl.constexpr = part_ptr.dtype.element_ty
        stop = tl.minimum(tl.load(lists_ptr + cell), start + RUN)
        order_ptr += group * capacity + tl.load(lists_ptr + (N + 1) + cell)
        wide_cell = cell.to(tl.int64)
        lane = tl.arange(0, DP)
        there = lane < D
        token = tl.arange(0, S)
        inside = (token < S)[:, None] & there[None, :]
        dk = tl.zeros([S, DP], tl.float32)
        dv = tl.zeros([S, DP], tl.float32)
        k_ptr += b * k_sb + g * k_sg + wide_cell * k_sn
        v_ptr += b * v_sb + g * v_sg + wide_cell * v_sn
        used = inside & (stop > start)
        k = tl.load(k_ptr + token[:, None] * k_ss + lane[None, :], mask=used, other=0.0).to(FINE)
        v = tl.load(v_ptr + token[:, None] * v_ss + lane[None, :], mask=used, other=0.0).to(FINE)
        du_bound = tl.load(bound_ptr + 3 * group + 2)
        dv_scale = gradient_scale(du_bound)
        dk_scale = gradient_scale(2 * du_bound * tl.load(bound_ptr + 3 * group + 1))
        for first in range(start, stop, TILE):
            place = first + tl.arange(0, TILE)
            pair = tl.load(order_ptr + place, mask=place < stop, other=-1)
            real = pair >= 0
            here = real[:, None] & there[None, :]
            t, r = (pair // (R * K)).to(tl.int64), pair // K % R
            q = tl.load(q_ptr + b * q_sb + t[:, None] * q_st + (g * R + r)[:, None] * q_sh + lane[None, :], mask=here,
                        other=0.0).to(FINE)  # fmt: skip
            source = (chunk_g * T + t) * R + r
            du = tl.load(du_ptr + source[:, None] * D + lane[None, :], mask=here, other=0.0)
            size = tl.load(du_size_ptr + source, mask=real, other=0.0)
            row = (b * T + t) * (G * R) + g * R + r
            lse = tl.load(lse_ptr + row, mask=real, other=0.0)
            delta = tl.load(delta_ptr + row, mask=real, other=0.0)
            weights = tl.exp2(dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])  # [TILE, S]
            weights = tl.where(real[:, None], weights, 0.0)
            dv = dot(tl.trans((weights * (size * dv_scale)[:, None]).to(FINE)), du, dv)
            d_weights = dot(du, tl.trans(v)) * size[:, None]
            d_logits = (weights * (d_weights - delta[:, None]) * dk_scale).to(FINE)
            dk = dot(tl.trans(d_logits), q, dk)
            dq = dot(d_logits, k) * (scale / dk_scale)
            _store_scaled(part_ptr, part_size_ptr, dq, chunk_g * T * (R * K) + pair, real, lane, there, D)
        at = ((chunk_g * (N + max_extra) + slot) * S + token)[:, None] * D + lane[None, :]
        tl.store(dk_ptr + at, dk * (scale / dk_scale), mask=inside)
        tl.store(dv_ptr + at, dv / dv_scale, mask=inside)


@triton.jit
def _sum_runs_kernel(
    dk_ptr, dv_ptr, lists_ptr, dk_out_ptr, dv_out_ptr, N, head_start, max_extra, CELL: tl.constexpr,
    IN_PLACE: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """BE of the CELL = S * D entries of one cell's dk and dv, summed over its runs, in place or to [BG, N, S, D]."""
    PIECES: tl.constexpr = (CELL + BE - 1) // BE
    pid = tl.program_id(0)
    entry = pid % PIECES * BE + tl.arange(0, BE)
    cell = pid // PIECES % N
    chunk_g = (pid // PIECES // N).to(tl.int64)
    group = head_start + chunk_g
    extra = lists_ptr + group * 3 * (N + 1) + 2 * (N + 1) + cell
    start, stop = tl.load(extra), tl.load(extra + 1)
    if (not IN_PLACE) or start < stop:
        base = chunk_g * (N + max_extra)
        own = (base + cell) * CELL + entry
        dk = tl.load(dk_ptr + own, mask=entry < CELL, other=0.0)
        dv = tl.load(dv_ptr + own, mask=entry < CELL, other=0.0)
        for first in range(start, stop, BR):
            run = first + tl.arange(0, BR)
            share = (base + N + run)[:, None] * CELL + entry[None, :]
            here = (run < stop)[:, None] & (entry < CELL)[None, :]
            dk += tl.sum(tl.load(dk_ptr + share, mask=here, other=0.0), 0)
            dv += tl.sum(tl.load(dv_ptr + share, mask=here, other=0.0), 0)
        if not IN_PLACE:
            own = (group * N + cell) * CELL + entry
        tl.store(dk_out_ptr + own, dk.to(dk_out_ptr.dtype.element_ty), mask=entry < CELL)
        tl.store(dv_out_ptr + own, dv.to(dv_out_ptr.dtype.element_ty), mask=entry < CELL)


@triton.jit
def _sum_slots_kernel(
    part_ptr, part_size_ptr, picks_ptr, dq_ptr, T, G, head_start,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dq [B, T, H, D] as the sum over the slots of a chunk of heads."""
    tiles = tl.cdiv(T, BM)
    pid = tl.program_id(0)
    rows = pid % tiles * BM + tl.arange(0, BM)
    in_rows = rows < T
    chunk_g, r = (pid // tiles // R).to(tl.int64), pid // tiles % R
    group = head_start + chunk_g
    b, g = group // G, group % G
    token = (b * T + rows) * (G * R) + g * R + r
    pair = (chunk_g * T + rows) * R + r
    lanes, there = head_lanes(D, DP)
    dq = tl.zeros([BM, DP], tl.float32)
    for slot in tl.static_range(K):
        pick = tl.load(picks_ptr + token * K + slot, mask=in_rows, other=-1)
        chosen = (in_rows & (pick >= 0))[:, None] & there[None, :]
        size = tl.load(part_size_ptr + pair * K + slot, mask=in_rows & (pick >= 0), other=0.0)[:, None]
        part = tl.load(part_ptr + (pair * K + slot)[:, None] * D + lanes[None, :], mask=chosen, other=0.0)
        dq += size * part.to(tl.float32)
    at = dq_ptr + token[:, None] * D + lanes[None, :]
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=in_rows[:, None] & there[None, :])


class Parts(NamedTuple):
    """What a chunk of heads stores per pair: x [heads, T, R, K, D] in units of size, and fp32 [heads, T, R, K]."""

    x: Tensor
    lse: Tensor
    size: Tensor


class Shares(NamedTuple):
    """dk and dv of the cells of a chunk of heads, fp32 [heads, N + extra runs, s, D]."""

    dk: Tensor
    dv: Tensor


def head_chunks(BG: int, bytes_per_head: int, budget: int | None = None) -> list[range]:
    """Ranges of (b, g) whose workspace stays within `budget` bytes, one head at least.

    Short heads get a larger budget: there the host's time for a launch counts, and at most a GB is little beside what
    the layers of so many tokens keep.
    """
    if budget is None:
        budget = 2**30 if bytes_per_head <= 2**26 else 2**28
    step = max(1, budget // max(1, bytes_per_head))
    return [range(start, min(BG, start + step)) for start in range(0, BG, step)]


def empty_parts(q: Tensor, heads: int, R: int, top_k: int) -> Parts:
    shape = (heads, q.shape[1], R, top_k)
    x = torch.empty(*shape, q.shape[3], dtype=fine_dtype(q.dtype), device=q.device)
    lse, size = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return Parts(x, lse, size)


def empty_shares(q: Tensor, heads: int, R: int, top_k: int, N: int, cell_size: int) -> Shares:
    shape = (heads, N + _max_extra(q, R, top_k), cell_size, q.shape[3])
    dk, dv = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    return Shares(dk, dv)


def _max_extra(q: Tensor, R: int, top_k: int) -> int:
    pairs = q.shape[1] * R * top_k
    return pairs // run_length(pairs)


def read_forward(
    q: Tensor, k: Tensor, v: Tensor, k_strides: tuple, v_strides: tuple, choice: Choice, parts: Parts, G: int,
    cell_size: int, heads: range,
) -> None:  # fmt: skip
    """Fill the parts of a chunk of heads."""
    _, T, H, D = q.shape
    capacity = choice.order.shape[1]
    _read_fwd_kernel[(capacity // TILE * len(heads),)](
        q, k, v, choice.picks, choice.order, *parts, *token_strides(q), *k_strides, *v_strides,
        T, G, heads.start, capacity, D**-0.5,
        R=H // G, K=choice.picks.shape[3], D=D, DP=padded_dim(D), S=cell_size, TILE=TILE, num_warps=4, num_stages=1,
    )  # fmt: skip


def backward_step(dtype: torch.dtype, head_dim: int, cell_size: int, device: torch.device) -> int:
    """Pairs that one step of the readout's backward takes: as many of TILE as shared memory holds beside a cell.

    That is k and v of the cell, q and du of the pairs and of the next step one of these, weights and their gradients.

    Raises:
        ValueError: a cell that is too large.
    """
    DP, room = padded_dim(head_dim), shared_memory(device) - 2048
    for step in (TILE, TILE // 2, TILE // 4):
        if dtype.itemsize * (2 * cell_size * DP + 3 * step * DP + 2 * step * cell_size) <= room:
            return step
    raise ValueError(f"cells of {cell_size} tokens of heads of {head_dim} in {dtype} do not fit the "
                     f"{room // 1024 + 2} KiB of shared memory of this GPU; take a smaller cell_size")  # fmt: skip


class ReadoutGradient(NamedTuple):
    """The gradient of a chunk of heads' u, in units of size per row, and what its backward needs of the softmax.

    du: [heads, T, R, D]. size: fp32 [heads, T, R]. lse, delta (sum_d u * du): fp32 [B, T, H] of all heads.
    bound: fp32 [BG, 3], the largest norms of rows of d_out, v and du, 0 at the start.
    """

    du: Tensor
    size: Tensor
    lse: Tensor
    delta: Tensor
    bound: Tensor


def empty_gradient(q: Tensor, lse: Tensor | None, BG: int, heads: int) -> ReadoutGradient:
    """Room for a chunk of `heads`; `lse` where it is known already."""
    B, T, H, D = q.shape
    R, device = B * H // BG, q.device
    return ReadoutGradient(
        torch.empty(heads, T, R, D, dtype=fine_dtype(q.dtype), device=device),
        torch.empty(heads, T, R, dtype=torch.float32, device=device),
        torch.empty(B, T, H, dtype=torch.float32, device=device) if lse is None else lse,
        torch.empty(B, T, H, dtype=torch.float32, device=device),
        torch.zeros(BG, 3, dtype=torch.float32, device=device),
    )


def read_backward(
    q: Tensor, k: Tensor, v: Tensor, k_strides: tuple, v_strides: tuple, gradient: ReadoutGradient, choice: Choice,
    parts: Parts, shares: Shares, G: int, cell_size: int, heads: range, out: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill dq of each pair of a chunk of heads in `parts`, dk and dv of its cells in `shares` or dense `out`."""
    (_, T, H, D), K = q.shape, choice.picks.shape[3]
    N, extra = choice.lists.shape[2] - 1, _max_extra(q, H // G, K)
    if N == 0:
        return
    step = backward_step(q.dtype, D, cell_size, q.device)
    _read_bwd_kernel[((N + extra) * len(heads),)](
        q, k, v, *gradient, choice.order, choice.lists, parts.x, parts.size, *shares, *token_strides(q), *k_strides,
        *v_strides, T, N, G, heads.start, extra, choice.order.shape[1], D**-0.5,
        R=H // G, K=K, D=D, DP=padded_dim(D), S=cell_size, TILE=step, RUN=run_length(T * (H // G) * K),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _sum_runs_kernel[(cdiv(cell_size * D, 512) * N * len(heads),)](
        *shares, choice.lists, *(out or shares), N, heads.start, extra,
        CELL=cell_size * D, IN_PLACE=out is None, BE=512, BR=8, num_warps=4,
    )  # fmt: skip


def scale_gradient(
    u: Tensor, du: Tensor, v_cells: Tensor, index: Tensor | None, gradient: ReadoutGradient, heads: range
) -> None:
    """Fill `gradient` (all but lse) for a chunk of heads from du [B, T, H, D] and a table of cells."""
    (_, T, H, D), (_, G, N, cell_size, _) = u.shape, v_cells.shape
    R = H // G
    _scale_rows_kernel[((cdiv(T, NORM_ROWS) * R + N) * len(heads),)](
        u, du, v_cells, v_cells if index is None else index, gradient.du, gradient.size, gradient.delta,
        gradient.bound, *token_strides(du), *v_cells.stride()[:4], T, N, G, heads.start,
        R=R, D=D, DP=padded_dim(D), S=cell_size, HAS_INDEX=index is not None, BM=NORM_ROWS,
    )  # fmt: skip


def merge_parts(parts: Parts, picks: Tensor, u: Tensor, lse: Tensor, G: int, heads: range) -> None:
    """Fill u and its log-sum-exp for a chunk of heads."""
    _, T, H, D = u.shape
    _merge_kernel[(cdiv(T, 64) * len(heads) * (H // G),)](
        *parts, picks, u, lse, T, G, heads.start, R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), BM=64
    )


def norm_backward(
    parts: Parts, picks: Tensor, out: Tensor, rest: Tensor, d_out: Tensor, v: Tensor, alpha: Tensor, gain: Tensor,
    gradient: ReadoutGradient, outputs: tuple[Tensor, Tensor, Tensor], G: int, eps: float, heads: range,
) -> None:  # fmt: skip
    """Fill `gradient` and `outputs` (delta of the local branch, shares of d_alpha and d_gain) of `heads`."""
    _, T, H, D = d_out.shape
    _norm_bwd_kernel[(cdiv(T, NORM_ROWS) * len(heads) * (H // G),)](
        *parts, picks, out, rest, d_out, v, alpha, gain, *gradient[:4], *outputs, gradient.bound, *token_strides(d_out),
        *token_strides(v), T, G, heads.start, eps,
        R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), HAS_REST=rest.numel() > 0, BM=NORM_ROWS,
        num_warps=4,
    )  # fmt: skip


def sum_slots(parts: Parts, picks: Tensor, dq: Tensor, G: int, heads: range) -> None:
    """Fill dq for a chunk of heads from the dq of its pairs."""
    _, T, H, D = dq.shape
    _sum_slots_kernel[(cdiv(T, 64) * len(heads) * (H // G),)](
        parts.x, parts.size, picks, dq, T, G, heads.start,
        R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), BM=64,
    )  # fmt: skip
