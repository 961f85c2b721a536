"""Sparse-query attention on the GPU: active queries are listed there, without the host knowing how many, and attended.

The operators behind it serve rows at given positions and sliding windows as well. Each is a torch custom operator.

Shapes: B batch, N query rows (T tokens in the whole operator), S keys, H query heads, G key/value heads, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_rows import Rows, rows_backward, rows_forward
from kernels.triton_tools import cdiv, check_head_dim, dense_heads

_CHUNK = 1024  # tokens listed by one program


@triton.jit
def _list_kernel(active_ptr, tokens_ptr, counts_ptr, T, C: tl.constexpr, WIDE: tl.constexpr):
    """tokens[b] = the active tokens of row b in order, counts[b] = how many there are."""
    start, b = tl.program_id(0) * C, tl.program_id(1)
    active_ptr += b.to(tl.int64) * T
    counted = tl.zeros([WIDE], tl.int32)
    for n in range(0, start, WIDE):  # every program counts what comes before: reading bytes is cheaper than a launch
        t = n + tl.arange(0, WIDE)
        counted += tl.load(active_ptr + t, mask=t < start, other=0).to(tl.int32)
    t = start + tl.arange(0, C)
    active = tl.load(active_ptr + t, mask=t < T, other=0).to(tl.int32)
    rank = tl.sum(counted) + tl.cumsum(active)
    tl.store(tokens_ptr + b.to(tl.int64) * T + rank - 1, t, mask=active > 0)
    if start + C >= T:
        tl.store(counts_ptr + b, tl.sum(counted) + tl.sum(active))


def list_active(active: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, T] -> int32 tokens [B, T], of which the first counts [B] are written."""
    B, T = active.shape
    active = active.contiguous().view(torch.uint8)
    tokens = torch.empty(B, T, dtype=torch.int32, device=active.device)
    counts = torch.empty(B, dtype=torch.int32, device=active.device)
    _list_kernel[(cdiv(T, _CHUNK), B)](active, tokens, counts, T, C=_CHUNK, WIDE=8192)
    return tokens, counts


@torch.library.custom_op("longpitch::rows_attention", mutates_args=())
def _rows_attention(
    q: Tensor, k: Tensor, v: Tensor, active: Tensor | None, positions: Tensor | None, first_key: Tensor | None,
    window: int | None, query_offset: int, key_start: int, scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, N, H, D], lse [B, N, H], and where `active` is given the list that the backward pass reads."""
    tokens, counts = (None, None) if active is None else list_active(active)
    rows = Rows(tokens, counts, _plain(positions), _plain(first_key), window, query_offset, key_start)
    out, lse = rows_forward(dense_heads(q), k, v, rows, scale)
    nothing = torch.empty(0, dtype=torch.int32, device=q.device)
    return (out, lse, nothing, nothing.clone()) if tokens is None else (out, lse, tokens, counts)


@_rows_attention.register_fake
def _(q, k, v, active, positions, first_key, window, query_offset, key_start, scale, deterministic):
    counts = (0, 0) if active is None else (active.shape, active.shape[:1])
    return (
        q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32),
        *(q.new_empty(shape, dtype=torch.int32) for shape in counts),
    )  # fmt: skip


@torch.library.custom_op("longpitch::rows_attention_backward", mutates_args=())
def _rows_attention_backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    tokens: Tensor, counts: Tensor, positions: Tensor | None, first_key: Tensor | None,
    window: int | None, query_offset: int, key_start: int, scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    listed = (tokens, counts) if counts.numel() else (None, None)
    rows = Rows(*listed, _plain(positions), _plain(first_key), window, query_offset, key_start)
    d_lse = None if d_lse is None else d_lse.contiguous()
    return rows_backward(d_out, d_lse, dense_heads(q), k, v, out, lse, rows, scale, deterministic)


@_rows_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output):
    q, k, v, _, positions, first_key, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, positions, first_key)


def _backward(ctx, d_out, d_lse, *_):
    q, k, v, out, *kept = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    grads = _rows_attention_backward(d_out, d_lse, q, k, v, out, *kept, *ctx.options)
    return *grads, *(None,) * 8


_rows_attention.register_autograd(_backward, setup_context=_keep)


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def triton_rows_attention(
    q: Tensor, k: Tensor, v: Tensor, *, active: Tensor | None = None, positions: Tensor | None = None,
    first_key: Tensor | None = None, window: int | None = None, query_offset: int = 0, key_start: int = 0,
    scale: float, deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of rows to ranges of keys, on checked arguments; see `Rows` of triton_rows.py for the ranges.

    Returns:
        out [B, N, H, D], zero where `active` is False; lse [B, N, H], fp32, defined for the other rows only.

    Raises:
        ValueError: heads wider than the kernels take.
    """
    check_head_dim(q.shape[3])
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return _rows_attention(
        q, k, v, active, positions, first_key, window, query_offset, key_start, scale, deterministic
    )[:2]  # fmt: skip
