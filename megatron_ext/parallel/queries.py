"""Attention to the whole sequence under context parallelism: queries are dealt out so that every rank works alike.

A query costs its position + 1, so the last slice of a causal sequence is the dearest and some gates are open more often
than others. Keys and values go to every rank, in groups of heads, each on its way while the last is computed with.
Queries go to where there is time: each rank lines up its active ones and deals them out back and forth (0 1 2 3,
3 2 1 0, ...), which gives every rank the same work but for about one query of each slice. What they attend to comes
back the same way. How many are active is known to the device only, so what travels has room for all of them.

Shapes: B batch, T tokens of this slice, H query heads, G key/value heads, D head dim, C places on each rank.
"""

import torch
from torch import Tensor

from kernels.sparse_query import sparse_query_attention, sparse_query_rows
from megatron_ext.parallel.collectives import Group, all_to_all, group_rank, group_size, start_gather

_PIECES = 4  # groups of key/value heads at most: more overlap less and less, and each is another set of kernels


class _TakeRows(torch.autograd.Function):
    """x[index], zeros at -1, where `inverse` is the way back: both directions read, and none adds up."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.shape = x.shape
        return _take(x, index)

    @staticmethod
    def backward(ctx, d_out: Tensor):
        _, inverse = ctx.saved_tensors
        return _take(d_out.reshape(-1, *ctx.shape[1:]), inverse).view(ctx.shape), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [N, ...] at `index` of any shape; -1 gives zeros."""
    rows = x.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *x.shape[1:])
    return rows.masked_fill_(index.view(*index.shape, *[1] * (x.dim() - 1)) < 0, 0)


def deal_queries(
    active: Tensor | None, *, batch: int, length: int, rank: int, ranks: int, device: torch.device
) -> Tensor:
    """int64 [ranks, B, C]: the tokens of this slice that each rank attends for, in order, -1 where a place is free.

    Args:
        active: bool [B, T]; None for all.
        length: T. rank: whose slice it is; the first card goes to this rank, so that leftovers spread.
    """
    tokens = torch.arange(length, device=device).expand(batch, length)
    if active is not None:
        order = (~active).sort(dim=1, stable=True).indices
        tokens = order.where(active.gather(1, order), -1)
    places = (length + ranks - 1) // ranks
    tokens = torch.nn.functional.pad(tokens, (0, places * ranks - length), value=-1).view(batch, places, ranks)
    forth = (torch.arange(ranks, device=device) - rank) % ranks  # which card of a round rank r gets
    forward_round = torch.arange(places, device=device)[:, None] % 2 == 0
    card = forth.where(forward_round, ranks - 1 - forth)  # [C, ranks]
    return tokens.gather(2, card.expand(batch, places, ranks)).permute(2, 0, 1)


def _way_back(dealt: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Indices into the flattened slice for each place [ranks, B, C], and into the flattened places for each token."""
    batch = dealt.shape[1]
    row = torch.arange(batch, device=dealt.device)[:, None] * length
    index = (dealt + row).where(dealt >= 0, -1)
    home = torch.full((batch * length + 1,), -1, device=dealt.device)
    slots = torch.arange(dealt.numel(), device=dealt.device)
    home.scatter_(0, index.where(index >= 0, batch * length).flatten(), slots)  # the last one takes the free places
    return index, home[:-1].view(batch, length)


def balanced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor | None,
    *,
    start: int,
    first_key: Tensor | None,
    group: Group,
    backend: str,
) -> Tensor:
    """Causal attention of this slice's active queries over the whole sequence; exact zeros for the others.

    Args:
        q: this rank's rotated queries [B, T, H, D]. k, v: its rotated keys and values [B, T, G, D].
        active: bool [B, T]; None for all queries.
        start: global position of the slice's first token.
        first_key: int64 [B, T], first global position that each query may see; None for the sequence's start.
        group: the context-parallel group, or None.
        backend: of the kernel.

    Returns:
        [B, T, H, D] in the dtype of `q`.
    """
    ranks, (B, T) = group_size(group), q.shape[:2]
    if ranks == 1 and first_key is None:
        return sparse_query_attention(q, k, v, active, backend=backend)
    dealt = deal_queries(active, batch=B, length=T, rank=group_rank(group), ranks=ranks, device=q.device)
    index, home = _way_back(dealt, T)
    positions = (dealt + start).where(dealt >= 0, -1)
    where = positions if first_key is None else torch.stack((positions, _take(first_key.flatten(), index)), dim=-1)
    where = _joined(all_to_all(where, group, "queries"))  # [B, N] or [B, N, 2]
    positions, first_key = (where, None) if first_key is None else where.unbind(-1)
    rows = all_to_all(_TakeRows.apply(q.flatten(0, 1), index, home), group, "queries")
    out = _attend(_joined(rows), positions, first_key, k, v, group, backend)  # [B, N, H, D]
    out = all_to_all(out.unflatten(1, (ranks, -1)).transpose(0, 1), group, "queries")
    return _TakeRows.apply(out.flatten(0, 2), home, index)


def _joined(x: Tensor) -> Tensor:
    """[ranks, B, C, ...] -> [B, ranks * C, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _attend(
    rows: Tensor, positions: Tensor, first_key: Tensor | None, k: Tensor, v: Tensor, group: Group, backend: str
) -> Tensor:
    """Attention of rows [B, N, H, D] over every rank's keys, a few kv heads at a time."""
    num_kv_heads = k.shape[2]
    pieces = max(n for n in range(1, _PIECES + 1) if num_kv_heads % n == 0)
    queries = rows.chunk(pieces, dim=2)
    keys, values = k.chunk(pieces, dim=2), v.chunk(pieces, dim=2)
    gathers = [[start_gather(x, group, "keys") for x in (keys[0], values[0])]]
    out = []
    for number in range(pieces):
        if number + 1 < pieces:
            gathers.append([start_gather(x, group, "keys") for x in (keys[number + 1], values[number + 1])])
        k_all, v_all = (_joined(finish()) for finish in gathers[number])
        out.append(
            sparse_query_rows(
                queries[number], positions, k_all, v_all, document_start=first_key, backend=backend
            )[0]
        )  # fmt: skip
    return torch.cat(out, dim=2)
