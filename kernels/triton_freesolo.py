"""FreeSolo on the GPU: the kernels of the parts composed into whole operators, as torch custom operators.

`longpitch::freesolo` is the whole attention of one sequence slice: rotation and summaries in one pass, selection, the
readout pair by pair, and a window kernel whose last step merges the readout and adds it. `longpitch::read_cells` is
the readout of a table of cells, which context parallelism combines with the window itself.

Saved for the backward pass: q, k, v, the output and 8 more bits of it, one log-sum-exp per row, and integers (2 T H K
and a little).
Everything as large as q that is needed besides exists for one chunk of heads at a time and is computed again.

Shapes: B batch, T tokens, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells, K cells per
query, BG = B * G.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.limits import CELL_SIZES, MAX_TOP_K
from kernels.triton_cells import Choice, cell_strides, empty_summaries, order_capacity, prepare, retained_shape, select
from kernels.triton_readout import (
    NORM_ROWS,
    backward_step,
    empty_gradient,
    empty_parts,
    empty_shares,
    head_chunks,
    merge_parts,
    norm_backward,
    read_backward,
    read_forward,
    scale_gradient,
    sum_slots,
)
from kernels.triton_tools import cdiv, check_head_dim, dense_heads, fine_dtype, padded_dim, token_strides
from kernels.triton_window import (
    _window_bwd_key_kernel,
    _window_bwd_query_kernel,
    _window_fwd_kernel,
    forward_config,
    key_config,
    query_config,
)

# The whole operator


class _Sizes(NamedTuple):
    """The operator's integers; one argument, as torch takes a time that grows with the square of their number."""

    window: int
    cell_size: int
    query_block: int
    top_k: int
    retain: int  # -1: every cell is ranked
    recent: int
    deterministic: bool
    keep: bool


@torch.library.custom_op("longpitch::freesolo", mutates_args=())
def _freesolo(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, sigma: Tensor, lam: Tensor,
    eps: float, sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, T, H, D], what `select` says of the pools, and for the backward pass the rest: what rounding left of
    out, lse [B, T, H] and a `Choice`.

    What rounding left is int8 [B, T, H, D], empty unless `keep` of the `_Sizes` and the dtype has 16 bits.
    """
    window, cell_size, query_block, top_k, retain, recent, deterministic, keep = _Sizes(*sizes)
    q, k, v = (dense_heads(x) for x in (q, k, v))
    (B, T, H, D), G = q.shape, k.shape[2]
    BG, R, N, DP = B * G, H // G, T // cell_size, padded_dim(D)
    chunks = head_chunks(BG, T * D * q.element_size() * (R * top_k + R + 1))
    rotated = _empty_rotated(q, k, len(chunks[0]), fine_dtype(q.dtype))
    summaries = empty_summaries(k, BG, N)
    strides = cell_strides(k, cell_size)
    once = len(chunks) == 1  # then one pass over q and k serves both
    prepare(q, k, strides, T, N, G, cell_size, summaries=summaries, heads=range(BG),
            **({"rope": (cos, sin), "rotated": rotated} if once else {}))  # fmt: skip
    choice, retained = select(
        q, *summaries, None, G, sigma, lam, query_start=0, query_block=query_block, cell_size=cell_size,
        top_k=top_k, retain=None if retain < 0 else retain, recent=recent, deterministic=bool(deterministic),
    )  # fmt: skip
    del summaries
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rest = torch.empty(_rest_shape(q, keep), dtype=torch.int8, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    parts = empty_parts(q, len(chunks[0]), R, top_k)
    config = forward_config(q.dtype, DP)
    for heads in chunks:
        if not once:
            prepare(q, k, strides, T, N, G, cell_size, rope=(cos, sin), rotated=rotated, heads=heads)
        read_forward(q, k, v, strides, cell_strides(v, cell_size), choice, parts, G, cell_size, heads)
        _window_fwd_kernel[(cdiv(T, config["BM"]) * len(heads) * R,)](
            *rotated, v, q, out, rest, lse, *parts, choice.picks, alpha, gain,
            0, D, T * D, 0, D, T * D, *token_strides(v), T, T, G, heads.start, window, 0, D**-0.5, eps,
            R=R, D=D, DP=DP, K=top_k, HAS_WINDOW=True, HAS_FIRST=False, HAS_READ=True,
            KEEP_REST=rest.numel() > 0, **config,
        )  # fmt: skip
    return out, retained, rest, lse, *choice


@_freesolo.register_fake
def _(q, k, v, alpha, gain, cos, sin, sigma, lam, eps, sizes):
    B, T, H, D = q.shape
    G, (_, cell_size, query_block, top_k, retain, _, _, keep) = k.shape[2], _Sizes(*sizes)
    N, pool = T // cell_size, None if retain < 0 else retain
    return (
        q.new_empty(q.shape),
        q.new_empty(retained_shape(B * G, T, query_block, pool), dtype=torch.float32),
        q.new_empty(_rest_shape(q, keep), dtype=torch.int8),
        q.new_empty((B, T, H), dtype=torch.float32),
        *_fake_choice(q, B * G, N, T * (H // G) * top_k, top_k),
    )


@torch.library.custom_op("longpitch::freesolo_backward", mutates_args=())
def _freesolo_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, cos: Tensor, sin: Tensor,
    out: Tensor, rest: Tensor, lse: Tensor, picks: Tensor, order: Tensor, lists: Tensor,
    window: int, cell_size: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, d_alpha, d_gain."""
    d_out, q, k, v = (dense_heads(x) for x in (d_out, q, k, v))
    choice = Choice(picks, order, lists)
    (B, T, H, D), G, K = q.shape, k.shape[2], picks.shape[3]
    BG, R, N, DP, device = B * G, H // G, T // cell_size, padded_dim(D), q.device
    chunks = head_chunks(BG, T * D * (q.element_size() * (R * K + 2 * R + 1) + 8))
    rotated = _empty_rotated(q, k, len(chunks[0]), fine_dtype(q.dtype))
    parts = empty_parts(q, len(chunks[0]), R, K)
    shares = empty_shares(q, len(chunks[0]), R, K, N, cell_size)
    gradient = empty_gradient(q, None, BG, len(chunks[0]))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    tiles = cdiv(T, NORM_ROWS)
    d_alpha = torch.empty(B, H, tiles, dtype=torch.float32, device=device)
    d_gain = torch.empty(B * H * tiles, D, dtype=torch.float32, device=device)
    strides, v_strides = cell_strides(k, cell_size), cell_strides(v, cell_size)
    row_steps = (0, D, T * D, 0, D, T * D, *token_strides(v), *token_strides(d_out))
    rope_step = cos.stride(0) if cos.dim() == 3 else 0
    shape = {"R": R, "D": D, "DP": DP, "HAS_WINDOW": True, "HAS_FIRST": False}
    for heads in chunks:
        prepare(q, k, strides, T, N, G, cell_size, rope=(cos, sin), heads=heads, rotated=rotated)
        read_forward(q, k, v, strides, v_strides, choice, parts, G, cell_size, heads)
        norm_backward(parts, picks, out, rest, d_out, v, alpha, gain, gradient, (delta, d_alpha, d_gain), G, eps, heads)
        read_backward(q, k, v, strides, v_strides, gradient, choice, parts, shares, G, cell_size, heads)
        config = key_config(q.dtype, DP)
        _window_bwd_key_kernel[(cdiv(T, config["BN"]) * len(heads),)](
            *rotated, v, d_out, lse, delta, q, dk, dv, cos, sin, *shares, gradient.bound, *row_steps,
            rope_step, T, T, G, heads.start, N * cell_size, shares.dk.shape[1] * cell_size, window, 0, D**-0.5,
            FUSED=True, **shape, **config,
        )  # fmt: skip
        config = query_config(q.dtype, DP)
        _window_bwd_query_kernel[(cdiv(T, config["BM"]) * len(heads) * R,)](
            *rotated, v, d_out, lse, delta, q, dq, cos, sin, parts.x, parts.size, picks, gradient.bound,
            *row_steps,
            rope_step, T, T, G, heads.start, window, 0, D**-0.5, K=K, FUSED=True, **shape, **config,
        )  # fmt: skip
    return dq, dk, dv, d_alpha.sum((0, 2)).to(alpha.dtype), d_gain.sum(0).to(gain.dtype)


@_freesolo_backward.register_fake
def _(d_out, q, k, v, alpha, gain, cos, sin, out, rest, lse, picks, order, lists, window, cell_size, eps):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, alpha, gain))


def _keep_freesolo(ctx, inputs, output):
    *tensors, _sigma, _lam, ctx.eps, sizes = inputs
    ctx.window, ctx.cell_size, *_ = sizes
    ctx.set_materialize_grads(False)  # else zeros as large as every output that takes no gradient
    out, _retained, *kept = output
    ctx.save_for_backward(*tensors, out, *kept)


def _freesolo_grads(ctx, d_out, *_):
    grads = _freesolo_backward(d_out, *ctx.saved_tensors, ctx.window, ctx.cell_size, ctx.eps)
    return *grads, *[None] * 6


_freesolo.register_autograd(_freesolo_grads, setup_context=_keep_freesolo)


# The readout of a table of cells


@torch.library.custom_op("longpitch::read_cells", mutates_args=())
def _read_cells(
    q: Tensor, k_cells: Tensor, v_cells: Tensor, index: Tensor | None, sigma: Tensor, lam: Tensor,
    query_start: int, query_block: int, top_k: int, retain: int | None, recent: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u [B, T, H, D], what `select` says of the pools, and for the backward pass u's log-sum-exp and a `Choice`."""
    q, k_cells, v_cells = (dense_heads(x) for x in (q, k_cells, v_cells))
    (B, T, H, D), (_, G, _, cell_size, _) = q.shape, k_cells.shape
    choice, retained = _choose(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, True,
                               deterministic)  # fmt: skip
    u = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    chunks = head_chunks(B * G, T * D * q.element_size() * (H // G) * top_k)
    parts = empty_parts(q, len(chunks[0]), H // G, top_k)
    for heads in chunks:
        read_forward(q, k_cells, v_cells, k_cells.stride()[:4], v_cells.stride()[:4], choice, parts, G, cell_size,
                     heads)  # fmt: skip
        merge_parts(parts, choice.picks, u, lse, G, heads)
    return u, retained, lse, *choice


@_read_cells.register_fake
def _(q, k_cells, v_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, deterministic):
    (B, T, H, _), (_, G, N, _, _) = q.shape, k_cells.shape
    retained, lse = (
        q.new_empty(shape, dtype=torch.float32) for shape in (retained_shape(B * G, T, query_block, retain), (B, T, H))
    )
    return q.new_empty(q.shape), retained, lse, *_fake_choice(q, B * G, N, T * (H // G) * top_k, top_k)


@torch.library.custom_op("longpitch::read_cells_backward", mutates_args=())
def _read_cells_backward(
    du: Tensor, q: Tensor, k_cells: Tensor, v_cells: Tensor, index: Tensor | None, u: Tensor, lse: Tensor,
    picks: Tensor, order: Tensor, lists: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk_cells, dv_cells."""
    du, q, k_cells, v_cells = (dense_heads(x) for x in (du, q, k_cells, v_cells))
    (B, T, H, D), (_, G, N, cell_size, _), K = q.shape, k_cells.shape, picks.shape[3]
    R = H // G
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cells, v_cells))
    chunks = head_chunks(B * G, T * D * q.element_size() * R * (K + 1))
    parts = empty_parts(q, len(chunks[0]), R, K)
    shares = empty_shares(q, len(chunks[0]), R, K, N, cell_size)
    gradient = empty_gradient(q, lse, B * G, len(chunks[0]))
    for heads in chunks:
        scale_gradient(u, du, v_cells, index, gradient, heads)
        read_backward(
            q, k_cells, v_cells, k_cells.stride()[:4], v_cells.stride()[:4], gradient, Choice(picks, order, lists),
            parts, shares, G, cell_size, heads, out=(dk, dv),
        )  # fmt: skip
        sum_slots(parts, picks, dq, G, heads)
    return dq, dk, dv


@_read_cells_backward.register_fake
def _(du, q, k_cells, v_cells, index, u, lse, picks, order, lists):
    return tuple(x.new_empty(x.shape) for x in (q, k_cells, v_cells))


def _keep_read(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    u, _retained, *kept = output
    ctx.save_for_backward(*inputs[:4], u, *kept)


def _read_grads(ctx, du, *_):
    return *_read_cells_backward(du, *ctx.saved_tensors), *[None] * 9


_read_cells.register_autograd(_read_grads, setup_context=_keep_read)


@torch.library.custom_op("longpitch::choose_cells", mutates_args=())
def _choose_cells(
    q: Tensor, k_cells: Tensor, index: Tensor | None, sigma: Tensor, lam: Tensor,
    query_start: int, query_block: int, top_k: int, retain: int | None, recent: int,
) -> Tensor:  # fmt: skip
    """Columns of the table, int32 [B, T, H, K]."""
    q, k_cells = dense_heads(q), dense_heads(k_cells)
    choice, _ = _choose(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, False, False)
    return choice.picks


@_choose_cells.register_fake
def _(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent):
    return q.new_empty((*q.shape[:3], top_k), dtype=torch.int32)


def _choose(
    q: Tensor, k_cells: Tensor, index: Tensor | None, sigma: Tensor, lam: Tensor, query_start: int, query_block: int,
    top_k: int, retain: int | None, recent: int, pairs: bool, deterministic: bool,
) -> tuple[Choice, Tensor]:  # fmt: skip
    B, G, N, cell_size, _ = k_cells.shape
    summaries = empty_summaries(k_cells, B * G, N)
    if N > 0:
        prepare(q, k_cells, k_cells.stride()[:4], N * cell_size, N, G, cell_size, summaries=summaries,
                heads=range(B * G))  # fmt: skip
    return select(
        q, *summaries, index, G, sigma, lam, query_start=query_start, query_block=query_block, cell_size=cell_size,
        top_k=top_k, retain=retain, recent=recent, pairs=pairs, deterministic=deterministic,
    )  # fmt: skip


def _empty_rotated(q: Tensor, k: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for rotated q and k of a chunk of heads, [heads, R, T, D] and [heads, T, D]."""
    (_, T, H, D), G = q.shape, k.shape[2]
    return (
        torch.empty(heads, H // G, T, D, dtype=dtype, device=q.device),
        torch.empty(heads, T, D, dtype=dtype, device=q.device),
    )


def _rest_shape(q: Tensor, keep: int) -> tuple[int, ...]:
    return tuple(q.shape) if keep and q.dtype != torch.float32 else (0,)


def _fake_choice(q: Tensor, BG: int, N: int, pairs: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty((*q.shape[:3], top_k), dtype=torch.int32),
        q.new_empty((BG, order_capacity(pairs, N)), dtype=torch.int32),
        q.new_empty((BG, 3, N + 1), dtype=torch.int32),
    )


# Entries with checked arguments, for freesolo.py and cells.py


def _check_kernel_sizes(q: Tensor, cell_size: int, top_k: int) -> None:
    check_head_dim(q.shape[3])
    if cell_size not in CELL_SIZES:
        raise ValueError(f"the Triton kernels take cells of 16, 32, 64 or 128 tokens, got cell_size {cell_size}")
    if top_k > MAX_TOP_K:
        raise ValueError(f"the Triton kernels take top_k up to {MAX_TOP_K}, got {top_k}")
    backward_step(q.dtype, q.shape[3], cell_size, q.device)


def _resolve(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _fp32_per_head(value: float | Tensor, H: int, device: torch.device) -> Tensor:
    """[H] in fp32; a number is filled in on the device, without a copy from the host."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32).expand(H).contiguous()
    return torch.full((H,), float(value), dtype=torch.float32, device=device)


def triton_freesolo(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, rope_cos: Tensor, rope_sin: Tensor, *,
    window: int, cell_size: int, query_block: int, top_k: int, sigma: float | Tensor, lam: float | Tensor,
    retain: int | None, recent: int, eps: float, deterministic: bool | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`measured_freesolo_attention` of freesolo.py on the GPU."""
    _check_kernel_sizes(q, cell_size, top_k)
    deterministic = _resolve(deterministic)
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, alpha, gain))
    pool = -1 if retain is None else retain
    out, retained, *_ = _freesolo(
        q, k, v, alpha.contiguous(), gain.contiguous(), rope_cos.contiguous(), rope_sin.contiguous(), sigma, lam,
        eps, _Sizes(window, cell_size, query_block, top_k, pool, recent, deterministic, wanted),
    )  # fmt: skip
    return out, None if retain is None else retained.view(q.shape[0], k.shape[2], -1)


def triton_read_cells(
    q: Tensor, k_cells: Tensor, v_cells: Tensor, cell_index: Tensor | None, *, query_start: int, query_block: int,
    top_k: int, sigma: float | Tensor, lam: float | Tensor, retain: int | None, recent: int, deterministic: bool | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`read_cells` of cells.py on the GPU; cell_index None is 0 .. N-1."""
    _check_kernel_sizes(q, k_cells.shape[3], top_k)
    deterministic = _resolve(deterministic)
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    index = None if cell_index is None else cell_index.int().contiguous()
    u, retained, *_ = _read_cells(
        q, k_cells, v_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, deterministic
    )
    return u, None if retain is None else retained.view(*k_cells.shape[:2], -1)


def triton_choose_cells(
    q: Tensor, k_cells: Tensor, cell_index: Tensor | None, *, query_start: int, query_block: int, top_k: int,
    sigma: float | Tensor, lam: float | Tensor, retain: int | None, recent: int,
) -> Tensor:  # fmt: skip
    """`choose_cells` of cells.py on the GPU: global indices, int32 [B, T, H, K]."""
    _check_kernel_sizes(q, k_cells.shape[3], top_k)
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    index = None if cell_index is None else cell_index.int().contiguous()
    columns = _choose_cells(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent)
    if index is None or index.numel() == 0:
        return columns
    B, T, H, K = columns.shape
    G = k_cells.shape[1]
    at = columns.view(B, T, G, -1).clamp(min=0).long().transpose(1, 2).flatten(2)  # [B, G, T * R * K]
    chosen = index.view(B, G, -1).gather(-1, at).view(B, G, T, -1).transpose(1, 2).reshape(B, T, H, K)
    return chosen.where(columns >= 0, -1)


def triton_cell_priority(k_cells: Tensor) -> Tensor:
    """a_c of a table, fp32 [B, G, N]: the bits by which the kernels rank."""
    k_cells = dense_heads(k_cells)
    B, G, N, cell_size, _ = k_cells.shape
    mean, priority = empty_summaries(k_cells, B * G, N)
    if N > 0:
        prepare(k_cells.select(2, 0), k_cells, k_cells.stride()[:4], N * cell_size, N, G, cell_size,
                summaries=(mean, priority), heads=range(B * G))  # fmt: skip
    return priority.view(B, G, N)
