"""Tensor parallelism beside megatron-core's linear layers: ranks share a layer's heads and the loss's rows."""

import torch
from megatron.core import parallel_state

from megatron_ext.parallel.collectives import MAX, Group, all_reduce, group_size, joined


def tensor_parallel_group() -> Group:
    """The tensor-parallel group that megatron-core was initialized with."""
    return joined(parallel_state.get_tensor_model_parallel_group())


class _ReplicatedParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_out: torch.Tensor):
        return all_reduce(d_out.clone(), ctx.group, "tensor_parallel"), None


def replicated_parameter(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A parameter that tensor-parallel ranks hold whole but apply to their own heads: its gradients are summed."""
    return x if group_size(group) == 1 else _ReplicatedParameter.apply(x, group)


def vocabulary_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, first_row: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross entropy of whole vocabularies, of which each rank of `group` has the logits of some rows.

    Args:
        logits: [n, v], of the `v` rows from `first_row` on. labels: [n] int64, of the whole vocabulary.

    Returns:
        nll [n], probabilities [n, v] of this rank's rows, and where the labels lie in them: their places [n], and
        whether [n] they do.
    """
    rows = logits.shape[1]
    peak = all_reduce(logits.amax(dim=1), group, "loss", MAX)
    exp = (logits - peak[:, None]).exp_()
    total = all_reduce(exp.sum(dim=1), group, "loss")
    local = labels - first_row
    mine = (local >= 0) & (local < rows)
    local = local.clamp(0, rows - 1)
    target = logits.gather(1, local[:, None]).squeeze(1).masked_fill(~mine, 0.0)
    target = all_reduce(target, group, "loss")
    return total.log() + peak - target, exp.div_(total[:, None]), local, mine
