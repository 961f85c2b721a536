"""Window attention on the GPU, as FreeSolo's local branch; windows by themselves are triton_rows.py's.

Forward keeps the log-sum-exp of each row. Backward is two kernels without atomics, so its result is the same in
every run: one owns a tile of keys and walks the queries that see it, one owns a tile of queries.
For FreeSolo the last step of each direction is fused in: the forward adds alpha * RMSNorm(u) to its rows, the
backward turns gradients back to unrotated q and k and adds what the readout passed to them.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key/value heads, R = H / G, D head dim, K cells per query.
"""

import torch
import triton
import triton.language as tl

from kernels.triton_tools import (
    LOG2E,
    MASKED,
    dot,
    head_lanes,
    rotate_pair,
    rounding_rest,
    split_halves,
)


@triton.jit
def _visible(row, key, first, WINDOW, HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr):
    """Which keys each row sees; `row` and `key` are key positions that broadcast."""
    seen = key <= row
    if HAS_WINDOW:
        seen = seen & (key >= row - WINDOW)
    if HAS_FIRST:
        seen = seen & (key >= first)
    return seen


@triton.jit
def _attend_tiles(
    acc, peak, total, q, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, start, stop, Tk, WINDOW, scale,
    HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr, EDGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys start .. stop; EDGE tiles hold keys that some row does not see."""
    for n in range(start, stop, BN):
        key = n + tl.arange(0, BN)
        in_keys = (key < Tk)[:, None] & there[None, :]
        k = tl.load(k_ptr + key.to(tl.int64)[:, None] * k_st + lanes[None, :], mask=in_keys, other=0.0)
        v = tl.load(v_ptr + key.to(tl.int64)[:, None] * v_st + lanes[None, :], mask=in_keys, other=0.0)
        logits = dot(q, tl.trans(k)) * scale  # [BM, BN], in units of log 2
        if EDGE or HAS_FIRST:
            seen = _visible(row[:, None], key[None, :], first[:, None], WINDOW, HAS_WINDOW, HAS_FIRST)
            logits = tl.where(seen, logits, MASKED)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
    return acc, peak, total


@triton.jit
def merge_slots(
    part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, pair_rows, pick_rows, in_rows, lanes, there,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """u and its log-sum-exp from the K cells read apart: a softmax over softmaxes.

    A part is stored in units of its largest entry, its size. `pair_rows` index the parts of a chunk of heads,
    `pick_rows` the choices of all heads.
    """
    peak = tl.full([ROWS], MASKED, tl.float32)
    for slot in tl.static_range(K):
        pick = tl.load(picks_ptr + pick_rows * K + slot, mask=in_rows, other=-1)
        lse = tl.load(part_lse_ptr + pair_rows * K + slot, mask=in_rows & (pick >= 0), other=MASKED)
        peak = tl.maximum(peak, lse)
    total = tl.zeros([ROWS], tl.float32)
    u = tl.zeros([ROWS, DP], tl.float32)
    for slot in tl.static_range(K):
        pick = tl.load(picks_ptr + pick_rows * K + slot, mask=in_rows, other=-1)
        lse = tl.load(part_lse_ptr + pair_rows * K + slot, mask=in_rows & (pick >= 0), other=MASKED)
        weight = tl.where(pick >= 0, tl.exp2(lse - peak), 0.0)
        part = tl.load(
            part_ptr + (pair_rows * K + slot)[:, None] * D + lanes[None, :],
            mask=(in_rows & (pick >= 0))[:, None] & there[None, :],
            other=0.0,
        )
        size = tl.load(part_size_ptr + pair_rows * K + slot, mask=in_rows & (pick >= 0), other=0.0)
        u += (weight * size)[:, None] * part.to(tl.float32)
        total += weight
    total = tl.where(total > 0, total, 1.0)
    return u / total[:, None], peak + tl.log2(total)


@triton.jit
def _window_fwd_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, out_ptr, rest_ptr, lse_ptr, part_ptr, part_lse_ptr, part_size_ptr, picks_ptr,
    alpha_ptr, gain_ptr, q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh,
    Tq, Tk, G, head_start, WINDOW, query_offset, scale, eps,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr, HAS_READ: tl.constexpr, KEEP_REST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Window attention; HAS_READ adds the readout, KEEP_REST stores what rounding left of the output.

    Then q and k are a chunk of heads that starts at head_start; everything else holds all heads.
    """
    tiles = tl.cdiv(Tq, BM)
    pid = tl.program_id(0)
    m0 = (pid % tiles) * BM
    group = head_start + pid // tiles // R  # (b, g)
    r = pid // tiles % R
    b, g = (group // G).to(tl.int64), group % G
    h = g * R + r
    chunk_b, chunk_g = b, g
    if HAS_READ:
        chunk_b, chunk_g = tl.zeros_like(b), pid // tiles // R
    lanes, there = head_lanes(D, DP)
    rows = m0 + tl.arange(0, BM)
    in_rows = rows < Tq
    here = in_rows[:, None] & there[None, :]
    q_ptr += chunk_b * q_sb + (chunk_g.to(tl.int64) * R + r) * q_sh
    q = tl.load(q_ptr + rows.to(tl.int64)[:, None] * q_st + lanes[None, :], mask=here, other=0.0)
    k_ptr += chunk_b * k_sb + chunk_g.to(tl.int64) * k_sh
    v_ptr += b * v_sb + g.to(tl.int64) * v_sh
    row = query_offset + rows
    first = tl.zeros([BM], tl.int32)
    if HAS_FIRST:
        first = tl.load(first_ptr + b * Tq + rows, mask=in_rows, other=0).to(tl.int32)

    start = tl.zeros_like(m0)
    full = start
    if HAS_WINDOW:
        start = tl.maximum(query_offset + m0 - WINDOW, 0) // BN * BN
        full = (tl.maximum(query_offset + m0 + BM - 1 - WINDOW, 0) + BN - 1) // BN * BN
    diagonal = (query_offset + m0 + 1) // BN * BN
    full = tl.minimum(full, diagonal)
    stop = tl.minimum(query_offset + m0 + BM, Tk)
    acc = tl.zeros([BM, DP], tl.float32)
    peak = tl.full([BM], MASKED, tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_WINDOW:
        acc, peak, total = _attend_tiles(
            acc, peak, total, q, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, start, full, Tk, WINDOW,
            scale * LOG2E, HAS_WINDOW, HAS_FIRST, True, BN,
        )  # fmt: skip
    acc, peak, total = _attend_tiles(
        acc, peak, total, q, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, full, diagonal, Tk, WINDOW,
        scale * LOG2E, HAS_WINDOW, HAS_FIRST, False, BN,
    )  # fmt: skip
    acc, peak, total = _attend_tiles(
        acc, peak, total, q, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, diagonal, stop, Tk, WINDOW,
        scale * LOG2E, HAS_WINDOW, HAS_FIRST, True, BN,
    )  # fmt: skip

    blind = peak <= 0.5 * MASKED  # sees no key
    local = tl.where(blind[:, None], 0.0, acc / total[:, None])
    token = (b * Tq + rows) * (G * R) + h
    tl.store(lse_ptr + token, tl.where(blind, 0.0, peak + tl.log2(total)), mask=in_rows)
    if HAS_READ:
        pair = (chunk_g.to(tl.int64) * Tq + rows) * R + r
        u, _ = merge_slots(
            part_ptr, part_lse_ptr, part_size_ptr, picks_ptr, pair, token, in_rows, lanes, there, K, D, DP, BM
        )
        alpha = tl.load(alpha_ptr + h).to(tl.float32)
        gain = tl.load(gain_ptr + lanes, mask=there, other=0.0).to(tl.float32)
        local += (alpha * gain)[None, :] * u * tl.rsqrt(tl.sum(u * u, 1) / D + eps)[:, None]
    at = token[:, None] * D + lanes[None, :]
    rounded = local.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=here)
    if KEEP_REST:
        tl.store(rest_ptr + at, rounding_rest(local, rounded), mask=here)


@triton.jit
def gradient_scale(bound):
    """A power of two by which fp16 holds numbers of at most `bound`, whatever the loss is scaled by.

    The largest becomes 2^14 or less, which leaves 28 binary digits above the smallest normal number.
    """
    exponent = tl.minimum(tl.maximum(13.0 - tl.floor(tl.log2(bound)), -100.0), 100.0)
    return tl.where(bound > 0, tl.exp2(exponent), 1.0)


@triton.jit
def logit_scale(bound_ptr, group):
    """`gradient_scale` for the gradients of a kv head's logits, w (d . v - delta) with weights w of at most 1.

    `bound` [BG, 3] holds the largest norms of rows of d_out, of v and of du.
    """
    return gradient_scale(2 * tl.load(bound_ptr + 3 * group) * tl.load(bound_ptr + 3 * group + 1))


@triton.jit
def _add_key_tiles(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, q_st, do_st, token_step, lanes, there, key,
    start, stop, Tq, WINDOW, query_offset, scale, d_scale, HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr,
    EDGE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys from the queries start .. stop; dk is d_scale too large."""
    for m in range(start, stop, BM):
        rows = m + tl.arange(0, BM)
        in_rows = rows < Tq
        here = in_rows[:, None] & there[None, :]
        wide = rows.to(tl.int64)
        q = tl.load(q_ptr + wide[:, None] * q_st + lanes[None, :], mask=here, other=0.0)
        d_out = tl.load(do_ptr + wide[:, None] * do_st + lanes[None, :], mask=here, other=0.0)
        lse = tl.load(lse_ptr + wide * token_step, mask=in_rows, other=0.0)
        delta = tl.load(delta_ptr + wide * token_step, mask=in_rows, other=0.0)
        weights = tl.exp2(dot(k, tl.trans(q)) * (scale * LOG2E) - lse[None, :])  # [BN, BM]
        if EDGE or HAS_FIRST:
            first = tl.zeros([BM], tl.int32)
            if HAS_FIRST:
                first = tl.load(first_ptr + wide, mask=in_rows, other=0).to(tl.int32)
            row = query_offset + rows
            seen = _visible(row[None, :], key[:, None], first[None, :], WINDOW, HAS_WINDOW, HAS_FIRST)
            weights = tl.where(seen, weights, 0.0)
        dv = dot(weights.to(d_out.dtype), d_out, dv)
        d_weights = dot(v, tl.trans(d_out))
        d_logits = weights * (d_weights - delta[None, :]) * d_scale
        dk = dot(d_logits.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _rotated_back(
    ptr, grad, cos_ptr, sin_ptr, tokens, in_rows, row_step, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr
):
    """The halves of the gradient of x, given that of rotated x, and where they go."""
    HALF: tl.constexpr = D // 2
    lane = tl.arange(0, DP // 2)
    here = in_rows[:, None] & (lane < HALF)[None, :]
    cos = tl.load(cos_ptr + tokens[:, None] * HALF + lane[None, :], mask=here, other=0.0)
    sin = tl.load(sin_ptr + tokens[:, None] * HALF + lane[None, :], mask=here, other=0.0)
    first, second = split_halves(grad, ROWS, DP)
    first, second = rotate_pair(first, second, cos, -sin)
    at = ptr + tokens[:, None] * row_step + lane[None, :]
    return first, second, at, here


@triton.jit
def _window_bwd_key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr,
    dk_read_ptr, dv_read_ptr, bound_ptr,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, rope_sb,
    Tq, Tk, G, head_start, num_read, read_step, WINDOW, query_offset, scale,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr,
    FUSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tk, BN)
    pid = tl.program_id(0)
    n0 = (pid % tiles) * BN
    local_group = pid // tiles
    group = head_start + local_group
    b, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    chunk_b, chunk_g = b, g
    if FUSED:
        chunk_b, chunk_g = tl.zeros_like(b), local_group.to(tl.int64)
    lanes, there = head_lanes(D, DP)
    key = n0 + tl.arange(0, BN)
    in_keys = key < Tk
    here = in_keys[:, None] & there[None, :]
    wide = key.to(tl.int64)
    k = tl.load(k_ptr + chunk_b * k_sb + chunk_g * k_sh + wide[:, None] * k_st + lanes[None, :], mask=here, other=0.0)
    v = tl.load(v_ptr + b * v_sb + g * v_sh + wide[:, None] * v_st + lanes[None, :], mask=here, other=0.0)

    # queries n0 .. n0 + BN - 1 + WINDOW, as rows; all of them see the whole tile from `full` to `full_stop`
    start = tl.maximum(n0 - query_offset, 0) // BM * BM
    full = (tl.maximum(n0 + BN - 1 - query_offset, 0) + BM - 1) // BM * BM
    stop = Tq
    full_stop = Tq
    if HAS_WINDOW:
        stop = tl.minimum(tl.maximum(n0 + BN + WINDOW - query_offset, 0), Tq)
        full_stop = tl.maximum(n0 + WINDOW - query_offset + 1, 0) // BM * BM
    full = tl.minimum(full, stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full), stop)
    d_scale = 1.0
    if FUSED:
        d_scale = logit_scale(bound_ptr, group)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    for r in range(R):
        h = g * R + r
        q_head = q_ptr + chunk_b * q_sb + (chunk_g * R + r) * q_sh
        do_head = do_ptr + b * do_sb + h * do_sh
        token = b * Tq * G * R + h
        dk, dv = _add_key_tiles(
            dk, dv, k, v, q_head, do_head, lse_ptr + token, delta_ptr + token, first_ptr + b * Tq, q_st, do_st,
            G * R, lanes, there, key, start, full, Tq, WINDOW, query_offset, scale, d_scale, HAS_WINDOW, HAS_FIRST,
            True, BM,
        )  # fmt: skip
        dk, dv = _add_key_tiles(
            dk, dv, k, v, q_head, do_head, lse_ptr + token, delta_ptr + token, first_ptr + b * Tq, q_st, do_st,
            G * R, lanes, there, key, full, full_stop, Tq, WINDOW, query_offset, scale, d_scale,
            HAS_WINDOW, HAS_FIRST, False, BM,
        )  # fmt: skip
        if HAS_WINDOW:
            dk, dv = _add_key_tiles(
                dk, dv, k, v, q_head, do_head, lse_ptr + token, delta_ptr + token, first_ptr + b * Tq,
                q_st, do_st, G * R, lanes, there, key, full_stop, stop, Tq, WINDOW, query_offset, scale, d_scale,
                HAS_WINDOW, HAS_FIRST, True, BM,
            )  # fmt: skip
    dk *= scale / d_scale
    step = G * D
    dk_ptr += b * Tk * step + g * D
    dv_ptr += b * Tk * step + g * D
    at = dv_ptr + wide[:, None] * step + lanes[None, :]
    if FUSED:
        # what the readout passes to the tokens of complete cells, [heads, read_step, D]
        source = (chunk_g * read_step + wide)[:, None] * D
        read = (key < num_read)[:, None]
        dv += tl.load(dv_read_ptr + source + lanes[None, :], mask=here & read, other=0.0)
        first, second, at_k, half = _rotated_back(
            dk_ptr, dk, cos_ptr + b * rope_sb, sin_ptr + b * rope_sb, wide, in_keys, step, D, DP, BN
        )
        lane = tl.arange(0, DP // 2)
        first += tl.load(dk_read_ptr + source + lane[None, :], mask=half & read, other=0.0)
        second += tl.load(dk_read_ptr + source + D // 2 + lane[None, :], mask=half & read, other=0.0)
        tl.store(at_k, first.to(dk_ptr.dtype.element_ty), mask=half)
        tl.store(at_k + D // 2, second.to(dk_ptr.dtype.element_ty), mask=half)
    else:
        tl.store(dk_ptr + wide[:, None] * step + lanes[None, :], dk.to(dk_ptr.dtype.element_ty), mask=here)
    tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=here)


@triton.jit
def _add_query_tiles(
    dq, q, d_out, lse, delta, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, start, stop, Tk, WINDOW, scale,
    d_scale, HAS_WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr, EDGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries from the keys start .. stop, d_scale too large."""
    for n in range(start, stop, BN):
        key = n + tl.arange(0, BN)
        in_keys = (key < Tk)[:, None] & there[None, :]
        k = tl.load(k_ptr + key.to(tl.int64)[:, None] * k_st + lanes[None, :], mask=in_keys, other=0.0)
        v = tl.load(v_ptr + key.to(tl.int64)[:, None] * v_st + lanes[None, :], mask=in_keys, other=0.0)
        weights = tl.exp2(dot(q, tl.trans(k)) * (scale * LOG2E) - lse[:, None])
        if EDGE or HAS_FIRST:
            seen = _visible(row[:, None], key[None, :], first[:, None], WINDOW, HAS_WINDOW, HAS_FIRST)
            weights = tl.where(seen, weights, 0.0)
        d_logits = weights * (dot(d_out, tl.trans(v)) - delta[:, None]) * d_scale
        dq = dot(d_logits.to(k.dtype), k, dq)
    return dq


@triton.jit
def _window_bwd_query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, first_ptr, dq_ptr, cos_ptr, sin_ptr,
    part_ptr, part_size_ptr, picks_ptr, bound_ptr,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, do_sb, do_st, do_sh, rope_sb,
    Tq, Tk, G, head_start, WINDOW, query_offset, scale,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, K: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr, FUSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tq, BM)
    pid = tl.program_id(0)
    m0 = (pid % tiles) * BM
    local_group = pid // tiles // R
    group = head_start + local_group
    r = pid // tiles % R
    b, g = (group // G).to(tl.int64), (group % G).to(tl.int64)
    h = g * R + r
    chunk_b, chunk_g = b, g
    if FUSED:
        chunk_b, chunk_g = tl.zeros_like(b), local_group.to(tl.int64)
    lanes, there = head_lanes(D, DP)
    rows = m0 + tl.arange(0, BM)
    in_rows = rows < Tq
    here = in_rows[:, None] & there[None, :]
    wide = rows.to(tl.int64)
    q = tl.load(q_ptr + chunk_b * q_sb + (chunk_g * R + r) * q_sh + wide[:, None] * q_st + lanes[None, :], mask=here,
                other=0.0)  # fmt: skip
    d_out = tl.load(do_ptr + b * do_sb + h * do_sh + wide[:, None] * do_st + lanes[None, :], mask=here, other=0.0)
    token = (b * Tq + wide) * (G * R) + h
    lse = tl.load(lse_ptr + token, mask=in_rows, other=0.0)
    delta = tl.load(delta_ptr + token, mask=in_rows, other=0.0)
    k_ptr += chunk_b * k_sb + chunk_g * k_sh
    v_ptr += b * v_sb + g * v_sh
    row = query_offset + rows
    first = tl.zeros([BM], tl.int32)
    if HAS_FIRST:
        first = tl.load(first_ptr + b * Tq + rows, mask=in_rows, other=0).to(tl.int32)

    start = tl.zeros_like(m0)
    full = start
    if HAS_WINDOW:
        start = tl.maximum(query_offset + m0 - WINDOW, 0) // BN * BN
        full = (tl.maximum(query_offset + m0 + BM - 1 - WINDOW, 0) + BN - 1) // BN * BN
    diagonal = (query_offset + m0 + 1) // BN * BN
    full = tl.minimum(full, diagonal)
    stop = tl.minimum(query_offset + m0 + BM, Tk)
    d_scale = 1.0
    if FUSED:
        d_scale = logit_scale(bound_ptr, group)
    dq = tl.zeros([BM, DP], tl.float32)
    if HAS_WINDOW:
        dq = _add_query_tiles(
            dq, q, d_out, lse, delta, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, start, full, Tk,
            WINDOW, scale, d_scale, HAS_WINDOW, HAS_FIRST, True, BN,
        )  # fmt: skip
    dq = _add_query_tiles(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, full, diagonal, Tk,
        WINDOW, scale, d_scale, HAS_WINDOW, HAS_FIRST, False, BN,
    )  # fmt: skip
    dq = _add_query_tiles(
        dq, q, d_out, lse, delta, k_ptr, v_ptr, k_st, v_st, lanes, there, row, first, diagonal, stop, Tk,
        WINDOW, scale, d_scale, HAS_WINDOW, HAS_FIRST, True, BN,
    )  # fmt: skip
    dq *= scale / d_scale
    step = G * R * D
    dq_ptr += b * Tq * step + h * D
    if FUSED:
        a, z, at, half = _rotated_back(
            dq_ptr, dq, cos_ptr + b * rope_sb, sin_ptr + b * rope_sb, wide, in_rows, step, D, DP, BM
        )
        pair = (chunk_g * Tq + wide) * R + r
        lane = tl.arange(0, DP // 2)
        for slot in tl.static_range(K):
            pick = tl.load(picks_ptr + token * K + slot, mask=in_rows, other=-1)
            part = part_ptr + (pair * K + slot)[:, None] * D + lane[None, :]
            chosen = half & (pick >= 0)[:, None]
            size = tl.load(part_size_ptr + pair * K + slot, mask=in_rows & (pick >= 0), other=0.0)[:, None]
            a += size * tl.load(part, mask=chosen, other=0.0).to(tl.float32)
            z += size * tl.load(part + D // 2, mask=chosen, other=0.0).to(tl.float32)
        tl.store(at, a.to(dq_ptr.dtype.element_ty), mask=half)
        tl.store(at + D // 2, z.to(dq_ptr.dtype.element_ty), mask=half)
    else:
        tl.store(dq_ptr + wide[:, None] * step + lanes[None, :], dq.to(dq_ptr.dtype.element_ty), mask=here)


def forward_config(dtype: torch.dtype, DP: int) -> dict[str, int]:
    """Tile sizes of the forward kernel; fp32 is multiplied without tensor cores and takes small tiles."""
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    if DP <= 64:
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2}


def key_config(dtype: torch.dtype, DP: int) -> dict[str, int]:
    """Tile sizes of the backward kernel that owns keys."""
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    if DP <= 64:
        return {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 3}
    return {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 2}


def query_config(dtype: torch.dtype, DP: int) -> dict[str, int]:
    """Tile sizes of the backward kernel that owns queries."""
    if dtype == torch.float32:
        return {"BM": 32, "BN": 32, "num_warps": 4, "num_stages": 1}
    if DP <= 64:
        return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}
