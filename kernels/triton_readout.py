"""Reading the chosen cells on the GPU, pair by pair: a pair is one query with one of the K cells it chose.

Pairs lie in the order of their cells, so a tile of TILE pairs multiplies its queries with one cell's keys and values.
Each pair's softmax over its cell is stored with its log-sum-exp; the K of a query are merged later. The backward
kernel owns a cell and walks its pairs, so dk and dv need no atomics; dq is stored per pair and summed later.
Heads are taken in chunks: what is stored per pair exists for one chunk at a time.

Shapes: B batch, T queries, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells, K cells per
query, BG = B * G.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_cells import TILE
from kernels.triton_tools import LOG2E, dot, head_lanes, padded_dim, token_strides
from kernels.triton_window import merge_slots


@triton.jit
def _read_fwd_kernel(
    q_ptr, k_ptr, v_ptr, picks_ptr, order_ptr, part_ptr, part_lse_ptr,
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
        out = dot(weights.to(v.dtype), v) / total[:, None]
        row = chunk_g * T * (R * K) + pair
        tl.store(
            part_ptr + row[:, None] * D + lane[None, :],
            out.to(part_ptr.dtype.element_ty),
            mask=real[:, None] & there[None, :],
        )
        tl.store(part_lse_ptr + row, peak + tl.log2(total), mask=real)


@triton.jit
def _merge_kernel(
    part_ptr, part_lse_ptr, picks_ptr, u_ptr, lse_ptr, T, G, head_start,
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
    u, lse = merge_slots(part_ptr, part_lse_ptr, picks_ptr, pair, token, in_rows, lane, there, K, D, DP, BM)
    here = in_rows[:, None] & there[None, :]
    tl.store(u_ptr + token[:, None] * D + lane[None, :], u.to(u_ptr.dtype.element_ty), mask=here)
    tl.store(lse_ptr + token, lse, mask=in_rows)


@triton.jit
def _norm_bwd_kernel(
    part_ptr, part_lse_ptr, picks_ptr, local_ptr, do_ptr, alpha_ptr, gain_ptr,
    du_ptr, lse_ptr, delta_u_ptr, delta_local_ptr, d_alpha_ptr, d_gain_ptr,
    do_sb, do_st, do_sh, T, G, head_start, eps,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Backward of out = local + alpha * gain * u / rms(u) for a tile of rows of one head.

    u is merged anew from its parts. du goes to the chunk [heads, T, R, D]; lse, sum_d u * du and sum_d local * d_out
    to [B, T, H]; each tile's share of d_alpha and d_gain to [BG, R, tiles(, D)].
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
    u, lse = merge_slots(part_ptr, part_lse_ptr, picks_ptr, pair, token, in_rows, lane, there, K, D, DP, BM)
    d_out = tl.load(do_ptr + b * do_sb + h * do_sh + rows.to(tl.int64)[:, None] * do_st + lane[None, :], mask=here,
                    other=0.0).to(tl.float32)  # fmt: skip
    local = tl.load(local_ptr + token[:, None] * D + lane[None, :], mask=here, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr + h).to(tl.float32)
    gain = tl.load(gain_ptr + lane, mask=there, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(u * u, 1) / D + eps)
    unit = u * inverse[:, None]
    d_unit = d_out * gain[None, :]
    share = tl.sum(d_unit * unit, 1)
    du = alpha * inverse[:, None] * (d_unit - unit * (share / D)[:, None])
    tl.store(du_ptr + pair[:, None] * D + lane[None, :], du.to(du_ptr.dtype.element_ty), mask=here)
    tl.store(lse_ptr + token, lse, mask=in_rows)
    tl.store(delta_u_ptr + token, tl.sum(du * u, 1), mask=in_rows)
    tl.store(delta_local_ptr + token, tl.sum(local * d_out, 1), mask=in_rows)
    tile = (group * R + r) * tiles + pid % tiles
    tl.store(d_alpha_ptr + tile, tl.sum(tl.where(in_rows, share, 0.0), 0))
    tl.store(d_gain_ptr + tile * D + lane, alpha * tl.sum(d_out * unit, 0), mask=there)


@triton.jit
def _read_bwd_kernel(
    q_ptr, k_ptr, v_ptr, du_ptr, lse_ptr, delta_ptr, order_ptr, count_ptr, offset_ptr, part_ptr, dk_ptr, dv_ptr,
    q_sb, q_st, q_sh, k_sb, k_sg, k_sn, k_ss, v_sb, v_sg, v_sn, v_ss, du_sc, du_sb, du_sg, du_st, du_sr,
    dk_sb, dk_sg, dk_sn, dk_ss, T, N, G, head_start, capacity, scale,
    R: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one cell, and the dq that each of its pairs gets from it."""
    pid = tl.program_id(0)
    cell = (pid % N).to(tl.int64)
    chunk_g = (pid // N).to(tl.int64)
    group = head_start + chunk_g
    b, g = group // G, group % G
    count = tl.load(count_ptr + group * N + cell)
    order_ptr += group * capacity + tl.load(offset_ptr + group * N + cell)
    lane = tl.arange(0, DP)
    there = lane < D
    token = tl.arange(0, S)
    dk = tl.zeros([S, DP], tl.float32)
    dv = tl.zeros([S, DP], tl.float32)
    inside = tl.zeros([S], tl.int32)[:, None] + there[None, :].to(tl.int32) > 0
    if count > 0:
        k = tl.load(k_ptr + b * k_sb + g * k_sg + cell * k_sn + token[:, None] * k_ss + lane[None, :], mask=inside,
                    other=0.0)  # fmt: skip
        v = tl.load(v_ptr + b * v_sb + g * v_sg + cell * v_sn + token[:, None] * v_ss + lane[None, :], mask=inside,
                    other=0.0)  # fmt: skip
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            pair = tl.load(order_ptr + place, mask=place < count, other=-1)
            real = pair >= 0
            here = real[:, None] & there[None, :]
            t, r = (pair // (R * K)).to(tl.int64), pair // K % R
            q = tl.load(q_ptr + b * q_sb + t[:, None] * q_st + (g * R + r)[:, None] * q_sh + lane[None, :], mask=here,
                        other=0.0)  # fmt: skip
            du = tl.load(
                du_ptr + chunk_g * du_sc + b * du_sb + g * du_sg + t[:, None] * du_st + r[:, None] * du_sr
                + lane[None, :], mask=here, other=0.0,
            )  # fmt: skip
            row = (b * T + t) * (G * R) + g * R + r
            lse = tl.load(lse_ptr + row, mask=real, other=0.0)
            delta = tl.load(delta_ptr + row, mask=real, other=0.0)
            weights = tl.exp2(dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])  # [TILE, S]
            weights = tl.where(real[:, None], weights, 0.0)
            d_logits = weights * (dot(du, tl.trans(v)) - delta[:, None]) * scale
            dv = dot(tl.trans(weights.to(du.dtype)), du, dv)
            d_logits = d_logits.to(q.dtype)
            dk = dot(tl.trans(d_logits), q, dk)
            dq = dot(d_logits, k)
            row = chunk_g * T * (R * K) + pair
            tl.store(part_ptr + row[:, None] * D + lane[None, :], dq.to(part_ptr.dtype.element_ty), mask=here)
    at = b * dk_sb + g * dk_sg + cell * dk_sn + token[:, None] * dk_ss + lane[None, :]
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_slots_kernel(
    part_ptr, picks_ptr, dq_ptr, T, G, head_start,
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
    for slot in range(K):
        pick = tl.load(picks_ptr + token * K + slot, mask=in_rows, other=-1)
        chosen = (in_rows & (pick >= 0))[:, None] & there[None, :]
        dq += tl.load(part_ptr + (pair * K + slot)[:, None] * D + lanes[None, :], mask=chosen, other=0.0).to(tl.float32)
    at = dq_ptr + token[:, None] * D + lanes[None, :]
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=in_rows[:, None] & there[None, :])


def head_chunks(BG: int, pairs_per_head: int, D: int, itemsize: int, budget: int = 2**27) -> list[range]:
    """Ranges of (b, g) whose parts stay within `budget` bytes, one head at least."""
    step = max(1, budget // max(1, pairs_per_head * D * itemsize))
    return [range(start, min(BG, start + step)) for start in range(0, BG, step)]


def read_forward(
    q: Tensor, k: Tensor, v: Tensor, k_strides: tuple, v_strides: tuple, picks: Tensor, order: Tensor, part: Tensor,
    part_lse: Tensor, G: int, cell_size: int, heads: range,
) -> None:  # fmt: skip
    """Fill the parts of a chunk of heads, [heads, T, R, K, D] and [heads, T, R, K]."""
    _, T, H, D = q.shape
    capacity = order.shape[1]
    _read_fwd_kernel[(capacity // TILE * len(heads),)](
        q, k, v, picks, order, part, part_lse, *token_strides(q), *k_strides, *v_strides,
        T, G, heads.start, capacity, D**-0.5,
        R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), S=cell_size, TILE=TILE, num_warps=4, num_stages=1,
    )  # fmt: skip


def read_backward(
    q: Tensor, k: Tensor, v: Tensor, k_strides: tuple, v_strides: tuple, du: Tensor, du_strides: tuple, lse: Tensor,
    delta: Tensor, order: Tensor, count: Tensor, offset: Tensor, part: Tensor, dk: Tensor, dv: Tensor,
    dk_strides: tuple, G: int, top_k: int, cell_size: int, heads: range,
) -> None:  # fmt: skip
    """Fill dk and dv of the complete cells, and dq of each pair of a chunk of heads in `part`."""
    _, T, H, D = q.shape
    N = count.shape[1]
    if N == 0:
        return
    _read_bwd_kernel[(N * len(heads),)](
        q, k, v, du, lse, delta, order, count, offset, part, dk, dv, *token_strides(q), *k_strides, *v_strides,
        *du_strides, *dk_strides, T, N, G, heads.start, order.shape[1], D**-0.5,
        R=H // G, K=top_k, D=D, DP=padded_dim(D), S=cell_size, TILE=TILE, num_warps=4, num_stages=1,
    )  # fmt: skip


def merge_parts(part: Tensor, part_lse: Tensor, picks: Tensor, u: Tensor, lse: Tensor, G: int, heads: range) -> None:
    """Fill u and its log-sum-exp for a chunk of heads."""
    _, T, H, D = u.shape
    _merge_kernel[(triton.cdiv(T, 64) * len(heads) * (H // G),)](
        part, part_lse, picks, u, lse, T, G, heads.start, R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), BM=64
    )


def sum_slots(part: Tensor, picks: Tensor, dq: Tensor, G: int, heads: range) -> None:
    """Fill dq for a chunk of heads from the dq of its pairs."""
    _, T, H, D = dq.shape
    _sum_slots_kernel[(triton.cdiv(T, 64) * len(heads) * (H // G),)](
        part, picks, dq, T, G, heads.start, R=H // G, K=picks.shape[3], D=D, DP=padded_dim(D), BM=64
    )


def empty_parts(q: Tensor, heads: int, R: int, top_k: int) -> tuple[Tensor, Tensor]:
    T, D = q.shape[1], q.shape[3]
    part = torch.empty(heads, T, R, top_k, D, dtype=q.dtype, device=q.device)
    return part, torch.empty(heads, T, R, top_k, dtype=torch.float32, device=q.device)
