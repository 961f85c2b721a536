"""When L2A looks back: the learned gate of a layer, its context-free twin, and draws that every rank makes alike.

Shapes: T tokens of this rank's slice, B batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_ext.sequence_context import SequenceContext

_MASK = 2**64 - 1
_LEAK, _OPEN = 1, 2  # streams of draws that must not repeat each other


class Gates(NamedTuple):
    """What a gate decided for the tokens of a slice."""

    is_open: Tensor  # bool [T, B]
    value: Tensor  # [T, B] fp32 (fp64 in an fp64 model), exactly 1 or 0; its gradient is that of `probability`
    probability: Tensor | None  # p [T, B]; None when nothing is learned


class Router(nn.Module):
    """p = sigmoid(W z / temperature); the gate is open where p >= threshold and passes its gradient straight to p.

    `weight` [1, hidden] starts at zero, so every gate starts open at p = 0.5.
    """

    def __init__(self, config, *, temperature: float, threshold: float):
        super().__init__()
        self.temperature, self.threshold = temperature, threshold
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, z: Tensor, context: SequenceContext, layer: int) -> Gates:
        """Decide for normalised states z [T, B, hidden]."""
        wide = torch.promote_types(z.dtype, torch.float32)
        weight = self.weight.to(wide)
        if context.measure:  # here and not in the layer: under ZeRO-3 the weight is whole only while this module runs
            context.record("router_norm", layer, weight.detach().norm(dtype=torch.float64), 1)
        probability = ((z.to(wide) * weight).sum(dim=-1) / self.temperature).sigmoid()
        is_open = probability.detach() >= self.threshold
        # the difference is exactly zero, and so is what it adds to the value
        value = is_open.to(wide) + (probability - probability.detach())
        return Gates(is_open, value, probability)


class ContextFreeGate(nn.Module):
    """Opens each position with a fixed probability, whatever stands there: the control that shows what L2A learns."""

    def __init__(self, _config, *, open_probability: float):
        super().__init__()
        self.open_probability = open_probability

    def forward(self, z: Tensor, context: SequenceContext, layer: int) -> Gates:
        """Draw for the positions of z [T, B, hidden], counted from a document's start where documents are kept apart.

        All sequences of a step share the draw, and then all documents.
        """
        positions = context.start + torch.arange(z.shape[0], device=z.device)[:, None]
        if context.first_key is not None:
            positions = positions - context.first_key.t()
        drawn = open_draw(positions, self.open_probability, seed=context.seed, step=context.step, layer=layer)
        is_open = drawn.expand(z.shape[:2])
        return Gates(is_open, is_open.to(torch.promote_types(z.dtype, torch.float32)), None)


def leak_draw(probability: float, *, seed: int, step: int, layer: int) -> bool:
    """Whether this layer computes every query in this step: a function of the arguments and nothing else."""
    return (_key(seed, step, layer, _LEAK) >> 11) < probability * 2**53


def open_draw(positions: Tensor, probability: float, *, seed: int, step: int, layer: int) -> Tensor:
    """Bernoulli draw for each of int64 `positions`: a function of the arguments and nothing else, on any device."""
    key = _signed(_key(seed, step, layer, _OPEN))
    return (_mix_tensor(positions * _signed(_GOLDEN) + key) >> 11 & (2**53 - 1)) < int(probability * 2**53)


# SplitMix64's mixing step, on Python's integers and on int64 tensors (whose products wrap)

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * _FIRST & _MASK
    x = (x ^ (x >> 27)) * _SECOND & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, where `>>` would repeat the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix((key + (part + 1) * _GOLDEN) & _MASK)
    return key
