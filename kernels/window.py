"""Causal attention to the last `window` tokens: FreeSolo's local branch, L2A's local attention and the dense baseline.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key/value heads, D head dim.
"""

import torch
from torch import Tensor

from kernels.attention import check_heads, check_scale, group_heads, masked_attention, recompute, ungroup_heads
from kernels.triton_sparse_query import triton_rows_attention
from kernels.triton_tools import use_triton

_BLOCK = 128  # queries computed at a time


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    query_offset: int = 0,
    first_key: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """Attend from each query to its own token and the `window` tokens before it.

    Query row i stands at key position p = query_offset + i and sees keys max(first_key, p - window) .. p.
    With FreeSolo's w = 512 that is 513 tokens (arXiv 2610.17191, local branch). Softmax runs in fp32, for fp64 inputs
    in fp64; queries are taken in blocks that the backward pass recomputes, so memory grows with the window, not Tk.

    Args:
        q: [B, Tq, H, D], any float dtype, already rotated.
        k, v: [B, Tk, G, D], H a multiple of G, Tk >= query_offset + Tq.
        window: tokens visible before the query's own; None is dense causal attention.
        query_offset: key position of query row 0.
        first_key: int [B, Tq], the first key each query may see (where its document starts); default 0.
            A query that may see nothing yields exact zeros.
        scale: factor on the logits, above 0, default 1/sqrt(D).
        backend: "auto", "reference" or "triton".
        deterministic: same gradient bits in every run; None follows `torch.are_deterministic_algorithms_enabled`.
            The reference always is; Triton then computes logits twice in the backward pass.

    Returns:
        [B, Tq, H, D] in the dtype of `q`.

    Raises:
        ValueError: shapes that do not fit, a negative window or offset, an unknown or unavailable backend.
    """
    on_gpu = use_triton("sliding_window_attention", backend, q, k, v)
    check_heads(q, k, v)
    B, Tq, _, D = q.shape
    if window is not None and window < 0:
        raise ValueError(f"window must be None or at least 0, got {window}")
    if query_offset < 0 or query_offset + Tq > k.shape[1]:
        raise ValueError(f"queries at {query_offset} .. {query_offset + Tq - 1} need keys there, got {k.shape[1]} keys")
    if first_key is not None and first_key.shape != (B, Tq):
        raise ValueError(f"first_key must be {[B, Tq]}, got {list(first_key.shape)}")

    scale = check_scale(scale, D)
    if on_gpu and q.numel():
        return triton_rows_attention(
            q, k, v, first_key=first_key, window=window, query_offset=query_offset, scale=scale,
            deterministic=deterministic,
        )[0]  # fmt: skip
    return _reference(q, k, v, window, query_offset, first_key, scale)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, query_offset: int, first_key: Tensor | None, scale: float
) -> Tensor:
    """The definition, in blocks of queries."""
    Tq = q.shape[1]
    newest = torch.arange(query_offset, query_offset + Tq, device=q.device)[None]  # [1, Tq]
    oldest = torch.zeros_like(newest) if window is None else newest - window
    if first_key is not None:
        oldest = oldest.maximum(first_key)
    # whole chunks of keys are joined per block: unlike a slice, their gradient never takes a tensor of Tk rows
    k_chunks, v_chunks = (x.transpose(1, 2).split(_BLOCK, dim=2) for x in (k, v))
    out = []
    for start, queries in zip(range(0, Tq, _BLOCK), group_heads(q, k.shape[2]).split(_BLOCK, dim=3), strict=True):
        stop = start + queries.shape[3]
        reach = 0 if window is None else max(0, query_offset + start - window)
        first, last = reach // _BLOCK, (query_offset + stop - 1) // _BLOCK
        near = slice(first, last + 1)
        bounds = oldest[:, start:stop], newest[:, start:stop]
        out.append(recompute(_attend, queries, k_chunks[near], v_chunks[near], first * _BLOCK, *bounds, scale))
    return ungroup_heads(torch.cat(out, dim=3)).to(q.dtype)


def _attend(
    q: Tensor,
    k_chunks: tuple[Tensor, ...],
    v_chunks: tuple[Tensor, ...],
    key_start: int,
    oldest: Tensor,
    newest: Tensor,
    scale: float,
) -> Tensor:
    """One block of queries [B, G, R, T, D]; the chunks [B, G, S, D] follow each other from `key_start` on."""
    k, v = torch.cat(k_chunks, dim=2), torch.cat(v_chunks, dim=2)
    keys = torch.arange(key_start, key_start + k.shape[2], device=q.device)
    visible = (keys >= oldest[..., None]) & (keys <= newest[..., None])  # [1 or B, T, M]
    return masked_attention(q, k, v, visible[:, None, None], scale)
