"""The one layout of a sequence over context-parallel ranks: rank r holds the r-th contiguous slice."""

import torch
import torch.nn.functional as F


def padded_length(seq_length: int, ranks: int, query_block: int) -> int:
    """Tokens of a sequence once each of `ranks` slices is a whole number of query blocks.

    A single rank needs no padding: every operator takes any length.
    """
    if ranks == 1:
        return seq_length
    unit = ranks * query_block
    return (seq_length + unit - 1) // unit * unit


def own_slice(x: torch.Tensor, *, rank: int, ranks: int, query_block: int, fill: float = 0) -> torch.Tensor:
    """Slice `rank` of `x` [B, T, ...] along T, after padding T with `fill` (see `padded_length`)."""
    total = padded_length(x.shape[1], ranks, query_block)
    padding = [0, 0] * (x.dim() - 2) + [0, total - x.shape[1]]
    length = total // ranks
    return F.pad(x, padding, value=fill)[:, rank * length : (rank + 1) * length].contiguous()
