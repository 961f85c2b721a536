"""Weighted cross entropy straight from hidden states: logits exist for one chunk of tokens at a time.

A 128K-token sequence has 20 G logits over a vocabulary of 152K. Loss and gradients are computed chunk by chunk in the
forward (the weights of the tokens are known there), so the backward only scales them; the gradient of the output
weight is summed in fp32. The vocabulary may be cut over tensor-parallel ranks.
"""

import torch

from megatron_ext.parallel.collectives import Group, all_reduce, group_rank
from megatron_ext.parallel.tensor import vocabulary_cross_entropy


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, labels, token_weights, chunk: int, first_row: int, group: Group, grad_enabled: bool
    ):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # needs_input_grad says nothing of no_grad, and inside forward grad mode is always off
        with_grad = grad_enabled and any(ctx.needs_input_grad[:2])
        d_weight_wanted = with_grad and ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros_like(weight, dtype=wide) if d_weight_wanted else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for at in range(0, hidden.shape[0], chunk):
            h, y, w = (x[at : at + chunk] for x in (hidden, labels, token_weights))
            nll, d_logits, local, mine = vocabulary_cross_entropy((h @ weight.t()).to(wide), y, first_row, group)
            loss += (nll * w).sum()
            if d_hidden is not None:
                d_logits.scatter_add_(1, local[:, None], -mine[:, None].to(wide))
                d_logits = d_logits.mul_(w[:, None].to(wide)).to(hidden.dtype)
                d_hidden[at : at + chunk] = d_logits @ weight
                if d_weight is not None:
                    d_weight += (d_logits.t() @ h).to(wide)
        if d_hidden is not None:
            all_reduce(d_hidden, group, "loss")  # each rank has the part of its vocabulary rows
            ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        d_weight = None if d_weight is None else (d_weight * d_loss).to(ctx.weight_dtype)
        return (d_hidden * d_loss).to(d_hidden.dtype), d_weight, None, None, None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    *,
    chunk: int,
    first_row: int | None = None,
    tensor_group: Group = None,
) -> torch.Tensor:
    """sum over tokens of token_weight * -log softmax(hidden @ weight^T)[label].

    Args:
        hidden: [N, width]. weight: [V or this rank's V/tp rows, width], same dtype as hidden.
        labels: [N] int64 in [0, V). token_weights: [N]; 0 leaves a token out.
        chunk: tokens whose logits exist at a time.
        first_row: the label that this rank's first row stands for; None: all ranks hold equally many.
        tensor_group: the ranks that share the vocabulary, or None.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs).
    """
    grad_enabled = torch.is_grad_enabled()
    first_row = group_rank(tensor_group) * weight.shape[0] if first_row is None else first_row
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, token_weights, chunk, first_row, tensor_group, grad_enabled
    )
