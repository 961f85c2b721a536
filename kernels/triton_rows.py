"""Attention of rows to ranges of keys on the GPU: the kernels under sparse queries and sliding windows.

A row is a query of one head. The R heads that share a key/value head are packed side by side, row = slot * R + head,
so that few tokens fill a tile and every tile of keys serves all R. Slot i of a batch row is token `tokens[b, i]`, or
token i where there is no such list; only the first `counts[b]` slots exist, which the host never learns.

Forward: the programs take tiles of rows in turn. Backward: the rows are gathered side by
side, then each program owns a tile of keys, walks the rows that see it and adds to their fp32 dq by atomics; or, when
asked to be deterministic, leaves dq to a kernel that owns rows.

Shapes: B batch, N slots, S keys, H query heads, G key/value heads, R = H / G, D head dim, DP padded head dim,
BG = B * G, W = N * R rows of a key/value head, rounded up to whole tiles.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton_tools import LOG2E, MASKED, cdiv, dense_heads, dot, padded_dim, shared_memory, token_strides

_FAR = tl.constexpr(2**30)  # beyond every position
_BM = 64  # rows of a tile in the backward pass
_SPREAD = 512  # tiles of a key/value head from which one head follows the other
_SCRATCH = 2**30  # bytes of gathered rows and fp32 dq held at a time

# one program of 128 + 128 (forward) or 256 (backward) threads that multiply, with 240 registers each, and 128 that copy
_HOPPER_FORWARD = {"BM": 128, "BN": 128, "STAGES": 2, "num_warps": 4, "maxnreg": 168}
_HOPPER_KEY = {"BN": 128, "STAGES": 2, "num_warps": 8, "maxnreg": 168}


class Rows(NamedTuple):
    """Where each row stands and what it sees."""

    tokens: Tensor | None  # int32 [B, N], the token of each slot; None: slot i is token i
    counts: Tensor | None  # int32 [B], slots that exist; None: all N
    positions: Tensor | None  # int [B, N] by token, -1 for padding; None: token + query_offset
    first_key: Tensor | None  # int [B, N] by token, the first position it may see; None: no such bound
    window: int | None  # positions a row sees before its own
    query_offset: int
    key_start: int  # position of key 0


@triton.jit
def _slot_range(
    slot, there, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
    HAS_TOKENS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Token of each slot and the keys it sees, oldest .. newest; newest < oldest where it sees none."""
    token = slot
    if HAS_TOKENS:
        token = tl.load(tokens_ptr + b * N + slot, mask=there, other=0)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + b * N + token, mask=there, other=-1).to(tl.int32)
    else:
        position = token + query_offset
    there = there & (position >= 0)
    oldest = tl.zeros_like(position)
    if HAS_WINDOW:
        oldest = tl.maximum(oldest, position - WINDOW - key_start)
    if HAS_FIRST:
        oldest = tl.maximum(oldest, tl.load(first_ptr + b * N + token, mask=there, other=0).to(tl.int32) - key_start)
    newest = tl.where(there, tl.minimum(position - key_start, S - 1), -1)
    return token, oldest, newest


@triton.jit
def _place(turn, programs, tiles, BG, SPREAD: tl.constexpr):
    """The tile of a program's turn; programs take turns forth and back, so that the work of each is alike.

    With many tiles one group follows the other, so that the cache serves its keys to all programs at once; the lengths
    of its tiles rise and fall by turns and fall at last. With few tiles the longest of all groups come first.
    """
    at = turn * programs + tl.where(turn % 2 == 0, tl.program_id(0), programs - 1 - tl.program_id(0))
    group, tile = at % BG, tiles - 1 - at // BG
    if tiles >= SPREAD:
        group, tile = at // tiles, at % tiles
        tile = tl.where((BG - 1 - group) % 2 == 0, tiles - 1 - tile, tile)
    return at < tiles * BG, group, tile


@triton.jit
def load_tile(desc, b, g, n, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Tokens n .. of one key/value head; zeros beyond the last token and beyond the head."""
    return desc.load([b, g, n, 0]).reshape([ROWS, LANES])


@triton.jit
def _attend_tiles(
    acc, peak, total, q, k_desc, v_desc, b, g, oldest, newest, start, stop, scale,
    MASK: tl.constexpr, HAS_OLDEST: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop, in units of log 2; MASK where some row does not see all of a tile."""
    for n in range(start, stop, BN):
        k = load_tile(k_desc, b, g, n, BN, DP)
        logits = dot(q, tl.trans(k))  # [BM, BN]
        if MASK:
            key = n + tl.arange(0, BN)[None, :]
            seen = key <= newest[:, None]
            if HAS_OLDEST:
                seen = seen & (key >= oldest[:, None])
            logits = tl.where(seen, logits, float("-inf"))  # the peak stays finite
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(v_desc, b, g, n, BN, DP)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
    return acc, peak, total


@triton.jit
def _rows_fwd_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, tokens_ptr, counts_ptr, positions_ptr, first_ptr,
    q_sb, q_st, q_sh, programs, BG, N, S, WINDOW, query_offset, key_start, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HAS_TOKENS: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SPREAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, DP)
    most = N
    if HAS_COUNTS:
        most = 0
        for b in range(0, BG // G):
            most = tl.maximum(most, tl.load(counts_ptr + b))
    tiles = tl.cdiv(most * R, BM)
    turn = 0
    some, group, tile = _place(turn, programs, tiles, BG, SPREAD)
    while some:
        b, g = group // G, group % G
        wide_b = b.to(tl.int64)
        count = N
        if HAS_COUNTS:
            count = tl.load(counts_ptr + b)
        row = tile * BM + tl.arange(0, BM)
        slot, head = row // R, g * R + row % R
        there = slot < count
        token, oldest, newest = _slot_range(
            slot, there, wide_b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
            HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW,
        )  # fmt: skip
        seeing = newest >= oldest
        here = seeing[:, None] & (lane < D)[None, :]
        wide = token.to(tl.int64)
        at = wide_b * q_sb + wide * q_st + head * q_sh
        q = tl.load(q_ptr + at[:, None] + lane[None, :], mask=here, other=0.0)

        # all rows see the tiles full .. full_stop; rows that see nothing do not count, their result is dropped
        start = tl.min(tl.where(seeing, oldest, _FAR)) // BN * BN
        stop = tl.max(tl.where(seeing, newest, -1)) + 1
        full = tl.cdiv(tl.max(tl.where(seeing, oldest, 0)), BN) * BN
        full_stop = (tl.min(tl.where(seeing, newest, _FAR - 1)) + 1) // BN * BN
        full = tl.minimum(full, tl.cdiv(stop, BN) * BN)
        full_stop = tl.minimum(tl.maximum(full_stop, full), tl.maximum(full, stop // BN * BN))
        acc = tl.zeros([BM, DP], tl.float32)
        peak = tl.full([BM], MASKED, tl.float32)
        total = tl.zeros([BM], tl.float32)
        if HAS_FIRST or HAS_WINDOW:
            acc, peak, total = _attend_tiles(
                acc, peak, total, q, k_desc, v_desc, b, g, oldest, newest, start, full,
                scale * LOG2E, True, True, BN, DP,
            )  # fmt: skip
        acc, peak, total = _attend_tiles(
            acc, peak, total, q, k_desc, v_desc, b, g, oldest, newest, full, full_stop,
            scale * LOG2E, False, False, BN, DP,
        )  # fmt: skip
        acc, peak, total = _attend_tiles(
            acc, peak, total, q, k_desc, v_desc, b, g, oldest, newest, full_stop, stop,
            scale * LOG2E, True, HAS_FIRST or HAS_WINDOW, BN, DP,
        )  # fmt: skip
        out = tl.where(seeing[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
        lse = tl.where(seeing, (peak + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2E, float("-inf"))
        line = (wide_b * N + wide) * (G * R) + head
        tl.store(lse_ptr + line, lse, mask=there)
        tl.store(out_ptr + line[:, None] * D + lane[None, :], out.to(out_ptr.dtype.element_ty),
                 mask=there[:, None] & (lane < D)[None, :])  # fmt: skip
        turn += 1
        some, group, tile = _place(turn, programs, tiles, BG, SPREAD)


@triton.jit
def _gather_kernel(
    q_ptr, do_ptr, out_ptr, lse_ptr, d_lse_ptr, tokens_ptr, counts_ptr, positions_ptr, first_ptr,
    q_rows_ptr, do_rows_ptr, dq_rows_ptr, lse_rows_ptr, delta_ptr, oldest_ptr, newest_ptr, bounds_ptr,
    q_sb, q_st, q_sh, do_sb, do_st, do_sh, group_start, N, W, S, WINDOW, query_offset, key_start,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, DQ: tl.constexpr, DP: tl.constexpr,
    HAS_D_LSE: tl.constexpr, HAS_TOKENS: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_WINDOW: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Lay q and d_out of the rows side by side, with what the backward pass needs of each row and of each tile."""
    tiles = W // BM
    local, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, g = (group_start + local) // G, (group_start + local) % G
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + b)
    if tile * BM < count * R:
        lane = tl.arange(0, DP)
        row = tile * BM + tl.arange(0, BM)
        slot, head = row // R, g * R + row % R
        there = slot < count
        token, oldest, newest = _slot_range(
            slot, there, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
            HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW,
        )  # fmt: skip
        seeing = newest >= oldest
        here = seeing[:, None] & (lane < D)[None, :]
        wide = token.to(tl.int64)
        line = (b * N + wide) * (G * R) + head
        q_at = b * q_sb + wide * q_st + head * q_sh
        do_at = b * do_sb + wide * do_st + head * do_sh
        q = tl.load(q_ptr + q_at[:, None] + lane[None, :], mask=here, other=0.0)
        d_out = tl.load(do_ptr + do_at[:, None] + lane[None, :], mask=here, other=0.0)
        out = tl.load(out_ptr + line[:, None] * D + lane[None, :], mask=here, other=0.0)
        delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
        if HAS_D_LSE:
            delta -= tl.load(d_lse_ptr + line, mask=seeing, other=0.0)
        # the weights of a row that sees nothing become exp2(-huge) = 0
        lse = tl.load(lse_ptr + line, mask=seeing, other=-MASKED) * LOG2E

        at = local * W + row
        kept = (lane < DS)[None, :]
        tl.store(q_rows_ptr + at[:, None] * DS + lane[None, :], q, mask=kept)
        tl.store(do_rows_ptr + at[:, None] * DS + lane[None, :], d_out, mask=kept)
        nothing = tl.zeros([BM, DP], tl.float32)
        tl.store(dq_rows_ptr + at[:, None] * DQ + lane[None, :], nothing, mask=(lane < DQ)[None, :])
        tl.store(lse_rows_ptr + at, lse)
        tl.store(delta_ptr + at, delta)
        tl.store(oldest_ptr + at, oldest)
        tl.store(newest_ptr + at, newest)
        bounds = bounds_ptr + local * 4 * tiles + tile
        tl.store(bounds, tl.min(tl.where(seeing, oldest, _FAR)))
        tl.store(bounds + tiles, tl.max(tl.where(seeing, oldest, 0)))
        tl.store(bounds + 2 * tiles, tl.min(tl.where(seeing, newest, _FAR)))
        tl.store(bounds + 3 * tiles, tl.max(tl.where(seeing, newest, -1)))


@triton.jit
def _tiles_that_see(bounds_ptr, tiles, stride, n0, n1, CHUNK: tl.constexpr):
    """Tiles of rows first .. last see some of the keys n0 .. n1, and the tiles full .. full_stop see all of them."""
    first, last = tiles, 0
    full, full_stop = 0, tiles
    for start in range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        there = tile < tiles
        at = bounds_ptr + tile
        oldest = tl.load(at, mask=there, other=_FAR)
        youngest_oldest = tl.load(at + stride, mask=there, other=0)
        oldest_newest = tl.load(at + 2 * stride, mask=there, other=_FAR)
        newest = tl.load(at + 3 * stride, mask=there, other=-1)
        some = (newest >= n0) & (oldest <= n1)
        first = tl.minimum(first, tl.min(tl.where(some, tile, _FAR)))
        last = tl.maximum(last, tl.max(tl.where(some, tile + 1, 0)))
        full = tl.maximum(full, tl.max(tl.where(oldest_newest < n1, tile + 1, 0)))
        full_stop = tl.minimum(full_stop, tl.min(tl.where(there & (youngest_oldest > n0), tile, _FAR)))
    full = tl.minimum(tl.maximum(full, first), tl.maximum(last, first))
    full_stop = tl.maximum(tl.minimum(full_stop, last), full)
    return first, full, full_stop, last


@triton.jit
def _add_rows(
    dk, dv, k, v, q_desc, do_desc, dq_ptr, lse_ptr, delta_ptr, oldest_ptr, newest_ptr, row_start, key, start, stop,
    scale, MASK: tl.constexpr, HAS_OLDEST: tl.constexpr, WITH_DQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Add the tiles start .. stop of rows to the gradients of a tile of keys, and theirs to dq."""
    for tile in range(start, stop):
        row = row_start + tile * BM
        at = row + tl.arange(0, BM)
        q = q_desc.load([row, 0])
        lse = tl.load(lse_ptr + at)
        weights = tl.exp2(dot(k, tl.trans(q)) * (scale * LOG2E) - lse[None, :])  # [BN, BM]
        if MASK:
            seen = key[:, None] <= tl.load(newest_ptr + at)[None, :]
            if HAS_OLDEST:
                seen = seen & (key[:, None] >= tl.load(oldest_ptr + at)[None, :])
            weights = tl.where(seen, weights, 0.0)
        d_out = do_desc.load([row, 0])
        dv = dot(weights.to(d_out.dtype), d_out, dv)
        delta = tl.load(delta_ptr + at)
        d_logits = (weights * (dot(v, tl.trans(d_out)) - delta[None, :])).to(q.dtype)
        dk = dot(d_logits, q, dk)
        if WITH_DQ:
            lane = tl.arange(0, DP)
            dq = dot(tl.trans(d_logits), k)
            to = dq_ptr + at.to(tl.int64)[:, None] * D + lane[None, :]
            tl.atomic_add(to, dq, mask=(lane < D)[None, :] & (at >= 0)[:, None], sem="relaxed")
    return dk, dv


@triton.jit
def _rows_bwd_key_kernel(
    k_desc, v_desc, q_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr, oldest_ptr, newest_ptr, bounds_ptr,
    counts_ptr, group_start, N, W, S, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_COUNTS: tl.constexpr,
    HAS_OLDEST: tl.constexpr, WITH_DQ: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    key_tiles = tl.cdiv(S, BN)
    local, n0 = tl.program_id(0) // key_tiles, tl.program_id(0) % key_tiles * BN
    b, g = (group_start + local) // G, (group_start + local) % G
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + b)
    bounds = bounds_ptr + local * 4 * (W // BM)
    first, full, full_stop, last = _tiles_that_see(bounds, tl.cdiv(count * R, BM), W // BM, n0, n0 + BN - 1, CHUNK)
    key = n0 + tl.arange(0, BN)
    k, v = load_tile(k_desc, b, g, n0, BN, DP), load_tile(v_desc, b, g, n0, BN, DP)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    row_start = local * W
    dk, dv = _add_rows(
        dk, dv, k, v, q_desc, do_desc, dq_ptr, lse_ptr, delta_ptr, oldest_ptr, newest_ptr, row_start, key, first, full,
        scale, True, HAS_OLDEST, WITH_DQ, D, DP, BM,
    )  # fmt: skip
    dk, dv = _add_rows(
        dk, dv, k, v, q_desc, do_desc, dq_ptr, lse_ptr, delta_ptr, oldest_ptr, newest_ptr, row_start, key, full,
        full_stop, scale, False, False, WITH_DQ, D, DP, BM,
    )  # fmt: skip
    if HAS_OLDEST:
        dk, dv = _add_rows(
            dk, dv, k, v, q_desc, do_desc, dq_ptr, lse_ptr, delta_ptr, oldest_ptr, newest_ptr, row_start, key,
            full_stop, last, scale, True, True, WITH_DQ, D, DP, BM,
        )  # fmt: skip
    lane = tl.arange(0, DP)
    line = ((b.to(tl.int64) * S + key) * G + g)[:, None] * D + lane[None, :]
    here = (key < S)[:, None] & (lane < D)[None, :]
    tl.store(dk_ptr + line, (dk * scale).to(dk_ptr.dtype.element_ty), mask=here)
    tl.store(dv_ptr + line, dv.to(dv_ptr.dtype.element_ty), mask=here)


@triton.jit
def _add_keys(
    dq, q, d_out, lse, delta, k_desc, v_desc, b, g, oldest, newest, start, stop, scale,
    MASK: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Add the keys start .. stop to the gradient of a tile of rows."""
    for n in range(start, stop, BN):
        k = load_tile(k_desc, b, g, n, BN, DP)
        weights = tl.exp2(dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])
        if MASK:
            key = n + tl.arange(0, BN)[None, :]
            weights = tl.where((key <= newest[:, None]) & (key >= oldest[:, None]), weights, 0.0)
        v = load_tile(v_desc, b, g, n, BN, DP)
        d_logits = weights * (dot(d_out, tl.trans(v)) - delta[:, None])
        dq = dot(d_logits.to(k.dtype), k, dq)
    return dq


@triton.jit
def _rows_bwd_query_kernel(
    k_desc, v_desc, q_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, oldest_ptr, newest_ptr, bounds_ptr, counts_ptr,
    group_start, N, W, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_COUNTS: tl.constexpr,
    HAS_OLDEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows, where its bits must be the same in every run."""
    tiles = W // BM
    local, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b, g = (group_start + local) // G, (group_start + local) % G
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + b)
    if tile * BM < count * R:
        row = local * W + tile * BM
        at = row + tl.arange(0, BM)
        q, d_out = q_desc.load([row, 0]), do_desc.load([row, 0])
        lse, delta = tl.load(lse_ptr + at), tl.load(delta_ptr + at)
        oldest, newest = tl.load(oldest_ptr + at), tl.load(newest_ptr + at)
        bounds = bounds_ptr + local * 4 * tiles + tile
        start = tl.load(bounds) // BN * BN
        full = tl.cdiv(tl.load(bounds + tiles), BN) * BN
        full_stop = (tl.minimum(tl.load(bounds + 2 * tiles), _FAR - 1) + 1) // BN * BN
        stop = tl.load(bounds + 3 * tiles) + 1
        full = tl.minimum(full, tl.cdiv(stop, BN) * BN)
        full_stop = tl.minimum(tl.maximum(full_stop, full), tl.maximum(full, stop // BN * BN))
        dq = tl.zeros([BM, DP], tl.float32)
        if HAS_OLDEST:
            dq = _add_keys(dq, q, d_out, lse, delta, k_desc, v_desc, b, g, oldest, newest,
                           start, full, scale, True, BN, DP)  # fmt: skip
        dq = _add_keys(dq, q, d_out, lse, delta, k_desc, v_desc, b, g, oldest, newest,
                       full, full_stop, scale, False, BN, DP)  # fmt: skip
        dq = _add_keys(dq, q, d_out, lse, delta, k_desc, v_desc, b, g, oldest, newest,
                       full_stop, stop, scale, True, BN, DP)  # fmt: skip
        lane = tl.arange(0, DP)
        tl.store(
            dq_ptr + at.to(tl.int64)[:, None] * D + lane[None, :], dq, mask=(lane < D)[None, :] & (at >= 0)[:, None]
        )


@triton.jit
def _scatter_kernel(
    dq_rows_ptr, dq_ptr, tokens_ptr, counts_ptr, group_start, N, W, scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_TOKENS: tl.constexpr,
    HAS_COUNTS: tl.constexpr, SHUFFLED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Put the gradient of each row in its token's place; SHUFFLED tiles are laid out by Hopper's `_add_dq`."""
    tiles = W // BM
    local, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, g = (group_start + local) // G, (group_start + local) % G
    count = N
    if HAS_COUNTS:
        count = tl.load(counts_ptr + b)
    if tile * BM < count * R:
        lane = tl.arange(0, DP)
        row = tile * BM + tl.arange(0, BM)
        slot, head = row // R, g * R + row % R
        token = slot
        if HAS_TOKENS:
            token = tl.load(tokens_ptr + b * N + slot, mask=slot < count, other=0)
        here = (slot < count)[:, None] & (lane < D)[None, :]
        at = (local * W + row)[:, None] * D + lane[None, :]
        if SHUFFLED:
            i, j = tl.arange(0, BM)[:, None], lane[None, :]
            half = j // (DP // 2) * (4 * DP // 16) + i // 16 * (DP // 16) + j % (DP // 2) // 8
            inside = (half * 8 + i % 8) * 16 + j % 8 // 2 * 4 + i // 8 % 2 * 2 + j % 2
            at = (local * W + tile * BM) * DP + inside
        dq = tl.load(dq_rows_ptr + at, mask=here, other=0.0)
        line = (b * N + token) * (G * R) + head
        tl.store(dq_ptr + line[:, None] * D + lane[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=here)


def _describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor by which kernels read blocks of `x`; what of a block lies beyond `x` in any dim is read as zeros."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def on_hopper(x: Tensor) -> bool:
    """Whether the kernels of triton_rows_hopper.py serve `x` [B, N, H, D]."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and padded_dim(x.shape[3]) in (64, 128)
    return fits and x.is_cuda and _is_hopper(x.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    # first of all not AMD's: an MI300X says of itself that it is 9.4
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def _hopper():
    """The module of Hopper's kernels, imported where they are used: their dialect is not everywhere."""
    from kernels import triton_rows_hopper

    return triton_rows_hopper


def as_table(x: Tensor) -> Tensor:
    """`x` [B, S, G, D] as [B, G, S, D] that the copy engine can read, a view where the strides allow.

    Heads are a dim of their own and so are sequences: with them side by side in one, the lanes that pad a head would be
    read from the next head, and the keys that pad the last tile from the next sequence.
    """
    B, S, G, D = x.shape
    unit = 16 // x.element_size()  # numbers of which every step but the last dim's must be a multiple
    steps = [step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    dense = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % unit == 0 for step in steps)
    if not dense:
        x = F.pad(x, (0, -D % unit)).contiguous()[..., :D]
    # the step of a dim of one is never taken, but looked at
    steps = [step if size > 1 else unit * cdiv(D, unit) for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return x.as_strided((B, G, S, D), (steps[0], steps[2], steps[1], 1))


def forward_config(dtype: torch.dtype, DP: int) -> dict[str, int]:
    """Tile sizes of the forward kernel; fp32 is multiplied without tensor cores and takes small tiles."""
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 2}


def key_config(dtype: torch.dtype, DP: int, shared: int) -> dict[str, int]:
    """Tile sizes of the backward kernel that owns keys, for `shared` bytes of shared memory."""
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    if DP > 64 and shared < 128 * 1024:
        return {"BN": 64, "num_warps": 4, "num_stages": 2}
    return {"BN": 128, "num_warps": 8, "num_stages": 2}


def query_config(dtype: torch.dtype, DP: int) -> dict[str, int]:
    """Tile sizes of the backward kernel that owns rows."""
    if dtype == torch.float32:
        return {"BN": 32, "num_warps": 8, "num_stages": 1}
    return {"BN": 64, "num_warps": 4, "num_stages": 2}


def _bounds(rows: Rows) -> dict[str, bool]:
    return {
        "HAS_TOKENS": rows.tokens is not None, "HAS_COUNTS": rows.counts is not None,
        "HAS_POSITIONS": rows.positions is not None, "HAS_FIRST": rows.first_key is not None,
        "HAS_WINDOW": rows.window is not None,
    }  # fmt: skip


def rows_forward(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, N, H, D], zero where no row stands, and the log-sum-exp of each row [B, N, H], fp32.

    Of tokens that are not listed the log-sum-exp is -inf if they have positions, else undefined: nobody merges those.
    """
    (B, N, H, D), (_, S, G, _) = q.shape, k.shape
    DP, config = padded_dim(D), forward_config(q.dtype, padded_dim(D))
    out = (torch.empty if rows.tokens is None else torch.zeros)(B, N, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, N, H, dtype=torch.float32, device=q.device)
    if rows.tokens is not None and rows.positions is not None:
        lse.fill_(-torch.inf)
    keys, values = as_table(k), as_table(v)
    if on_hopper(q):
        kernel, describe, config = _hopper().rows_fwd_kernel, _hopper().describe, _HOPPER_FORWARD
    else:
        kernel, describe = _rows_fwd_kernel, _describe
    programs = min(num_processors(q.device), cdiv(N * H // G, config["BM"]) * B * G)
    kernel[(programs,)](
        q, *(describe(x, [1, 1, config["BN"], DP]) for x in (keys, values)), out, lse,
        *(lse if x is None else x for x in rows[:4]), *token_strides(q), programs, B * G, N, S,
        rows.window or 0, rows.query_offset, rows.key_start, scale,
        G=G, R=H // G, D=D, DP=DP, **_bounds(rows), SPREAD=_SPREAD, **config,
    )  # fmt: skip
    return out, lse


class Gathered(NamedTuple):
    """Rows of some key/value heads side by side, W for each, and what the backward pass needs of them."""

    q: Tensor  # [groups * W, D, to 16 bytes]
    d_out: Tensor
    dq: Tensor  # fp32 [groups * W, D], of the Hopper kernel padded and shuffled
    lse: Tensor  # fp32 [groups * W], in units of log 2
    delta: Tensor  # fp32 [groups * W], sum of out * d_out less the gradient of lse
    oldest: Tensor  # int32 [groups * W]
    newest: Tensor
    bounds: Tensor  # int32 [groups, 4, tiles]: least and largest oldest, least and largest newest of each tile


def _empty_gathered(q: Tensor, W: int, groups: int, dq_lanes: int) -> tuple[Gathered, int]:
    """Room for as many of the groups at a time as `_SCRATCH` allows, evenly shared, and how many."""
    lanes = cdiv(q.shape[3], 8) * 8
    each = W * (2 * lanes * q.element_size() + 4 * dq_lanes + 16)
    held = cdiv(groups, cdiv(groups * each, max(each, _SCRATCH)))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=q.device)

    rows = held * W
    return Gathered(
        *(empty(rows, lanes, dtype=q.dtype) for _ in range(2)),
        empty(rows, dq_lanes, dtype=torch.float32),
        *(empty(rows, dtype=torch.float32) for _ in range(2)),
        *(empty(rows, dtype=torch.int32) for _ in range(2)),
        empty(held, 4, W // _BM, dtype=torch.int32),
    ), held


def rows_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Rows,
    scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dense, in the dtype of the inputs."""
    (B, N, H, D), (_, S, G, _) = q.shape, k.shape
    d_out = dense_heads(d_out)
    dq = (torch.empty if rows.tokens is None else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    hopper = on_hopper(q) and not deterministic
    W = cdiv(N * (H // G), _BM) * _BM
    size, flags = {"G": G, "R": H // G, "D": D, "DP": padded_dim(D)}, _bounds(rows)
    near, held = _empty_gathered(q, W, B * G, size["DP"] if hopper else D)
    tokens, counts, positions, first_key = (near.newest if x is None else x for x in rows[:4])
    places = {name: flags[name] for name in ("HAS_TOKENS", "HAS_COUNTS")}
    tables = as_table(k), as_table(v)
    for start in range(0, B * G, held):
        groups = min(held, B * G - start)
        tiles = (groups * W // _BM,)
        _gather_kernel[tiles](
            q, d_out, out, lse, lse if d_lse is None else d_lse, tokens, counts, positions, first_key, *near,
            *token_strides(q), *token_strides(d_out), start, N, W, S, rows.window or 0, rows.query_offset,
            rows.key_start, **size, DS=near.q.shape[1], DQ=near.dq.shape[1], HAS_D_LSE=d_lse is not None, **flags,
            BM=_BM,
        )  # fmt: skip
        own = {**size, "HAS_COUNTS": flags["HAS_COUNTS"], "HAS_OLDEST": flags["HAS_FIRST"] or flags["HAS_WINDOW"]}
        _tile_gradients(tables, near, dk, dv, (counts, start, N, W, S, scale), own, groups, hopper, deterministic)
        _scatter_kernel[tiles](
            near.dq, dq, tokens, counts, start, N, W, scale, **size, **places, SHUFFLED=hopper, BM=_BM
        )  # fmt: skip
    return dq, dk, dv


def _tile_gradients(
    tables: tuple[Tensor, Tensor], near: Gathered, dk: Tensor, dv: Tensor, numbers: tuple, sizes: dict, groups: int,
    hopper: bool, deterministic: bool,
) -> None:  # fmt: skip
    """Fill dk and dv of some groups, and their `near.dq`."""
    counts, start, N, W, S, scale = numbers
    dtype, DP = near.q.dtype, sizes["DP"]
    bounds = (near.oldest, near.newest, near.bounds, counts, start, N, W)
    describe, config = _describe, key_config(dtype, DP, shared_memory(near.q.device))
    if hopper:
        describe, config = _hopper().describe, _HOPPER_KEY
    rows = [describe(x, [_BM, DP]) for x in (near.q, near.d_out)]
    keys = [describe(x, [1, 1, config["BN"], DP]) for x in tables]
    grid = (groups * cdiv(S, config["BN"]),)
    if hopper:
        of_rows = [describe(x.view(-1, _BM), [1, _BM]) for x in (near.lse, near.delta)]
        _hopper().rows_bwd_key_kernel[grid](
            *keys, *rows, *of_rows, dk, dv, near.dq, *bounds, S, scale, **sizes, BM=_BM, **config
        )
        return
    _rows_bwd_key_kernel[grid](
        *keys, *rows, near.lse, near.delta, dk, dv, near.dq, *bounds, S, scale, **sizes,
        WITH_DQ=not deterministic, CHUNK=256, BM=_BM, **config,
    )  # fmt: skip
    if deterministic:
        config = query_config(dtype, DP)
        keys = [_describe(x, [1, 1, config["BN"], DP]) for x in tables]
        _rows_bwd_query_kernel[(groups * W // _BM,)](
            *keys, *rows, near.lse, near.delta, near.dq, *bounds, scale, **sizes, BM=_BM, **config
        )


@functools.cache
def num_processors(device: torch.device) -> int:
    """How many programs run side by side at least; one under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
