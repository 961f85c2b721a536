"""Every collective of Longpitch, differentiable where a gradient must travel back, and the ledger of their bytes.

A `group` of None, or of one rank, makes each of them the identity. Bytes are counted per rank as the size of what the
rank receives from others, under the name that the caller gives the traffic ("window", "cells", "loss", ...).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
MAX = dist.ReduceOp.MAX

ledger: Counter[str] = Counter()  # bytes received by this rank, by kind of traffic
doing = {"collective": ""}  # the kind of traffic that this rank entered last, for whoever says where it hangs


def _count(kind: str, size: int) -> None:
    ledger[kind] += size
    doing["collective"] = kind


def group_size(group: Group) -> int:
    """Number of ranks in `group`; 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank's place in `group`; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def barrier() -> None:
    """Wait for every rank of the world."""
    dist.barrier()


def world_group() -> Group:
    """The group of all ranks."""
    return dist.group.WORLD


def joined(group: object) -> dist.ProcessGroup:
    """A group that this rank is in, as what it then is: torch declares besides what other ranks get in its place."""
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather_objects(x: Any, kind: str = "checkpoint") -> list:
    """`x` of every rank of the world, in their order, on every rank; anything small that can be pickled."""
    doing["collective"] = kind
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x)
    return everyone


def from_rank_0(x: Any) -> Any:
    """What rank 0 of the world has given as `x`; anything small that can be pickled."""
    doing["collective"] = "checkpoint"
    values = [x]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.new_empty(group_size(group), *x.shape)
    dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
        ctx.group, ctx.kind = group, kind
        _count(kind, x.numel() * x.element_size() * (group_size(group) - 1))
        return _gather(x, group)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor):
        # Every rank used every rank's x, so x's gradient is the sum of what all of them hold for it. Half-precision
        # partial gradients are summed in fp32: eight roundings to bf16 would be worth more than the bytes saved.
        wide = d_out.float() if d_out.dtype in (torch.bfloat16, torch.float16) else d_out
        _count(ctx.kind, wide[0].numel() * wide.element_size() * (group_size(ctx.group) - 1))
        if dist.get_backend(ctx.group) == "gloo":  # has no reduce-scatter for every dtype
            wide = wide.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(wide, group=ctx.group)
            return wide[group_rank(ctx.group)].to(d_out.dtype), None, None
        dx = torch.empty_like(wide[0])
        dist.reduce_scatter_tensor(dx.view(-1), wide.contiguous().view(-1), group=ctx.group)
        return dx.to(d_out.dtype), None, None


def all_gather(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """Stack `x` of every rank, in rank order: [...] -> [ranks, ...]; the backward sums and scatters.

    A caller that needs only some ranks' part must still let its result depend on the whole (an empty slice will do),
    or its backward skips a collective in which the others wait.
    """
    if group_size(group) == 1:
        return x.unsqueeze(0)
    return _AllGather.apply(x, group, kind)


def all_gather_constant(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """`all_gather` of what has no gradient (indices)."""
    if group_size(group) == 1:
        return x.unsqueeze(0)
    _count(kind, x.numel() * x.element_size() * (group_size(group) - 1))
    return _gather(x, group)


class _Flight:
    """A gather that is under way, and in the backward the sum of its gradients that is."""

    work: dist.Work | None = None
    gradient: torch.Tensor | None = None

    def land(self) -> torch.Tensor | None:
        """Wait; returns the sum of gradients and keeps nothing.

        NCCL's work holds what was gathered, and that holds the graph, and that this flight: kept, the circle would
        keep the whole layer in memory for good, where Python's garbage collector cannot see it.
        """
        assert self.work is not None
        self.work.wait()
        gradient, self.work, self.gradient = self.gradient, None, None
        return gradient


class _StartGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group, kind: str, flight: _Flight) -> torch.Tensor:
        ctx.flight, ctx.dtype = flight, x.dtype
        _count(kind, x.numel() * x.element_size() * (group_size(group) - 1))
        out = x.new_empty(group_size(group), *x.shape)
        flight.work = dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group, async_op=True)
        return out

    @staticmethod
    def backward(ctx, _d_out: torch.Tensor):
        gradient = ctx.flight.land()
        return gradient.to(ctx.dtype), None, None, None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gathered: torch.Tensor, group: Group, kind: str, flight: _Flight) -> torch.Tensor:
        ctx.group, ctx.kind, ctx.flight = group, kind, flight
        flight.land()
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor):
        flight, group = ctx.flight, ctx.group
        wide = d_out.float() if d_out.dtype in (torch.bfloat16, torch.float16) else d_out  # see _AllGather
        _count(ctx.kind, wide[0].numel() * wide.element_size() * (group_size(group) - 1))
        if dist.get_backend(group) == "gloo":
            wide = wide.clone(memory_format=torch.contiguous_format)
            flight.gradient = wide[group_rank(group)]
            flight.work = dist.all_reduce(wide, group=group, async_op=True)
        else:
            flight.gradient = torch.empty_like(wide[0])
            flight.work = dist.reduce_scatter_tensor(
                flight.gradient.view(-1), wide.contiguous().view(-1), group=group, async_op=True
            )
        return d_out, None, None, None


def start_gather(x: torch.Tensor, group: Group, kind: str) -> Callable[[], torch.Tensor]:
    """`all_gather` that goes on while the caller computes; call what it returns to have the result.

    The backward is as patient: the summing of gradients starts where the result was taken, and is waited for where the
    gather was started. So start the next one before you use the last.
    """
    if group_size(group) == 1:
        return lambda: x.unsqueeze(0)
    flight = _Flight()
    gathered = _StartGather.apply(x, group, kind, flight)
    return lambda: _FinishGather.apply(gathered, group, kind, flight)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
        ctx.group, ctx.kind = group, kind
        return _exchange(x, group, kind)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor):
        return _exchange(d_out, ctx.group, ctx.kind), None, None


def _exchange(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    _count(kind, x[0].numel() * x.element_size() * (group_size(group) - 1))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def all_to_all(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """Part r of `x` [ranks, ...] goes to rank r; part r of the result came from rank r. The backward sends back."""
    return x if group_size(group) == 1 else _AllToAll.apply(x, group, kind)


def all_reduce(
    x: torch.Tensor, group: Group, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Sum (or `op`) of `x` over the ranks, in place, without a gradient; returns `x`."""
    if group_size(group) > 1:
        _count(kind, x.numel() * x.element_size())
        dist.all_reduce(x, op=op, group=group)
    return x
