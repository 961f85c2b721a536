"""Rotation of queries or keys on the GPU: one pass over memory, forward and backward alike.

Shapes: B batch, T tokens, H heads, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_tools import cdiv, dense_heads, padded_dim, rotate_pair, token_strides


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, x_sb, x_st, x_sh, rope_sb, num_rows, T, H, sign,
    D: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # (b, t, h)
    lane = tl.arange(0, HP)
    here = (row < num_rows)[:, None] & (lane < HALF)[None, :]
    b, t, h = row // H // T, row // H % T, row % H
    angle = (b * rope_sb + t * HALF)[:, None] + lane[None, :]
    cos = tl.load(cos_ptr + angle, mask=here, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=here, other=0.0) * sign
    at = x_ptr + (b * x_sb + t * x_st + h * x_sh)[:, None] + lane[None, :]
    first = tl.load(at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    first, second = rotate_pair(first, second, cos, sin)
    at = out_ptr + row[:, None] * D + lane[None, :]
    tl.store(at, first.to(out_ptr.dtype.element_ty), mask=here)
    tl.store(at + HALF, second.to(out_ptr.dtype.element_ty), mask=here)


@torch.library.custom_op("longpitch::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x, (B, T, H, D) = dense_heads(x), x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rope_step = cos.stride(0) if cos.dim() == 3 else 0
    _rotate_kernel[(cdiv(B * T * H, 64),)](
        x, cos, sin, out, *token_strides(x), rope_step, B * T * H, T, H, sign, D=D, HP=padded_dim(D) // 2, ROWS=64
    )
    return out


@_rotate.register_fake
def _(x, cos, sin, sign):
    return x.new_empty(x.shape)


def _keep(ctx, inputs, output):
    _, cos, sin, ctx.sign = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    return _rotate(grad, *ctx.saved_tensors, -ctx.sign), None, None, None


_rotate.register_autograd(_backward, setup_context=_keep)


def triton_apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rope` of rope.py on checked arguments, on the GPU."""
    return _rotate(x, cos.contiguous(), sin.contiguous(), 1.0)
