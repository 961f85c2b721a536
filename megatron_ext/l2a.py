"""The L2A decoder layer (arXiv 2603.17484): a window for every token, and a look at everything for tokens that ask.

    h = x + O_l(window attention(LN(x)))
    z = LN_g(h),  d = gate(z)
    y = h + d * O_g(causal attention(z))
    out = y + MLP(LN_m(y))

The stock megatron-core layer gives the first and the last line; this module puts the others between them.
"""

from dataclasses import dataclass

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_ext.attention import ActiveQueries
from megatron_ext.router import Gates, leak_draw
from megatron_ext.sequence_context import SequenceContext


@dataclass(kw_only=True)
class L2ASubmodules(TransformerLayerSubmodules):
    """The stock layer's slots and those of the second look."""

    global_layernorm: ModuleSpec | type
    global_attention: ModuleSpec | None  # None: the local attention's q, k, v and o are used a second time
    gate: ModuleSpec


class _PenaltyGradient(torch.autograd.Function):
    """Lets `states` through; in the backward `penalty` gets the gradient `scale`, as if it were part of the loss."""

    @staticmethod
    def forward(ctx, states: Tensor, penalty: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, penalty.dtype
        return states.view_as(states)

    @staticmethod
    def backward(ctx, d_states: Tensor):
        return d_states, torch.full((), ctx.scale, dtype=ctx.dtype, device=d_states.device), None


class L2ALayer(TransformerLayer):
    """A decoder layer with a second, gated attention over the whole sequence.

    Parameters beside the stock layer's: `global_layernorm`, `global_attention` (absent when q, k, v and o are shared)
    and `router.weight` [1, hidden] (absent when the gate is context-free).
    """

    def __init__(self, config, submodules: L2ASubmodules, *args, leak_probability: float, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        self.leak_probability = leak_probability
        self.global_layernorm = build_module(
            submodules.global_layernorm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        if submodules.global_attention is not None:
            self.global_attention = build_module(
                submodules.global_attention,
                config=config,
                layer_number=self.layer_number,
                pg_collection=self.pg_collection,
            )
        self.router = build_module(submodules.gate, config)

    def _forward_attention(self, *args, packed_seq_params: SequenceContext, **kwargs):
        states, cross_attention_context = super()._forward_attention(
            *args, packed_seq_params=packed_seq_params, **kwargs
        )
        return self._look_back(states, packed_seq_params), cross_attention_context

    def _look_back(self, h: Tensor, context: SequenceContext) -> Tensor:
        """Add the global attention of open gates to h [T, B, hidden]."""
        z = self.global_layernorm(h)
        gates: Gates = self.router(z, context, self.layer_number)
        num_real = max(0, min(h.shape[0], context.length - context.start))
        leak = (
            self.training
            and torch.is_grad_enabled()
            and leak_draw(self.leak_probability, seed=context.seed, step=context.step, layer=self.layer_number)
        )
        attention = getattr(self, "global_attention", self.self_attention)
        active = ActiveQueries(None if leak else _without_padding(gates.is_open, num_real).t())
        out, bias = attention(z, attention_mask=active, packed_seq_params=context)
        assert bias is None  # a closed gate must add nothing
        y = h + gates.value[..., None].to(out.dtype) * out
        if context.measure:
            count = num_real * h.shape[1]
            context.record("open_fraction", self.layer_number, gates.is_open[:num_real].sum(dtype=torch.float64), count)
        return y if gates.probability is None else self._penalise(y, gates.probability[:num_real], context)

    def _penalise(self, y: Tensor, probability: Tensor, context: SequenceContext) -> Tensor:
        """Note the sum of p^2 over the slice's tokens, and let its gradient in at the scale that the engine has set."""
        penalty = probability.square().sum()
        context.penalties[self.layer_number] = penalty.detach()
        if context.penalty_scale == 0:
            return y
        return _PenaltyGradient.apply(y, penalty, context.penalty_scale)


def _without_padding(is_open: Tensor, num_real: int) -> Tensor:
    """Close the gates [T, B] of the tokens that only fill up the last slices."""
    if num_real == is_open.shape[0]:
        return is_open
    real = torch.arange(is_open.shape[0], device=is_open.device) < num_real
    return is_open & real[:, None]
