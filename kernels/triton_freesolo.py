"""FreeSolo on the GPU: the kernels of the parts composed into whole operators, as torch custom operators.

`longpitch::freesolo` is the whole attention of one sequence slice: rotation and summaries in one pass, selection, the
readout pair by pair, and a window kernel whose last step merges the readout and adds it. `longpitch::read_cells` is
the readout of a table of cells, which context parallelism combines with the window itself.

Saved for the backward pass: q, k, v, the local branch, one log-sum-exp per row, and integers (2 T H K and a little).
Everything as large as q that is needed besides exists for one chunk of heads at a time and is computed again.

Shapes: B batch, T tokens, H query heads, G key/value heads, R = H / G, D head dim, s cell size, N cells, K cells per
query, BG = B * G.
"""

import torch
import triton
from torch import Tensor

from kernels.triton_cells import Choice, cell_strides, empty_summaries, order_capacity, prepare, select
from kernels.triton_readout import (
    _norm_bwd_kernel,
    empty_parts,
    head_chunks,
    merge_parts,
    read_backward,
    read_forward,
    sum_slots,
)
from kernels.triton_tools import dense_heads, padded_dim, token_strides
from kernels.triton_window import (
    _window_bwd_key_kernel,
    _window_bwd_query_kernel,
    _window_fwd_kernel,
    forward_config,
    key_config,
    query_config,
    row_dot,
)

# The whole operator


@torch.library.custom_op("longpitch::freesolo", mutates_args=())
def _freesolo(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, sigma: Tensor, lam: Tensor,
    window: int, cell_size: int, query_block: int, top_k: int, retain: int | None, recent: int, eps: float,
    deterministic: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, T, H, D], and for the backward pass local, lse [B, T, H] and a `Choice`; local is empty unless `keep`."""
    q, k, v = (dense_heads(x) for x in (q, k, v))
    (B, T, H, D), G = q.shape, k.shape[2]
    BG, R, N, DP = B * G, H // G, T // cell_size, padded_dim(D)
    chunks = head_chunks(BG, T * R * top_k, D, q.element_size())
    rotated = _empty_rotated(q, k, len(chunks[0]))
    summaries = empty_summaries(k, BG, N)
    strides = cell_strides(k, cell_size)
    once = len(chunks) == 1  # then one pass over q and k serves both
    prepare(q, k, strides, T, N, G, cell_size, summaries=summaries, heads=range(BG),
            **({"rope": (cos, sin), "rotated": rotated} if once else {}))  # fmt: skip
    choice = select(
        q, *summaries, None, G, sigma, lam, query_start=0, query_block=query_block, cell_size=cell_size,
        top_k=top_k, retain=retain, recent=recent, deterministic=deterministic,
    )  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    local = torch.empty(q.shape if keep else (0,), dtype=q.dtype, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    part, part_lse = empty_parts(q, len(chunks[0]), R, top_k)
    config = forward_config(q.dtype, DP)
    for heads in chunks:
        if not once:
            prepare(q, k, strides, T, N, G, cell_size, rope=(cos, sin), rotated=rotated, heads=heads)
        read_forward(q, k, v, strides, cell_strides(v, cell_size), choice.picks, choice.order, part, part_lse, G,
                     cell_size, heads)  # fmt: skip
        _window_fwd_kernel[(triton.cdiv(T, config["BM"]) * len(heads) * R,)](
            *rotated, v, q, out, local, lse, part, part_lse, choice.picks, alpha, gain,
            0, D, T * D, 0, D, T * D, *token_strides(v), T, T, G, heads.start, len(heads), window, 0, D**-0.5, eps,
            R=R, D=D, DP=DP, K=top_k, HAS_WINDOW=True, HAS_FIRST=False, HAS_READ=True, KEEP_LOCAL=keep, **config,
        )  # fmt: skip
    return out, local, lse, *choice.tensors()


@_freesolo.register_fake
def _(q, k, v, alpha, gain, cos, sin, sigma, lam, window, cell_size, query_block, top_k, retain, recent, eps,
      deterministic, keep):  # fmt: skip
    B, T, H, D = q.shape
    G = k.shape[2]
    N = T // cell_size
    return (
        q.new_empty(q.shape),
        q.new_empty(q.shape if keep else (0,)),
        q.new_empty((B, T, H), dtype=torch.float32),
        *_fake_choice(q, B * G, N, T * (H // G) * top_k, top_k),
    )


@torch.library.custom_op("longpitch::freesolo_backward", mutates_args=())
def _freesolo_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, cos: Tensor, sin: Tensor,
    local: Tensor, lse: Tensor, picks: Tensor, order: Tensor, count: Tensor, offset: Tensor,
    window: int, cell_size: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, d_alpha, d_gain."""
    d_out, q, k, v = (dense_heads(x) for x in (d_out, q, k, v))
    (B, T, H, D), G, K = q.shape, k.shape[2], picks.shape[3]
    BG, R, N, DP, device = B * G, H // G, T // cell_size, padded_dim(D), q.device
    chunks = head_chunks(BG, T * R * K, D, q.element_size())
    rotated = _empty_rotated(q, k, len(chunks[0]))
    part, part_lse = empty_parts(q, len(chunks[0]), R, K)
    du = torch.empty(len(chunks[0]), T, R, D, dtype=q.dtype, device=device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    lse_u, delta_u, delta = (torch.empty_like(lse) for _ in range(3))
    tiles = triton.cdiv(T, 64)
    d_alpha = torch.empty(B, H, tiles, dtype=torch.float32, device=device)
    d_gain = torch.empty(B * H * tiles, D, dtype=torch.float32, device=device)
    strides, v_strides = cell_strides(k, cell_size), cell_strides(v, cell_size)
    shape = {"R": R, "D": D, "DP": DP}
    for heads in chunks:
        prepare(q, k, strides, T, N, G, cell_size, rope=(cos, sin), rotated=rotated, heads=heads)
        read_forward(q, k, v, strides, v_strides, picks, order, part, part_lse, G, cell_size, heads)
        _norm_bwd_kernel[(tiles * len(heads) * R,)](
            part, part_lse, picks, local, d_out, alpha, gain, du, lse_u, delta_u, delta, d_alpha, d_gain,
            *token_strides(d_out), T, G, heads.start, eps, K=K, BM=64, **shape,
        )  # fmt: skip
        read_backward(
            q, k, v, strides, v_strides, du, (T * R * D, 0, 0, R * D, D), lse_u, delta_u, order, count, offset, part,
            dk, dv, cell_strides(dk, cell_size), G, K, cell_size, heads,
        )  # fmt: skip
        steps = (0, D, T * D, 0, D, T * D, *token_strides(v), *token_strides(d_out),
                 cos.stride(0) if cos.dim() == 3 else 0)  # fmt: skip
        shared = {"HAS_WINDOW": True, "HAS_FIRST": False, "FUSED": True, **shape}
        config = key_config(q.dtype, DP)
        _window_bwd_key_kernel[(triton.cdiv(T, config["BN"]) * len(heads),)](
            *rotated, v, d_out, lse, delta, q, dk, dv, cos, sin, *steps,
            T, T, G, heads.start, N * cell_size, window, 0, D**-0.5, **shared, **config,
        )  # fmt: skip
        config = query_config(q.dtype, DP)
        _window_bwd_query_kernel[(triton.cdiv(T, config["BM"]) * len(heads) * R,)](
            *rotated, v, d_out, lse, delta, q, dq, cos, sin, part, picks, *steps,
            T, T, G, heads.start, window, 0, D**-0.5, K=K, **shared, **config,
        )  # fmt: skip
    return dq, dk, dv, d_alpha.sum((0, 2)).to(alpha.dtype), d_gain.sum(0).to(gain.dtype)


@_freesolo_backward.register_fake
def _(d_out, q, k, v, alpha, gain, cos, sin, local, lse, picks, order, count, offset, window, cell_size, eps):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, alpha, gain))


def _keep_freesolo(ctx, inputs, output):
    *tensors, _sigma, _lam, ctx.window, ctx.cell_size, _, _, _, _, ctx.eps, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _freesolo_grads(ctx, d_out, *_):
    grads = _freesolo_backward(d_out, *ctx.saved_tensors, ctx.window, ctx.cell_size, ctx.eps)
    return *grads, *[None] * 13


_freesolo.register_autograd(_freesolo_grads, setup_context=_keep_freesolo)


# The readout of a table of cells


@torch.library.custom_op("longpitch::read_cells", mutates_args=())
def _read_cells(
    q: Tensor, k_cells: Tensor, v_cells: Tensor, index: Tensor | None, sigma: Tensor, lam: Tensor,
    query_start: int, query_block: int, top_k: int, retain: int | None, recent: int, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """u [B, T, H, D], and for the backward pass its log-sum-exp and a `Choice`."""
    q, k_cells, v_cells = (dense_heads(x) for x in (q, k_cells, v_cells))
    (B, T, H, D), (_, G, N, cell_size, _) = q.shape, k_cells.shape
    choice = _choose(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, True,
                     deterministic)  # fmt: skip
    u = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    chunks = head_chunks(B * G, T * (H // G) * top_k, D, q.element_size())
    part, part_lse = empty_parts(q, len(chunks[0]), H // G, top_k)
    for heads in chunks:
        read_forward(q, k_cells, v_cells, k_cells.stride()[:4], v_cells.stride()[:4], choice.picks, choice.order, part,
                     part_lse, G, cell_size, heads)  # fmt: skip
        merge_parts(part, part_lse, choice.picks, u, lse, G, heads)
    return u, lse, *choice.tensors()


@_read_cells.register_fake
def _(q, k_cells, v_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, deterministic):
    (B, T, H, _), (_, G, N, _, _) = q.shape, k_cells.shape
    lse = q.new_empty((B, T, H), dtype=torch.float32)
    return q.new_empty(q.shape), lse, *_fake_choice(q, B * G, N, T * (H // G) * top_k, top_k)


@torch.library.custom_op("longpitch::read_cells_backward", mutates_args=())
def _read_cells_backward(
    du: Tensor, q: Tensor, k_cells: Tensor, v_cells: Tensor, u: Tensor, lse: Tensor, picks: Tensor, order: Tensor,
    count: Tensor, offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk_cells, dv_cells."""
    du, q, k_cells, v_cells = (dense_heads(x) for x in (du, q, k_cells, v_cells))
    (B, T, H, D), (_, G, N, cell_size, _), K = q.shape, k_cells.shape, picks.shape[3]
    R = H // G
    delta = row_dot(u, du)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_cells, v_cells))
    chunks = head_chunks(B * G, T * R * K, D, q.element_size())
    part, _ = empty_parts(q, len(chunks[0]), R, K)
    du_strides = (0, du.stride(0), R * du.stride(2), du.stride(1), du.stride(2))
    for heads in chunks:
        read_backward(
            q, k_cells, v_cells, k_cells.stride()[:4], v_cells.stride()[:4], du, du_strides, lse, delta, order, count,
            offset, part, dk, dv, dk.stride()[:4], G, K, cell_size, heads,
        )  # fmt: skip
        sum_slots(part, picks, dq, G, heads)
    return dq, dk, dv


@_read_cells_backward.register_fake
def _(du, q, k_cells, v_cells, u, lse, picks, order, count, offset):
    return tuple(x.new_empty(x.shape) for x in (q, k_cells, v_cells))


def _keep_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)


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
    return _choose(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, False, False).picks


@_choose_cells.register_fake
def _(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent):
    return q.new_empty((*q.shape[:3], top_k), dtype=torch.int32)


def _choose(
    q: Tensor, k_cells: Tensor, index: Tensor | None, sigma: Tensor, lam: Tensor, query_start: int, query_block: int,
    top_k: int, retain: int | None, recent: int, pairs: bool, deterministic: bool,
) -> Choice:  # fmt: skip
    B, G, N, cell_size, _ = k_cells.shape
    summaries = empty_summaries(k_cells, B * G, N)
    if N > 0:
        prepare(q, k_cells, k_cells.stride()[:4], N * cell_size, N, G, cell_size, summaries=summaries,
                heads=range(B * G))  # fmt: skip
    return select(
        q, *summaries, index, G, sigma, lam, query_start=query_start, query_block=query_block, cell_size=cell_size,
        top_k=top_k, retain=retain, recent=recent, pairs=pairs, deterministic=deterministic,
    )  # fmt: skip


def _empty_rotated(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Room for rotated q and k of a chunk of heads, [heads, R, T, D] and [heads, T, D]."""
    (_, T, H, D), G = q.shape, k.shape[2]
    empty = torch.empty(heads, H // G + 1, T, D, dtype=q.dtype, device=q.device)
    return empty.flatten()[: heads * (H // G) * T * D], empty.flatten()[heads * (H // G) * T * D :]


def _fake_choice(q: Tensor, BG: int, N: int, pairs: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    integers = {"dtype": torch.int32}
    return (
        q.new_empty((*q.shape[:3], top_k), **integers),
        q.new_empty((BG, order_capacity(pairs, N)), **integers),
        q.new_empty((BG, N), **integers),
        q.new_empty((BG, N), **integers),
    )


# Entries with checked arguments, for freesolo.py and cells.py


def _fp32_per_head(value: float | Tensor, H: int, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device).expand(H).contiguous()


def triton_freesolo(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, rope_cos: Tensor, rope_sin: Tensor, *,
    window: int, cell_size: int, query_block: int, top_k: int, sigma: float | Tensor, lam: float | Tensor,
    retain: int | None, recent: int, eps: float, deterministic: bool,
) -> Tensor:  # fmt: skip
    """`freesolo_attention` of freesolo.py on the GPU."""
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, alpha, gain))
    return _freesolo(
        q, k, v, alpha.contiguous(), gain.contiguous(), rope_cos.contiguous(), rope_sin.contiguous(), sigma, lam,
        window, cell_size, query_block, top_k, retain, recent, eps, deterministic, keep,
    )[0]  # fmt: skip


def triton_read_cells(
    q: Tensor, k_cells: Tensor, v_cells: Tensor, cell_index: Tensor | None, *, query_start: int, query_block: int,
    top_k: int, sigma: float | Tensor, lam: float | Tensor, retain: int | None, recent: int, deterministic: bool,
) -> Tensor:  # fmt: skip
    """`read_cells` of cells.py on the GPU; cell_index None is 0 .. N-1."""
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    index = None if cell_index is None else cell_index.int().contiguous()
    return _read_cells(
        q, k_cells, v_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent, deterministic
    )[0]


def triton_choose_cells(
    q: Tensor, k_cells: Tensor, cell_index: Tensor | None, *, query_start: int, query_block: int, top_k: int,
    sigma: float | Tensor, lam: float | Tensor, retain: int | None, recent: int,
) -> Tensor:  # fmt: skip
    """`choose_cells` of cells.py on the GPU: global indices, int32 [B, T, H, K]."""
    sigma, lam = (_fp32_per_head(x, q.shape[2], q.device) for x in (sigma, lam))
    index = None if cell_index is None else cell_index.int().contiguous()
    columns = _choose_cells(q, k_cells, index, sigma, lam, query_start, query_block, top_k, retain, recent)
    if index is None:
        return columns
    B, T, H, K = columns.shape
    G = k_cells.shape[1]
    at = columns.view(B, T, G, -1).clamp(min=0).long().transpose(1, 2).flatten(2)  # [B, G, T * R * K]
    chosen = index.view(B, G, -1).gather(-1, at).view(B, G, T, -1).transpose(1, 2).reshape(B, T, H, K)
    return chosen.where(columns >= 0, -1)
