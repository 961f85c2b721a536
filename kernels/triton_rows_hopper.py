"""The kernels of triton_rows.py once more for Hopper: one warp copies tiles while warpgroups multiply.

Triton leaves the tensor cores idle during each softmax. Here the product of the next tile of keys is under way
meanwhile and the two warpgroups of a program run apart (forward), or exponentials and the addition of dq to memory
overlap with the other products of the tile (backward). Same arguments, same results to rounding.

Shapes: as in triton_rows.py; BM rows of a tile, BN keys of a tile.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name in Triton 3.6
_FAR = gl.constexpr(2**30)
_MASKED = gl.constexpr(-1.0e30)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _slot_range(
    slot, there, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
    HAS_TOKENS: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Token of each slot and the keys it sees, oldest .. newest; newest < oldest where it sees none."""
    token = slot
    if HAS_TOKENS:
        token = gl.load(tokens_ptr + b * N + slot, mask=there, other=0)
    if HAS_POSITIONS:
        position = gl.load(positions_ptr + b * N + token, mask=there, other=-1).to(gl.int32)
    else:
        position = token + query_offset
    there = there & (position >= 0)
    oldest = position * 0
    if HAS_WINDOW:
        oldest = gl.maximum(oldest, position - WINDOW - key_start)
    if HAS_FIRST:
        oldest = gl.maximum(oldest, gl.load(first_ptr + b * N + token, mask=there, other=0).to(gl.int32) - key_start)
    newest = gl.where(there, gl.minimum(position - key_start, S - 1), -1)
    return token, oldest, newest


@gluon.jit
def _place(turn, programs, tiles, BG, SPREAD: gl.constexpr):
    """The tile of a program's turn; see `_place` of triton_rows.py."""
    at = turn * programs + gl.program_id(0)
    if turn % 2 == 1:
        at = turn * programs + programs - 1 - gl.program_id(0)
    group, tile = at % BG, tiles - 1 - at // BG
    if tiles >= SPREAD:
        group, tile = at // tiles, at % tiles
        if (BG - 1 - group) % 2 == 0:
            tile = tiles - 1 - tile
    return at < tiles * BG, group, tile


@gluon.jit
def _key_tiles(
    tile, count, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start, R: gl.constexpr,
    HAS_TOKENS: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_WINDOW: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, warps: gl.constexpr,
):  # fmt: skip
    """Keys start .. stop that some row of the tile sees; all rows see full .. full_stop."""
    row = tile * BM + gl.arange(0, BM, gl.BlockedLayout([1], [32], [warps], [0]))
    slot = row // R
    token, oldest, newest = _slot_range(
        slot, slot < count, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
        HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW,
    )  # fmt: skip
    seeing = newest >= oldest
    start = gl.min(gl.where(seeing, oldest, _FAR), 0) // BN * BN
    stop = gl.max(gl.where(seeing, newest, -1), 0) + 1
    full = gl.cdiv(gl.max(gl.where(seeing, oldest, 0), 0), BN) * BN
    full_stop = (gl.min(gl.where(seeing, newest, _FAR - 1), 0) + 1) // BN * BN
    full = gl.minimum(full, gl.cdiv(stop, BN) * BN)
    full_stop = gl.minimum(gl.maximum(full_stop, full), gl.maximum(full, stop // BN * BN))
    return start, full, full_stop, stop


@gluon.jit
def _copy_tile(desc, b, g, n, ready, smem, BN: gl.constexpr, DP: gl.constexpr):
    """Copy tokens n .. of one key/value head; zeros beyond the last token and beyond the head."""
    tma.async_copy_global_to_shared(
        desc, [b, g, n, 0], ready, smem._reinterpret(desc.dtype, [1, 1, BN, DP], desc.layout)
    )


@gluon.jit
def _copy_keys(
    k_desc, v_desc, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
    tokens_ptr, counts_ptr, positions_ptr, first_ptr, programs, tiles,
    BG, N, S, WINDOW, query_offset, key_start, G: gl.constexpr, R: gl.constexpr, DP: gl.constexpr,
    HAS_TOKENS: gl.constexpr, HAS_COUNTS: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_FIRST: gl.constexpr,
    HAS_WINDOW: gl.constexpr, SPREAD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies tiles of keys and values."""
    step = 0
    for turn in range(0, gl.cdiv(tiles * BG, programs)):
        some, group, tile = _place(turn, programs, tiles, BG, SPREAD)
        if some:
            b, g = group // G, group % G
            count = N
            if HAS_COUNTS:
                count = gl.load(counts_ptr + b)
            start, full, full_stop, stop = _key_tiles(
                tile, count, b.to(gl.int64), tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset,
                key_start, R, HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW, BM, BN, 1,
            )  # fmt: skip
            for n in range(start, stop, BN):
                stage, phase = step % STAGES, step // STAGES & 1
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_ready.index(stage), BN * DP * 2)
                _copy_tile(k_desc, b, g, n, k_ready.index(stage), k_smem.index(stage), BN, DP)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_ready.index(stage), BN * DP * 2)
                _copy_tile(v_desc, b, g, n, v_ready.index(stage), v_smem.index(stage), BN, DP)
                step += 1


@gluon.jit
def _softmax(logits, peak, total, key0, oldest, newest, scale, MASK: gl.constexpr, BN: gl.constexpr,
             layout: gl.constexpr):  # fmt: skip
    """Weights of a tile of keys in units of log 2, and by how much what came before shrinks."""
    if MASK:
        key = key0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
        seen = (key[None, :] <= newest[:, None]) & (key[None, :] >= oldest[:, None])
        logits = gl.where(seen, logits, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(logits, 1) * scale)
    weights = gl.exp2(logits * scale - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    return weights, shrink, new_peak, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _attend_tiles(
    weights, acc, peak, total, step, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, oldest, newest,
    start, stop, scale, MASK: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """For each tile of keys its logits, meanwhile the output of the tile before it."""
    for n in range(start, stop, BN):
        before = step - 1
        stage, old = step % STAGES, before % STAGES
        mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
        nothing = gl.zeros([64, BN], gl.float32, s_layout)
        logits = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(old), before // STAGES & 1)
        acc = warpgroup_mma(weights, v_smem.index(old), acc, is_async=True)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(k_free.index(stage), count=1)
        new_weights, shrink, peak, total = _softmax(logits, peak, total, n, oldest, newest, scale, MASK, BN, s_layout)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        mbarrier.arrive(v_free.index(old), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        weights = gl.convert_layout(new_weights.to(v_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
        step += 1
    return weights, acc, peak, total, step


@gluon.jit
def _attend(
    q_ptr, out_ptr, lse_ptr, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
    tokens_ptr, counts_ptr, positions_ptr, first_ptr, q_sb, q_st, q_sh, programs, tiles,
    BG, N, S, WINDOW, query_offset, key_start, scale, HALF: gl.constexpr,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, HAS_TOKENS: gl.constexpr,
    HAS_COUNTS: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SPREAD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the upper or lower 64 rows of each tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    wide_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    lane = gl.arange(0, DP, gl.SliceLayout(0, wide_layout))
    q_smem = q_smem.index(HALF)
    step = 0
    for turn in range(0, gl.cdiv(tiles * BG, programs)):
        some, group, tile = _place(turn, programs, tiles, BG, SPREAD)
        if some:
            b, g = (group // G).to(gl.int64), group % G
            count = N
            if HAS_COUNTS:
                count = gl.load(counts_ptr + b)
            start, full, full_stop, stop = _key_tiles(
                tile, count, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset,
                key_start, R, HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW, BM, BN, 4,
            )  # fmt: skip
            row = tile * BM + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide_layout))
            there = row // R < count
            token, oldest, newest = _slot_range(
                row // R, there, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
                HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW,
            )  # fmt: skip
            head = g * R + row % R
            here = there[:, None] & (lane < D)[None, :]
            at = b * q_sb + token.to(gl.int64) * q_st + head * q_sh
            q_smem.store(gl.load(q_ptr + at[:, None] + lane[None, :], mask=here, other=0.0))
            fence_async_shared()
            line = (b * N + token) * (G * R) + head

            row = tile * BM + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
            s_there = row // R < count
            s_token, oldest, newest = _slot_range(
                row // R, s_there, b, tokens_ptr, positions_ptr, first_ptr, N, S, WINDOW, query_offset, key_start,
                HAS_TOKENS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW,
            )  # fmt: skip
            s_line = (b * N + s_token) * (G * R) + g * R + row % R
            acc = gl.zeros([64, DP], gl.float32, o_layout)
            peak = gl.full([64], _MASKED, gl.float32, gl.SliceLayout(1, s_layout))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
            if start < stop:
                stage = step % STAGES
                mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
                nothing = gl.zeros([64, BN], gl.float32, s_layout)
                logits = warpgroup_mma(
                    q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                logits = warpgroup_mma_wait(0, deps=[logits])
                mbarrier.arrive(k_free.index(stage), count=1)
                new_weights, shrink, peak, total = _softmax(
                    logits, peak, total, start, oldest, newest, scale, True, BN, s_layout
                )
                weights = gl.convert_layout(new_weights.to(v_smem.dtype), gl.DotOperandLayout(0, o_layout, 2))
                step += 1
                second = start + BN
                weights, acc, peak, total, step = _attend_tiles(
                    weights, acc, peak, total, step, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, oldest,
                    newest, second, full, scale, True, BN, STAGES, s_layout, o_layout,
                )  # fmt: skip
                second = gl.maximum(second, full)
                weights, acc, peak, total, step = _attend_tiles(
                    weights, acc, peak, total, step, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, oldest,
                    newest, second, full_stop, scale, False, BN, STAGES, s_layout, o_layout,
                )  # fmt: skip
                second = gl.maximum(second, full_stop)
                weights, acc, peak, total, step = _attend_tiles(
                    weights, acc, peak, total, step, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, oldest,
                    newest, second, stop, scale, True, BN, STAGES, s_layout, o_layout,
                )  # fmt: skip
                old = (step - 1) % STAGES
                mbarrier.wait(v_ready.index(old), (step - 1) // STAGES & 1)
                acc = warpgroup_mma(weights, v_smem.index(old), acc, is_async=True)
                acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
                mbarrier.arrive(v_free.index(old), count=1)
            s_seeing = newest >= oldest
            some_weight = gl.where(total > 0, total, 1.0)
            share = gl.where(s_seeing, 1.0 / some_weight, 0.0)
            lse = gl.where(s_seeing, (peak + gl.log2(some_weight)) / _LOG2E, float("-inf"))
            gl.store(lse_ptr + s_line, lse, mask=s_there)
            # a row that sees nothing may hold anything, NaN included
            acc = acc * gl.convert_layout(share, gl.SliceLayout(1, o_layout))[:, None]
            o_seeing = gl.convert_layout(s_seeing, gl.SliceLayout(1, o_layout))
            acc = gl.where(o_seeing[:, None], acc, 0.0)
            q_smem.store(acc.to(q_smem.dtype))
            gl.store(out_ptr + line[:, None] * D + lane[None, :], q_smem.load(wide_layout), mask=here)


@gluon.jit
def rows_fwd_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, tokens_ptr, counts_ptr, positions_ptr, first_ptr,
    q_sb, q_st, q_sh, programs, BG, N, S, WINDOW, query_offset, key_start, scale,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, HAS_TOKENS: gl.constexpr,
    HAS_COUNTS: gl.constexpr, HAS_POSITIONS: gl.constexpr, HAS_FIRST: gl.constexpr, HAS_WINDOW: gl.constexpr,
    SPREAD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    most = N
    if HAS_COUNTS:
        most = 0
        for b in range(0, BG // G):
            most = gl.maximum(most, gl.load(counts_ptr + b))
    tiles = gl.cdiv(most * R, BM)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DP], q_ptr.dtype.element_ty)
    q_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, 64, DP], half)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DP], k_desc.dtype)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, DP], tile)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, DP], tile)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    _barrier()
    scale = scale * _LOG2E
    gl.warp_specialize(
        [
            (_attend, (
                q_ptr, out_ptr, lse_ptr, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                tokens_ptr, counts_ptr, positions_ptr, first_ptr, q_sb, q_st, q_sh, programs, tiles,
                BG, N, S, WINDOW, query_offset, key_start, scale, 0, G, R, D, DP, HAS_TOKENS, HAS_COUNTS,
                HAS_POSITIONS, HAS_FIRST, HAS_WINDOW, SPREAD, BM, BN, STAGES,
            )),
            (_attend, (
                q_ptr, out_ptr, lse_ptr, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                tokens_ptr, counts_ptr, positions_ptr, first_ptr, q_sb, q_st, q_sh, programs, tiles,
                BG, N, S, WINDOW, query_offset, key_start, scale, 1, G, R, D, DP, HAS_TOKENS, HAS_COUNTS,
                HAS_POSITIONS, HAS_FIRST, HAS_WINDOW, SPREAD, BM, BN, STAGES,
            )),
            (_copy_keys, (
                k_desc, v_desc, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                tokens_ptr, counts_ptr, positions_ptr, first_ptr, programs, tiles, BG, N, S, WINDOW, query_offset,
                key_start, G, R, DP, HAS_TOKENS, HAS_COUNTS, HAS_POSITIONS, HAS_FIRST, HAS_WINDOW, SPREAD, BM, BN,
                STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _tiles_that_see(bounds_ptr, tiles, stride, n0, n1, CHUNK: gl.constexpr, warps: gl.constexpr):
    """Tiles of rows first .. last see some of the keys n0 .. n1, and the tiles full .. full_stop see all of them."""
    first, last, full, full_stop = tiles, 0, 0, tiles
    for start in range(0, tiles, CHUNK):
        tile = start + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [warps], [0]))
        there = tile < tiles
        at = bounds_ptr + tile
        oldest = gl.load(at, mask=there, other=_FAR)
        youngest_oldest = gl.load(at + stride, mask=there, other=0)
        oldest_newest = gl.load(at + 2 * stride, mask=there, other=_FAR)
        newest = gl.load(at + 3 * stride, mask=there, other=-1)
        some = (newest >= n0) & (oldest <= n1)
        first = gl.minimum(first, gl.min(gl.where(some, tile, _FAR), 0))
        last = gl.maximum(last, gl.max(gl.where(some, tile + 1, 0), 0))
        full = gl.maximum(full, gl.max(gl.where(oldest_newest < n1, tile + 1, 0), 0))
        full_stop = gl.minimum(full_stop, gl.min(gl.where(there & (youngest_oldest > n0), tile, _FAR), 0))
    full = gl.minimum(gl.maximum(full, first), gl.maximum(last, first))
    full_stop = gl.maximum(gl.minimum(full_stop, last), full)
    return first, full, full_stop, last


@gluon.jit
def _copy_rows(
    k_desc, v_desc, q_desc, do_desc, lse_desc, delta_desc, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
    kv_ready, q_ready, q_free, do_ready, do_free, first, last, row_tile, b, g, n0,
    DP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that copies the program's keys and values, then the tiles of rows that see them."""
    mbarrier.expect(kv_ready, 2 * BN * DP * 2)
    _copy_tile(k_desc, b, g, n0, kv_ready, k_smem, BN, DP)
    _copy_tile(v_desc, b, g, n0, kv_ready, v_smem, BN, DP)
    for step in range(0, last - first):
        stage, phase = step % STAGES, step // STAGES & 1
        at = row_tile + first + step
        mbarrier.wait(q_free.index(stage), phase ^ 1)
        mbarrier.expect(q_ready.index(stage), BM * DP * 2 + BM * 4)
        tma.async_copy_global_to_shared(q_desc, [at * BM, 0], q_ready.index(stage), q_smem.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [at, 0], q_ready.index(stage), lse_smem.index(stage))
        mbarrier.wait(do_free.index(stage), phase ^ 1)
        mbarrier.expect(do_ready.index(stage), BM * DP * 2 + BM * 4)
        tma.async_copy_global_to_shared(do_desc, [at * BM, 0], do_ready.index(stage), do_smem.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [at, 0], do_ready.index(stage), delta_smem.index(stage))


@gluon.jit
def _add_dq(dq, dq_ptr, tile, DP: gl.constexpr, BM: gl.constexpr):
    """Add a tile of rows to memory in the order in which the registers hold it, 16 bytes a thread at a time."""
    parts = dq.reshape([4, 2, 8, 2, DP // 16, 4, 2]).permute([3, 0, 4, 2, 5, 1, 6]).reshape([BM * DP])
    at = gl.arange(0, BM * DP, parts.type.layout)
    gl.atomic_add(dq_ptr + tile.to(gl.int64) * (BM * DP) + at, parts, sem="relaxed")


@gluon.jit
def _add_rows(
    dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_ready, q_free, do_ready, do_free,
    dq_ptr, oldest_ptr, newest_ptr, n0, first, start, stop, scale, MASK: gl.constexpr, HAS_OLDEST: gl.constexpr,
    DP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the tiles start .. stop of rows to the gradients of a tile of keys, and theirs to dq."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DP, 16])
    row_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DP // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, key_layout, 2)
    for tile in range(start, stop):
        step = tile - first
        stage, phase = step % STAGES, step // STAGES & 1
        nothing = gl.zeros([BN, BM], gl.float32, s_layout)
        if MASK:  # first of all: this takes long
            at = tile * BM + gl.arange(0, BM, gl.SliceLayout(0, s_layout))
            newest = gl.load(newest_ptr + at)
            if HAS_OLDEST:
                oldest = gl.load(oldest_ptr + at)
        mbarrier.wait(q_ready.index(stage), phase)
        logits = warpgroup_mma(k_smem, q_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(do_ready.index(stage), phase)
        d_weights = warpgroup_mma(v_smem, do_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        lse = lse_smem.index(stage).load(s_layout)  # [1, BM]
        logits = warpgroup_mma_wait(1, deps=[logits])
        weights = gl.exp2(logits * scale - lse)
        if MASK:
            key = n0 + gl.arange(0, BN, gl.SliceLayout(1, s_layout))
            seen = key[:, None] <= newest[None, :]
            if HAS_OLDEST:
                seen = seen & (key[:, None] >= oldest[None, :])
            weights = gl.where(seen, weights, 0.0)
        narrow = gl.convert_layout(weights.to(q_smem.dtype), operand)
        dv = warpgroup_mma(narrow, do_smem.index(stage), dv, is_async=True)
        delta = delta_smem.index(stage).load(s_layout)
        d_weights = warpgroup_mma_wait(1, deps=[d_weights])
        d_logits = (weights * (d_weights - delta)).to(q_smem.dtype)
        # two buffers: the other warpgroup may still multiply with the last one
        ds_smem.index(step & 1).store(d_logits)
        d_narrow = gl.convert_layout(d_logits, operand)
        fence_async_shared()
        _barrier()
        none = gl.zeros([BM, DP], gl.float32, row_layout)
        dq = warpgroup_mma(ds_smem.index(step & 1).permute((1, 0)), k_smem, none, use_acc=False, is_async=True)
        dk = warpgroup_mma(d_narrow, q_smem.index(stage), dk, is_async=True)
        dv, narrow = warpgroup_mma_wait(2, deps=[dv, narrow])
        mbarrier.arrive(do_free.index(stage), count=1)
        dq = warpgroup_mma_wait(1, deps=[dq])
        _add_dq(dq, dq_ptr, tile, DP, BM)
        dk, d_narrow = warpgroup_mma_wait(0, deps=[dk, d_narrow])
        mbarrier.arrive(q_free.index(stage), count=1)
    return dk, dv


@gluon.jit
def _gradients(
    dk_ptr, dv_ptr, dq_ptr, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
    kv_ready, q_ready, q_free, do_ready, do_free, oldest_ptr, newest_ptr, first, full, full_stop, last, n0, b, g, S,
    scale, G: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, HAS_OLDEST: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: dk and dv of a tile of keys."""
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DP, 16])
    dk = gl.zeros([BN, DP], gl.float32, key_layout)
    dv = gl.zeros([BN, DP], gl.float32, key_layout)
    mbarrier.wait(kv_ready, 0)
    if first < last:
        dk, dv = _add_rows(
            dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_ready, q_free, do_ready,
            do_free, dq_ptr, oldest_ptr, newest_ptr, n0, first, first, full, scale * _LOG2E, True, HAS_OLDEST,
            DP, BM, BN, STAGES,
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_ready, q_free, do_ready,
            do_free, dq_ptr, oldest_ptr, newest_ptr, n0, first, full, full_stop, scale * _LOG2E, False, False,
            DP, BM, BN, STAGES,
        )  # fmt: skip
        if HAS_OLDEST:
            dk, dv = _add_rows(
                dk, dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, q_ready, q_free, do_ready,
                do_free, dq_ptr, oldest_ptr, newest_ptr, n0, first, full_stop, last, scale * _LOG2E, True, True,
                DP, BM, BN, STAGES,
            )  # fmt: skip
    key = n0 + gl.arange(0, BN, gl.SliceLayout(1, key_layout))
    lane = gl.arange(0, DP, gl.SliceLayout(0, key_layout))
    line = ((b.to(gl.int64) * S + key) * G + g)[:, None] * D + lane[None, :]
    here = (key < S)[:, None] & (lane < D)[None, :]
    gl.store(dk_ptr + line, (dk * scale).to(dk_ptr.dtype.element_ty), mask=here)
    gl.store(dv_ptr + line, dv.to(dv_ptr.dtype.element_ty), mask=here)


@gluon.jit
def rows_bwd_key_kernel(
    k_desc, v_desc, q_desc, do_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, dq_ptr, oldest_ptr, newest_ptr, bounds_ptr,
    counts_ptr, group_start, N, W, S, scale,
    G: gl.constexpr, R: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, HAS_COUNTS: gl.constexpr,
    HAS_OLDEST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    key_tiles = gl.cdiv(S, BN)
    local, n0 = gl.program_id(0) // key_tiles, gl.program_id(0) % key_tiles * BN
    b, g = (group_start + local) // G, (group_start + local) % G
    count = N
    if HAS_COUNTS:
        count = gl.load(counts_ptr + b)
    wide = local.to(gl.int64)
    first, full, full_stop, last = _tiles_that_see(
        bounds_ptr + wide * 4 * (W // BM), gl.cdiv(count * R, BM), W // BM, n0, n0 + BN - 1, 2048, 8
    )
    oldest_ptr += wide * W
    newest_ptr += wide * W
    dq_ptr += wide * W * DP
    key_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DP], dtype)
    k_smem = gl.allocate_shared_memory(dtype, [BN, DP], key_tile)
    v_smem = gl.allocate_shared_memory(dtype, [BN, DP], key_tile)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, DP], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, DP], do_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], delta_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [2, BN, BM], ds_layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(do_free.index(i), count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (_gradients, (
                dk_ptr, dv_ptr, dq_ptr, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem,
                kv_ready, q_ready, q_free, do_ready, do_free, oldest_ptr, newest_ptr, first, full, full_stop, last,
                n0, b, g, S, scale, G, D, DP, HAS_OLDEST, BM, BN, STAGES,
            )),
            (_copy_rows, (
                k_desc, v_desc, q_desc, do_desc, lse_desc, delta_desc, k_smem, v_smem, q_smem, do_smem, lse_smem,
                delta_smem, kv_ready, q_ready, q_free, do_ready, do_free, first, last, local * (W // BM),
                b, g, n0, DP, BM, BN, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """`_describe` of triton_rows.py for these kernels, which also fixes how a block lies in shared memory."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _shared_layout(x.dtype, tuple(block)))


@functools.cache
def _shared_layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    if block[-2] == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
