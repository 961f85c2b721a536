"""What the torch references share: masked attention over grouped heads, recomputation, and the argument checks.

Shapes: B batch, T queries, M keys, H query heads, G key/value heads, R = H / G, D head dim.
Query head h reads key/value head h // R, so grouped queries are [B, G, R, T, D] and keys are never repeated.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_Result = TypeVar("_Result")

BACKENDS = ("auto", "reference", "triton")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which `x` is computed with: fp64 stays, everything else is fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def group_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, T, H, D] -> [B, G, R, T, D], a view."""
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def ungroup_heads(x: Tensor) -> Tensor:
    """[B, G, R, T, D] -> [B, T, H, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax attention over the visible keys.

    Args:
        q: grouped queries [B, G, R, T, D], any float dtype.
        k, v: keys and values [B, G, M, D].
        visible: bool, broadcastable to [B, G, R, T, M].
        scale: factor on the logits.

    Returns:
        [B, G, R, T, D] in `compute_dtype(q)`. A row that sees nothing is exactly zero and passes no gradient.
    """
    B, G, R, T, D = q.shape
    M, dtype = k.shape[2], compute_dtype(q)
    rows = (q.to(dtype) * scale).reshape(B, G, R * T, D)
    logits = (rows @ k.to(dtype).mT).view(B, G, R, T, M)
    # the lowest finite number, not -inf: softmax of a row that sees nothing must stay free of NaN
    weights = logits.masked_fill(~visible, torch.finfo(dtype).min).softmax(-1)
    out = (weights.view(B, G, R * T, M) @ v.to(dtype)).view(B, G, R, T, D)
    return out.masked_fill(~visible.any(-1, keepdim=True), 0)


def recompute(function: Callable[..., _Result], *args) -> _Result:
    """`function(*args)`, keeping only `args` for the backward pass, which runs it again."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def check_backend(operator: str, backend: str) -> None:
    """Raise ValueError unless the reference, the only backend of `operator`, may serve `backend`."""
    if backend not in BACKENDS:
        raise ValueError(f"{operator}: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        raise ValueError(f"{operator} has only the reference backend so far, so backend='triton' cannot be served")


def check_heads(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Raise ValueError unless q [B, T, H, D] can attend to k (and v) [B, M, G, D] with H a multiple of G."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be [batch, tokens, heads, head_dim], got {list(q.shape)} and {list(k.shape)}")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} must agree in batch and head dim")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the logits, 1/sqrt(head_dim) by default; raise ValueError unless it is above 0."""
    scale = head_dim**-0.5 if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    return scale
