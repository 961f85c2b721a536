"""Causal attention of some queries over all keys: the operator under L2A, and its parts for context parallelism.

`sparse_query_attention` is the whole operator. `sparse_query_rows` attends from any rows to a piece of the keys and
says how much weight it saw, and `merge_partial_results` joins what the pieces gave.

Shapes: B batch, T tokens, N query rows, S keys, H query heads, G key/value heads, R = H / G, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention import check_heads, check_scale, compute_dtype, group_heads, recompute, ungroup_heads
from kernels.triton_sparse_query import triton_rows_attention
from kernels.triton_tools import use_triton

_BLOCK = 128  # rows computed at a time


def sparse_query_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor | None,
    *,
    scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Exact causal attention of the active queries over all keys up to their own; exact zeros elsewhere.

    Inactive queries receive no gradient and cause none; k and v receive it from the active rows only. Softmax runs in
    fp32, for fp64 inputs in fp64.

    Args:
        q: [B, T, H, D], any float dtype, already rotated.
        k, v: [B, T, G, D], H a multiple of G.
        active: bool [B, T]; None says, without a look at the device, that every query is active: on a GPU that is
            SDPA's fastest backend where it serves (auto, bf16 or fp16, no cu_seqlens, not deterministic).
        scale: factor on the logits, above 0, default 1/sqrt(D).
        backend: "auto", "reference" or "triton".
        cu_seqlens: int32 [n + 1], where documents begin in the B * T tokens of the flattened batch, from 0 to B * T;
            attention stays inside a document. A batch row always begins one. Default: one document a row.
        deterministic: same gradient bits in every run; None follows `torch.are_deterministic_algorithms_enabled`.
            The reference always is; Triton then computes logits twice in the backward pass.

    Returns:
        [B, T, H, D] in the dtype of `q`.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown or unavailable backend.
    """
    on_gpu = use_triton("sparse_query_attention", backend, q, k, v)
    _check_tokens(q, k, v, active, cu_seqlens)
    (B, T, H, D), device = q.shape, q.device
    scale = check_scale(scale, D)
    starts = None if cu_seqlens is None else document_starts(cu_seqlens, B, T)
    if on_gpu and q.numel():
        exact = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        serves = active is None and starts is None and q.is_cuda and q.dtype != torch.float32
        if serves and backend == "auto" and not exact:
            return _dense(q, k, v, scale)
        return triton_rows_attention(
            q, k, v, active=active, first_key=starts, scale=scale, deterministic=deterministic
        )[0]
    if active is None:
        active = torch.ones(B, T, dtype=torch.bool, device=device)
    # the active tokens of each row in order, then any others as padding
    most = int(active.sum(1).max()) if active.numel() else 0
    tokens = (~active).sort(dim=1, stable=True).indices[:, :most]  # [B, N]
    positions = tokens.where(active.gather(1, tokens), -1)
    at = tokens[..., None, None].expand(-1, -1, H, D)
    starts = None if starts is None else starts.gather(1, tokens)
    rows, _ = _reference_rows(q.gather(1, at), positions, k, v, 0, starts, scale)
    return torch.zeros_like(q).scatter(1, at, rows)


def sparse_query_rows(
    q_rows: Tensor,
    positions: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_start: int = 0,
    document_start: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from query rows at any positions to a piece of the keys.

    A row at position p sees the keys at positions max(document_start, key_start) .. p that the piece holds.
    Gradients reach q, k and v through both results, so that pieces may be merged.

    Args:
        q_rows: [B, N, H, D], any float dtype, already rotated.
        positions: int [B, N], in any order and with repetitions; -1 marks a row that is padding.
        k, v: [B, S, G, D], the keys at positions key_start .. key_start + S - 1.
        key_start: position of key 0.
        document_start: int [B, N], position of the first key that each row may see; default 0.
        scale: factor on the logits, above 0, default 1/sqrt(D).
        backend: "auto", "reference" or "triton". Triton is fastest when positions ascend, padding anywhere.
        deterministic: same gradient bits in every run; None follows `torch.are_deterministic_algorithms_enabled`.
            The reference always is; Triton then computes logits twice in the backward pass.

    Returns:
        out: [B, N, H, D] in the dtype of `q_rows`; exact zeros where a row sees no key of the piece.
        lse: log-sum-exp of the row's logits, [B, N, H], fp32 (fp64 for fp64 inputs); -inf where it sees none.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown or unavailable backend.
    """
    on_gpu = use_triton("sparse_query_rows", backend, q_rows, k, v)
    check_heads(q_rows, k, v)
    _check_integers("positions", positions, q_rows.shape[:2])
    if document_start is not None:
        _check_integers("document_start", document_start, q_rows.shape[:2])
    scale = check_scale(scale, q_rows.shape[3])
    if on_gpu and q_rows.numel() and k.shape[1]:
        # without a list of the rows that stand somewhere, every tile of keys would walk the padding in between
        return triton_rows_attention(
            q_rows, k, v, active=positions >= 0, positions=positions, first_key=document_start, key_start=key_start,
            scale=scale, deterministic=deterministic,
        )  # fmt: skip
    return _reference_rows(q_rows, positions, k, v, key_start, document_start, scale)


def merge_partial_results(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention of the same rows to disjoint pieces of keys: a softmax over softmaxes.

    Any gap between the pieces is safe, 200 and more included, and so are pieces of which a row saw nothing (-inf).

    Args:
        outs: each [..., D], what `sparse_query_rows` returned for a piece.
        lses: each [...], its log-sum-exp.

    Returns:
        out: [..., D] in the dtype of `outs[0]`; zero where no piece had a key.
        lse: [...] in the dtype of `lses[0]`, -inf there.

    Raises:
        ValueError: no piece, or not one lse for each out.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merging needs one lse for each out and at least one, got {len(outs)} and {len(lses)}")
    lse = torch.stack(lses)
    peak = lse.detach().amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0)  # -inf - -inf would be NaN
    weights = (lse - peak).exp()
    total = weights.sum(0)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    out = sum(o.to(total.dtype) * (w / total)[..., None] for o, w in zip(outs, weights, strict=True))
    return out.to(outs[0].dtype), (peak + total.log()).masked_fill(nothing, -torch.inf)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Every query of whole sequences: SDPA's backends, the fastest on Hopper first; all of them are exact."""
    fastest_first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(fastest_first, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def document_starts(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """int32 [B, T]: where the document of each token begins in its batch row; see `sparse_query_attention`."""
    index = torch.arange(batch * tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, index, right=True) - 1].view(batch, tokens)
    return (starts - index.view(batch, tokens)[:, :1]).clamp_min(0).int()


def _reference_rows(
    q: Tensor, positions: Tensor, k: Tensor, v: Tensor, key_start: int, document_start: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`sparse_query_rows` on checked arguments; each block of rows is computed again in the backward pass."""
    B, N, H, D = q.shape
    dtype = compute_dtype(q)
    if N == 0 or k.shape[1] == 0:
        nothing = sum(x[:, :0].sum(dtype=dtype) for x in (q, k, v))  # keeps the graph whole
        return (torch.zeros_like(q) + nothing).to(q.dtype), q.new_full((B, N, H), -torch.inf, dtype=dtype) + nothing
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    oldest = torch.zeros_like(positions) if document_start is None else document_start
    outs, lses = [], []
    for start in range(0, N, _BLOCK):
        near = slice(start, start + _BLOCK)
        newest = positions[:, near] - key_start
        stop = max(1, min(k.shape[2], int(newest.max()) + 1))
        bounds = oldest[:, near] - key_start, newest
        queries = group_heads(q[:, near], k.shape[1])
        out, lse = recompute(_attend, queries, k[:, :, :stop], v[:, :, :stop], *bounds, scale)
        outs.append(ungroup_heads(out))
        lses.append(ungroup_heads(lse))
    return torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 1).squeeze(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, oldest: Tensor, newest: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, G, R, T, D], k and v [B, G, M, D], bounds [B, T] as key indices -> out, lse [B, G, R, T, 1]."""
    B, G, R, T, D = q.shape
    M, dtype = k.shape[2], compute_dtype(q)
    keys = torch.arange(M, device=q.device)
    visible = ((keys >= oldest[..., None]) & (keys <= newest[..., None]))[:, None, None]  # [B, 1, 1, T, M]
    rows = (q.to(dtype) * scale).reshape(B, G, R * T, D)
    logits = (rows @ k.to(dtype).mT).view(B, G, R, T, M)
    # the lowest finite number, not -inf: a row that sees nothing must stay free of NaN
    logits = logits.masked_fill(~visible, torch.finfo(dtype).min)
    lse = logits.logsumexp(-1, keepdim=True)
    weights = (logits - lse).exp()
    out = (weights.view(B, G, R * T, M) @ v.to(dtype)).view(B, G, R, T, D)
    blind = ~visible.any(-1, keepdim=True)
    return out.masked_fill(blind, 0), lse.masked_fill(blind, -torch.inf)


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, active: Tensor | None, cu_seqlens: Tensor | None) -> None:
    check_heads(q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens but k has {k.shape[1]}; a query attends to its own sequence")
    if active is not None and (active.dtype != torch.bool or active.shape != q.shape[:2]):
        raise ValueError(f"active must be bool {list(q.shape[:2])}, got {active.dtype} {list(active.shape)}")
    if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2):
        raise ValueError(f"cu_seqlens must be int32 [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")


def _check_integers(name: str, x: Tensor, shape: torch.Size) -> None:
    if x.dtype not in (torch.int32, torch.int64) or x.shape != shape:
        raise ValueError(f"{name} must be int32 or int64 {list(shape)}, got {x.dtype} {list(x.shape)}")
