"""Choosing cells on the GPU: summaries, how long the pool keeps a cell, the K best cells of each query, and the list
of (query, slot) pairs in the order of their cells, which the readout walks.

Scores are fp32. Sixteen-bit queries meet the mean key as three sixteen-bit addends that together hold its 24 bits, so
tensor cores give what an fp32 product would. Each score is one product over all of D in a tile of fixed shape: its
bits depend on the query and the cell alone, not on the table around them.

FS-L keeps a cell for one interval of blocks: it enters with its own block and leaves for good when `retain` better
and `recent` later cells have come. `leave` holds the global index of the cell whose arrival ends the interval, so all
pools of a sequence come from one pass over pairs of cells that stops as soon as the fate of its cells is known.

Shapes: B batch, T tokens or queries, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells in
the table, K cells per query, C columns of a pool (retain + recent), BG = B * G.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_tools import cdiv, dot, next_power_of_2, padded_dim, rotate_pair, token_strides

NEVER = tl.constexpr(2**30)
TILE = 64  # pairs that one step of the readout takes; the pairs of each cell start at a multiple of it
COUNTERS = 8  # per cell, by query block: when all queries want one cell, their atomic additions wait for each other


@triton.jit
def _prepare_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, mean_ptr, priority_ptr,
    q_sb, q_st, q_sh, k_sb, k_sg, k_sn, k_ss, rope_sb, T, N, G, head_start, part_step,
    R: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr,
    ROTATE: tl.constexpr, SUMMARISE: tl.constexpr,
):  # fmt: skip
    """One cell of one kv head: its mean key and priority, and the rotation of its keys and queries.

    Rotated rows go to a chunk of heads, [heads, R, T, D] and [heads, T, D].
    """
    HALF: tl.constexpr = (D + 1) // 2
    cells = tl.cdiv(T, S)
    pid = tl.program_id(0)
    cell = (pid % cells).to(tl.int64)
    chunk_g = (pid // cells).to(tl.int64)
    group = head_start + chunk_g
    b, g = group // G, group % G
    inside = tl.arange(0, S)
    token = cell * S + inside
    lane = tl.arange(0, HP)
    low = (token < T)[:, None] & (lane < HALF)[None, :]
    high = (token < T)[:, None] & (HALF + lane < D)[None, :]
    at = k_ptr + b * k_sb + g * k_sg + cell * k_sn + inside[:, None] * k_ss + lane[None, :]
    first = tl.load(at, mask=low, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=high, other=0.0).to(tl.float32)
    if SUMMARISE and cell < N:
        norm = tl.sqrt(tl.sum(first * first, 1) + tl.sum(second * second, 1))
        tl.store(priority_ptr + group * N + cell, tl.max(norm, 0))
        rest_first, rest_second = tl.sum(first, 0) / S, tl.sum(second, 0) / S
        mean = mean_ptr + (group * N + cell) * D + lane
        for part in range(PARTS):
            a = rest_first.to(mean_ptr.dtype.element_ty)
            z = rest_second.to(mean_ptr.dtype.element_ty)
            tl.store(mean + part * part_step, a, mask=lane < HALF)
            tl.store(mean + part * part_step + HALF, z, mask=HALF + lane < D)
            rest_first -= a.to(tl.float32)
            rest_second -= z.to(tl.float32)
    if ROTATE:
        angle = b * rope_sb + token[:, None] * HALF + lane[None, :]
        cos = tl.load(cos_ptr + angle, mask=low, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=low, other=0.0)
        first, second = rotate_pair(first, second, cos, sin)
        at = (chunk_g * T + token)[:, None] * D + lane[None, :]
        tl.store(k_out_ptr + at, first.to(k_out_ptr.dtype.element_ty), mask=low)
        tl.store(k_out_ptr + at + HALF, second.to(k_out_ptr.dtype.element_ty), mask=high)
        for r in range(R):
            at = q_ptr + b * q_sb + (g * R + r) * q_sh + token[:, None] * q_st + lane[None, :]
            first = tl.load(at, mask=low, other=0.0).to(tl.float32)
            second = tl.load(at + HALF, mask=high, other=0.0).to(tl.float32)
            first, second = rotate_pair(first, second, cos, sin)
            at = ((chunk_g * R + r) * T + token)[:, None] * D + lane[None, :]
            tl.store(q_out_ptr + at, first.to(q_out_ptr.dtype.element_ty), mask=low)
            tl.store(q_out_ptr + at + HALF, second.to(q_out_ptr.dtype.element_ty), mask=high)


@triton.jit
def _leave_kernel(
    priority_ptr, index_ptr, leave_ptr, N, RETAIN, RECENT, HAS_INDEX: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr
):
    """Index of the cell whose arrival ends each cell's time in the pool, NEVER if none of the table does."""
    tiles = tl.cdiv(N, BC)
    pid = tl.program_id(0)
    base = (pid // tiles).to(tl.int64) * N
    c = pid % tiles * BC + tl.arange(0, BC)
    a = tl.load(priority_ptr + base + c, mask=c < N, other=0.0)
    index = c
    if HAS_INDEX:
        index = tl.load(index_ptr + base + c, mask=c < N, other=-1)
    present = (c < N) & (index >= 0)

    better = tl.where(present, 0, RETAIN)  # how many better cells have come
    outdone = tl.full([BC], NEVER, tl.int32)  # the retain-th of them
    j0 = 0
    while (j0 < N) & (tl.min(better, 0) < RETAIN):
        j = j0 + tl.arange(0, BJ)
        aj = tl.load(priority_ptr + base + j, mask=j < N, other=0.0)
        come = j
        if HAS_INDEX:
            come = tl.load(index_ptr + base + j, mask=j < N, other=-1)
        wins = (aj[None, :] > a[:, None]) | ((aj[None, :] == a[:, None]) & (j[None, :] < c[:, None]))
        wins = (wins & ((j < N) & (come >= 0))[None, :]).to(tl.int32)
        after = better + tl.sum(wins, 1)
        last = (better < RETAIN) & (after >= RETAIN)
        if tl.max(last.to(tl.int32), 0) > 0:
            nth = better[:, None] + tl.cumsum(wins, 1)
            hit = last[:, None] & (wins > 0) & (nth == RETAIN)
            outdone = tl.where(last, tl.max(tl.where(hit, come[None, :], -1), 1), outdone)
        better = after
        j0 += BJ

    old = c + RECENT  # the recent-th later cell
    if HAS_INDEX:
        later = tl.where(present, 0, RECENT)
        old = tl.full([BC], NEVER, tl.int32)
        j0 = pid % tiles * BC
        while (j0 < N) & (tl.min(later, 0) < RECENT):
            j = j0 + tl.arange(0, BJ)
            come = tl.load(index_ptr + base + j, mask=j < N, other=-1)
            counts = ((j[None, :] > c[:, None]) & (come >= 0)[None, :]).to(tl.int32)
            after = later + tl.sum(counts, 1)
            last = (later < RECENT) & (after >= RECENT)
            nth = later[:, None] + tl.cumsum(counts, 1)
            hit = last[:, None] & (counts > 0) & (nth == RECENT)
            old = tl.where(last, tl.max(tl.where(hit, come[None, :], -1), 1), old)
            later = after
            j0 += BJ
    tl.store(leave_ptr + base + c, tl.maximum(outdone, old), mask=c < N)


@triton.jit
def _pool_kernel(
    index_ptr, leave_ptr, pool_ptr, retained_ptr, N, blocks, query_start, QUERY_BLOCK: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, HAS_INDEX: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Columns of the table that the pool holds at each query block [BG, blocks, C], ascending, -1 padded.

    `retained` [BG, blocks] gets the share of the available cells that they are, 1 where there is none.
    """
    pid = tl.program_id(0)
    base = (pid // blocks).to(tl.int64) * N
    ended = (query_start + pid % blocks * QUERY_BLOCK) // S  # cells that end at or before the block
    stop = N
    if not HAS_INDEX:
        stop = tl.minimum(N, ended)
    pool = pool_ptr + pid.to(tl.int64) * C
    held = 0
    for j0 in range(0, stop, BJ):
        j = j0 + tl.arange(0, BJ)
        index = j
        if HAS_INDEX:
            index = tl.load(index_ptr + base + j, mask=j < stop, other=-1)
        leave = tl.load(leave_ptr + base + j, mask=j < stop, other=-1)
        keep = (j < stop) & (index >= 0) & (index < ended) & (leave >= ended)
        place = held + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(pool + place, j, mask=keep)
        held += tl.sum(keep.to(tl.int32), 0)
    slot = tl.arange(0, CP)
    tl.store(pool + slot, tl.full([CP], -1, tl.int32), mask=(slot >= held) & (slot < C))
    tl.store(retained_ptr + pid, tl.where(ended > 0, held.to(tl.float32) / tl.maximum(ended, 1).to(tl.float32), 1.0))


@triton.jit
def _insert(best, columns, value, column, K: tl.constexpr):
    """Let one (value, column) per row into its list, which falls; a value equal to one in the list goes after it."""
    new_best, new_columns = (), ()
    entered = value > best[0]
    for i in tl.static_range(K):
        entered = entered | (value > best[i])
        new_best = new_best + (tl.where(entered, value, best[i]),)
        new_columns = new_columns + (tl.where(entered, column, columns[i]),)
        value, column = tl.where(entered, best[i], value), tl.where(entered, columns[i], column)
    return new_best, new_columns


@triton.jit
def _any(condition):
    """Whether a condition holds for any row."""
    return tl.max(condition.to(tl.int32), 0) > 0


@triton.jit
def _rank_tiles(
    best, columns, q, mean_ptr, priority_ptr, index_ptr, pool_ptr, position, weight, width, start, stop, ended,
    part_step, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr,
    POOL: tl.constexpr, HAS_INDEX: tl.constexpr, FAR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Let the candidates start .. stop compete for the K best of each query.

    Scores are in units of 1 / sqrt(D), so that adding the positional term rounds once whether erf is computed or not.
    FAR candidates come in whole tiles, all of them available, and their erf is 1 to the last bit.
    """
    lane = tl.arange(0, DP)
    inside = tl.arange(0, BC)
    for c0 in range(start, stop, BC):
        column = c0 + inside
        present = column < stop
        if POOL:
            column = tl.load(pool_ptr + column, mask=present, other=-1)
            present = column >= 0
        index = column
        if HAS_INDEX:
            index = tl.load(index_ptr + column, mask=present, other=-1)
        present = present & (index >= 0) & (index < ended)
        here = present[:, None] & (lane < D)[None, :]
        at = mean_ptr + column.to(tl.int64)[:, None] * D + lane[None, :]
        # smallest addend first
        scores = dot(q, tl.trans(tl.load(at + (PARTS - 1) * part_step, mask=here, other=0.0)))
        for part in tl.static_range(1, PARTS):
            mean = tl.load(at + (PARTS - 1 - part) * part_step, mask=here, other=0.0)
            scores = dot(q, tl.trans(mean), scores)
        lead = weight * tl.load(priority_ptr + column, mask=present, other=0.0)
        if FAR:
            scores += lead[None, :]
        else:
            distance = (position[:, None] - index[None, :] * S).to(tl.float32) - 0.5 * S
            scores = tl.fma(lead[None, :], tl.erf(distance / width), scores)
            scores = tl.where(present[None, :], scores, -float("inf"))

        # At most K of a tile can enter. Branches, not a loop: Triton prefetches for innermost loops only.
        top = tl.max(scores, 1)
        enters = _any(top > best[K - 1])
        for entry in tl.static_range(K):
            if enters:
                place = tl.min(tl.where(scores == top[:, None], inside[None, :], BC), 1)  # the first of equals
                entrant = c0 + place
                if POOL:
                    entrant = tl.load(pool_ptr + entrant, mask=(place < BC) & (entrant < stop), other=-1)
                best, columns = _insert(best, columns, top, entrant, K)
                if entry + 1 < K:
                    scores = tl.where(inside[None, :] == place[:, None], -float("inf"), scores)
                    top = tl.max(scores, 1)
                    enters = _any(top > best[K - 1])
    return best, columns


@triton.jit
def _select_kernel(
    q_ptr, mean_ptr, priority_ptr, index_ptr, pool_ptr, sigma_ptr, lam_ptr, picks_ptr, rank_ptr, counts_ptr,
    q_sb, q_st, q_sh, T, N, G, blocks, query_start, part_step, root_dim,
    R: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, POOL: tl.constexpr, HAS_INDEX: tl.constexpr,
    COUNTERS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The K best columns of each query [B, T, H, K], ascending, -1 padded.

    With COUNTERS > 0 counts how often each is chosen [BG, COUNTERS, N], and keeps the count that each pair met.
    """
    TILES: tl.constexpr = (QUERY_BLOCK + BM - 1) // BM
    pid = tl.program_id(0)
    tile = pid % TILES
    # late blocks of FS have the most to rank and start first
    block = blocks - 1 - pid // TILES % blocks
    head = pid // TILES // blocks
    group = (head // R).to(tl.int64)  # (b, g)
    b, g = group // G, group % G
    h = g * R + head % R
    inside = tile * BM + tl.arange(0, BM)
    rows = block * QUERY_BLOCK + inside
    in_rows = (inside < QUERY_BLOCK) & (rows < T)
    block_start = query_start + block * QUERY_BLOCK
    ended = block_start // S
    position = query_start + rows
    lane = tl.arange(0, DP)
    q = tl.load(
        q_ptr + b * q_sb + h * q_sh + rows.to(tl.int64)[:, None] * q_st + lane[None, :],
        mask=in_rows[:, None] & (lane < D)[None, :],
        other=0.0,
    )
    sigma = tl.load(sigma_ptr + h).to(tl.float32)
    weight = tl.load(lam_ptr + h).to(tl.float32) * root_dim
    mean_ptr += group * N * D
    priority_ptr += group * N
    index_ptr += group * N
    pool_ptr += (group * blocks + block) * C

    best, columns = (), ()
    for _ in tl.static_range(K):
        best = best + (tl.full([BM], -float("inf"), tl.float32),)
        columns = columns + (tl.full([BM], -1, tl.int32),)
    # cells that end 8 sigma or more before the block: erf(4) rounds to 1 in fp32
    far = tl.maximum((block_start - 8.0 * sigma) / S, 0.0).to(tl.int32)
    WHOLE: tl.constexpr = C // BC * BC if POOL else 0
    stop = N
    if POOL:
        stop = C
        last = -1
        if WHOLE > 0:
            last = tl.load(pool_ptr + WHOLE - 1)  # the latest of the whole tiles; none if they are not full
            if HAS_INDEX:
                last = tl.load(index_ptr + last, mask=last >= 0, other=-1)
        far = tl.where((last >= 0) & (last < far), WHOLE, 0)
    elif HAS_INDEX:
        far = 0
    else:
        stop = tl.minimum(N, ended)
        far = tl.minimum(far, stop) // BC * BC
    best, columns = _rank_tiles(
        best, columns, q, mean_ptr, priority_ptr, index_ptr, pool_ptr, position, weight, 2 * sigma, 0, far, ended,
        part_step, D, DP, S, K, PARTS, POOL, HAS_INDEX, True, BC,
    )  # fmt: skip
    if WHOLE > 0:
        best, columns = _rank_tiles(
            best, columns, q, mean_ptr, priority_ptr, index_ptr, pool_ptr, position, weight, 2 * sigma, far, WHOLE,
            ended, part_step, D, DP, S, K, PARTS, POOL, HAS_INDEX, False, BC,
        )  # fmt: skip
        far = WHOLE
    best, columns = _rank_tiles(
        best, columns, q, mean_ptr, priority_ptr, index_ptr, pool_ptr, position, weight, 2 * sigma, far, stop, ended,
        part_step, D, DP, S, K, PARTS, POOL, HAS_INDEX, False, REST,
    )  # fmt: skip

    pair = ((b * T + rows) * (G * R) + h) * K
    for i in tl.static_range(K):
        column = columns[i]
        real = in_rows & (column >= 0)
        place = tl.zeros([BM], tl.int32)
        for j in tl.static_range(K):
            if j != i:  # empty slots are the last of the list and stay last
                before = (columns[j] >= 0) & (columns[j] < column)
                if j < i:
                    before = before | (column < 0)
                place += before.to(tl.int32)
        tl.store(picks_ptr + pair + place, column, mask=in_rows)
        if COUNTERS > 0:
            count = counts_ptr + (group * COUNTERS + block % COUNTERS) * N + column
            rank = tl.atomic_add(count, 1, mask=real, sem="relaxed")
            tl.store(rank_ptr + pair + place, rank, mask=real)


@triton.jit
def _offset_kernel(
    counts_ptr, lists_ptr, N, COUNTERS: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr
):
    """Fill `Choice.lists` from the counts, which become offsets within their cell."""
    counts = counts_ptr + tl.program_id(0).to(tl.int64) * COUNTERS * N
    base = lists_ptr + tl.program_id(0).to(tl.int64) * 3 * (N + 1)
    offset = tl.program_id(0).to(tl.int64) * 0
    extra = offset
    for n0 in range(0, N + 1, BN):
        n = n0 + tl.arange(0, BN)
        count = tl.zeros([BN], tl.int32)
        for counter in tl.static_range(COUNTERS):
            share = tl.load(counts + counter * N + n, mask=n < N, other=0)
            tl.store(counts + counter * N + n, count, mask=n < N)
            count += share
        size = ((count + TILE - 1) // TILE * TILE).to(tl.int64)
        runs = (tl.maximum(count + RUN - 1, RUN) // RUN - 1).to(tl.int64)
        tl.store(base + n, count, mask=n <= N)
        tl.store(base + (N + 1) + n, (offset + tl.cumsum(size, 0) - size).to(tl.int32), mask=n <= N)
        tl.store(base + 2 * (N + 1) + n, (extra + tl.cumsum(runs, 0) - runs).to(tl.int32), mask=n <= N)
        offset += tl.sum(size, 0)
        extra += tl.sum(runs, 0)


@triton.jit
def _order_kernel(
    picks_ptr, rank_ptr, counts_ptr, lists_ptr, order_ptr, T, N, G, capacity, R: tl.constexpr, K: tl.constexpr,
    QUERY_BLOCK: tl.constexpr, COUNTERS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Put each pair (query, head, slot), numbered within its kv head, where its cell's pairs lie.

    A pair's rank is its place within its cell, or with COUNTERS > 0 within its cell's counter.
    """
    pairs = T * R * K
    tiles = tl.cdiv(pairs, BP)
    pid = tl.program_id(0)
    group = (pid // tiles).to(tl.int64)
    b, g = group // G, group % G
    pair = pid % tiles * BP + tl.arange(0, BP)
    at = (b * T + pair // (R * K)) * (G * R * K) + g * R * K + pair % (R * K)
    column = tl.load(picks_ptr + at, mask=pair < pairs, other=-1)
    real = column >= 0
    offset = lists_ptr + group * 3 * (N + 1) + N + 1
    place = tl.load(offset + column, mask=real, other=0) + tl.load(rank_ptr + at, mask=real, other=0)
    if COUNTERS > 0:
        counter = pair // (R * K) // QUERY_BLOCK % COUNTERS
        place += tl.load(counts_ptr + (group * COUNTERS + counter) * N + column, mask=real, other=0)
    tl.store(order_ptr + group * capacity + place, pair, mask=real)


class Choice(NamedTuple):
    """What selection hands to the readout.

    picks: int32 [B, T, H, K], columns of the table, ascending, -1 padded.
    order: int32 [BG, capacity], pairs (t * R + r) * K + slot by cell, -1 in the gaps.
    lists: int32 [BG, 3, N + 1]: how many pairs each cell has, where they start in `order`, and how many runs of
        `run_length` pairs after their first one the cells before it have.
    """

    picks: Tensor
    order: Tensor
    lists: Tensor


def mean_parts(dtype: torch.dtype) -> int:
    """Addends in which a mean key is kept."""
    return 1 if dtype == torch.float32 else 3


def cell_strides(k: Tensor, cell_size: int) -> tuple[int, int, int, int]:
    """Strides of batch, kv head, cell and token for tokens [B, T, G, D]."""
    return k.stride(0), k.stride(2), cell_size * k.stride(1), k.stride(1)


def prepare(
    q: Tensor, k: Tensor, strides: tuple[int, int, int, int], T: int, N: int, G: int, cell_size: int,
    *, summaries: tuple[Tensor, Tensor] | None = None, rope: tuple[Tensor, Tensor] | None = None,
    rotated: tuple[Tensor, Tensor] | None = None, heads: range,
) -> None:  # fmt: skip
    """Fill `summaries` (mean parts [PARTS, BG, N, D], priority [BG, N]), `rotated` q and k, or both."""
    D, R = k.shape[-1], q.shape[2] // G
    mean, priority = summaries or (k, k)
    cos, sin = rope or (k, k)
    q_out, k_out = rotated or (k, k)
    _prepare_kernel[(cdiv(T, cell_size) * len(heads),)](
        q, k, cos, sin, q_out, k_out, mean, priority, *token_strides(q), *strides,
        cos.stride(0) if cos.dim() == 3 else 0, T, N, G, heads.start, mean.stride(0),
        R=R, D=D, HP=padded_dim(D) // 2, S=cell_size, PARTS=mean_parts(k.dtype),
        ROTATE=rope is not None, SUMMARISE=summaries is not None,
        num_warps=2,
    )  # fmt: skip


def empty_summaries(k: Tensor, BG: int, N: int) -> tuple[Tensor, Tensor]:
    mean = torch.empty(mean_parts(k.dtype), BG, N, k.shape[-1], dtype=k.dtype, device=k.device)
    return mean, torch.empty(BG, N, dtype=torch.float32, device=k.device)


def select_config(dtype: torch.dtype, query_block: int, pool: int) -> dict[str, int]:
    """Queries and candidates that one step of the ranking compares; REST is what is left of a pool of `pool` cells."""
    BM = min(64 if dtype == torch.float32 or not pool else 128, max(16, next_power_of_2(query_block)))
    BC = 32 if dtype == torch.float32 or pool else 64
    REST = max(16, next_power_of_2(pool % BC)) if pool else BC
    return {"BM": BM, "BC": BC, "REST": REST, "num_warps": 4, "num_stages": 2}


def select(
    q: Tensor, mean: Tensor, priority: Tensor, index: Tensor | None, G: int, sigma: Tensor, lam: Tensor, *,
    query_start: int, query_block: int, cell_size: int, top_k: int, retain: int | None, recent: int,
    pairs: bool = True, deterministic: bool = False,
) -> tuple[Choice, Tensor]:  # fmt: skip
    """Choose the cells of each query and order the pairs by cell; and what share of the cells the pools hold.

    Args:
        q: [B, T, H, D], dense heads. mean, priority: summaries of the table. index: int32 [BG, N]; None is 0 .. N-1.
        sigma, lam: fp32 [H].
        pairs: order the pairs too.
        deterministic: the same order in every run, at the price of a sort.

    Returns:
        The choice, and fp32 `retained_shape`: the share of the available cells that each query block's pool holds, 1
        where none is available. Without a pool it is empty.
    """
    B, T, H, D = q.shape
    BG, N = priority.shape
    R, K, device = H // G, top_k, q.device
    blocks = cdiv(T, query_block)
    has_index = index is not None
    some = priority if index is None else index
    C, pool, pooled = 1, some, retain is not None and N > 0
    retained = torch.empty(retained_shape(BG, T, query_block, retain), dtype=torch.float32, device=device)
    if pooled:
        C = retain + recent
        pool = _pools(priority, index, retained, query_start, query_block, cell_size, retain, recent)
    else:
        retained.fill_(1)
    picks = torch.empty(B, T, H, K, dtype=torch.int32, device=device)
    rank = torch.empty_like(picks) if pairs else picks
    lists = torch.empty(BG, 3, N + 1, dtype=torch.int32, device=device)
    counts = torch.zeros(BG, COUNTERS, N, dtype=torch.int32, device=device) if pairs else lists
    config = select_config(q.dtype, query_block, C if pooled else 0)
    _select_kernel[(cdiv(query_block, config["BM"]) * blocks * B * H,)](
        q, mean, priority, some, pool, sigma, lam, picks, rank, counts, *token_strides(q),
        T, N, G, blocks, query_start, mean.stride(0), D**0.5,
        R=R, D=D, DP=padded_dim(D), S=cell_size, QUERY_BLOCK=query_block, K=K, C=C,
        PARTS=mean.shape[0], POOL=pooled, HAS_INDEX=has_index, COUNTERS=COUNTERS if pairs else 0, **config,
    )  # fmt: skip
    if not pairs:
        return Choice(picks, picks, lists), retained
    return _order(picks, rank, counts, lists, G, query_block, deterministic), retained


def retained_shape(BG: int, T: int, query_block: int, retain: int | None) -> tuple[int, ...]:
    """[BG, query blocks], or [0] where every cell is ranked."""
    return (0,) if retain is None else (BG, cdiv(T, query_block))


def _pools(
    priority: Tensor, index: Tensor | None, retained: Tensor, query_start: int, query_block: int, cell_size: int,
    retain: int, recent: int,
) -> Tensor:  # fmt: skip
    """Columns that the pool holds at each query block: int32 [BG, blocks, retain + recent], ascending, -1 padded.

    Fills `retained` [BG, blocks].
    """
    (BG, N), blocks, C = priority.shape, retained.shape[1], retain + recent
    some = priority if index is None else index
    leave = torch.empty(BG, N, dtype=torch.int32, device=priority.device)
    _leave_kernel[(cdiv(N, 8) * BG,)](
        priority, some, leave, N, retain, recent, HAS_INDEX=index is not None, BC=8, BJ=256, num_warps=4
    )
    pool = torch.empty(BG, blocks, C, dtype=torch.int32, device=priority.device)
    _pool_kernel[(blocks * BG,)](
        some, leave, pool, retained, N, blocks, query_start, QUERY_BLOCK=query_block, S=cell_size, C=C,
        CP=next_power_of_2(C), HAS_INDEX=index is not None, BJ=512, num_warps=4,
    )  # fmt: skip
    return pool


def _order(
    picks: Tensor, rank: Tensor, counts: Tensor, lists: Tensor, G: int, query_block: int, deterministic: bool
) -> Choice:
    """Fill `lists` and order the pairs by cell, with the counts and ranks that selection left."""
    (_, T, H, K), (BG, _, N) = picks.shape, counts.shape
    R = H // G
    _offset_kernel[(BG,)](
        counts, lists, N, COUNTERS=COUNTERS, TILE=TILE, RUN=run_length(T * R * K), BN=1024, num_warps=4
    )
    capacity = order_capacity(T * R * K, N)
    order = torch.full((BG, capacity), -1, dtype=torch.int32, device=picks.device)
    sort = deterministic and N > 0
    if sort:
        rank = _sorted_rank(picks, lists[:, 0, :N], G)
    _order_kernel[(cdiv(T * R * K, 1024) * BG,)](
        picks, rank, counts, lists, order, T, N, G, capacity,
        R=R, K=K, QUERY_BLOCK=query_block, COUNTERS=0 if sort else COUNTERS, BP=1024, num_warps=4,
    )  # fmt: skip
    return Choice(picks, order, lists)


def run_length(pairs: int) -> int:
    """Pairs of one cell that one program of the readout's backward takes, at most 512 runs a head."""
    return max(512, next_power_of_2(pairs // 512))


def order_capacity(pairs: int, N: int) -> int:
    """Places for the pairs of one kv head when those of each of N cells start at a multiple of TILE."""
    return (pairs + N * (TILE - 1) + TILE - 1) // TILE * TILE


def _sorted_rank(picks: Tensor, count: Tensor, G: int) -> Tensor:
    """Each pair's place among the pairs of its cell, in the order of queries."""
    B, T, H, K = picks.shape
    columns = picks.view(B, T, G, -1).transpose(1, 2).reshape(B * G, -1)
    columns, pair = columns.sort(dim=-1, stable=True)  # padding comes first
    start = (count.cumsum(-1) - count).gather(-1, columns.clamp(min=0).long())
    start += (columns < 0).sum(-1, keepdim=True)
    place = torch.arange(columns.shape[1], device=picks.device) - start
    rank = torch.empty_like(columns).scatter_(-1, pair, place.int())
    return rank.view(B, G, T, -1).transpose(1, 2).contiguous()
