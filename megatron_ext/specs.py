"""Layer specs: the stock megatron-core layer with its core attention swapped, and for the L2A kinds a second look."""

from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from megatron_ext.attention import FreeSoloAttention, HeadNorm, SharedAttention, SparseQueryAttention, WindowAttention
from megatron_ext.l2a import L2ALayer, L2ASubmodules
from megatron_ext.router import ContextFreeGate, Router
from recipes.errors import UserError
from recipes.kinds import CELLS, KINDS, POOL, WINDOW, AttentionKind, Gate, kinds_with
from recipes.schema import AttentionConfig, ModelConfig


class RecomputedLayer(TransformerLayer):
    """The stock layer, keeping nothing but its inputs for the backward.

    Non-reentrant, because that alone runs without hooks into CUDA's random state and gives ZeRO the same gradients.
    """

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(self._forward_once, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _forward_once(self, *args, **kwargs):
        """The layer's forward and a multiplication by 1.

        torch ends a recomputation by an exception out of the last operator that saves something. That this is not
        megatron-core's last linear layer matters: out of 0.19's, all that was recomputed stays alive until the whole
        backward is over, as if nothing had been.
        """
        found: tuple[Any, ...] = super().forward(*args, **kwargs)
        hidden, *others = found
        return hidden * torch.ones((), dtype=hidden.dtype, device=hidden.device), *others


class RecomputedL2ALayer(RecomputedLayer, L2ALayer):
    """The L2A layer, recomputed; what it draws is a function of the step, so both passes draw alike."""


# constants of FreeSolo that its core attention is built with
_FREESOLO = ("backend", "window", "cell_size", "query_block", "top_k", "sigma", "lam", "recent", "eps", "alpha_init")


def _window(attention: AttentionConfig, window: int | None) -> ModuleSpec:
    return ModuleSpec(module=WindowAttention, params={"window": window, "backend": attention.backend})


def _freesolo(attention: AttentionConfig, retain: int | None) -> ModuleSpec:
    params = {name: getattr(attention, name) for name in _FREESOLO} | {"retain": retain}
    return ModuleSpec(module=FreeSoloAttention, params=params)


def _core_attention(kind: AttentionKind, attention: AttentionConfig) -> ModuleSpec:
    """The module of a layer's attention (of an L2A layer's local one)."""
    if kind.shared_projections:
        return ModuleSpec(module=SharedAttention, params={"window": attention.window, "backend": attention.backend})
    if POOL in kind.reads:
        return _freesolo(attention, attention.retain)
    if CELLS in kind.reads:
        return _freesolo(attention, None)
    return _window(attention, attention.window if WINDOW in kind.reads else None)


def _global_attention(kind: AttentionKind, attention: AttentionConfig) -> ModuleSpec:
    """The module of an L2A layer's global attention with projections of its own."""
    if kind.global_reads is POOL:
        return _freesolo(attention, attention.retain)
    return ModuleSpec(module=SparseQueryAttention, params={"backend": attention.backend})


def _gate(gate: Gate, attention: AttentionConfig) -> ModuleSpec:
    if not gate.learned:
        return ModuleSpec(module=ContextFreeGate, params={"open_probability": attention.open_probability})
    constants = {"temperature": attention.gate_temperature, "threshold": attention.gate_threshold}
    return ModuleSpec(module=Router, params=constants)


def _with_global_attention(
    kind: AttentionKind, gate: Gate, attention: AttentionConfig, layer: ModuleSpec, *, recompute: bool
) -> ModuleSpec:
    """The L2A layer whose local attention is that of `layer`."""
    stock = _slots(layer)
    slots = {one.name: getattr(stock, one.name) for one in fields(stock)}
    global_attention = None  # the local one's module is used again
    if not kind.shared_projections:
        global_attention = _with_core(stock.self_attention, _global_attention(kind, attention))
    return ModuleSpec(
        module=RecomputedL2ALayer if recompute else L2ALayer,
        params={"leak_probability": attention.leak_probability},
        submodules=L2ASubmodules(
            **slots,
            global_layernorm=stock.input_layernorm,
            global_attention=global_attention,
            gate=_gate(gate, attention),
        ),
    )


def _slots(spec: ModuleSpec) -> Any:
    """The modules that a spec names, a dataclass; megatron-core declares it as any object."""
    return spec.submodules


def _with_core(self_attention: ModuleSpec, core: ModuleSpec) -> ModuleSpec:
    return replace(self_attention, submodules=replace(_slots(self_attention), core_attention=core))


def decoder_spec(model: ModelConfig, *, recompute: bool = False) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of a model's layers: one for all of them, or a list where some have lost their second look.

    Raises:
        UserError: see `layer_spec`.
    """
    attention, options = model.attention, {"qk_norm": model.qk_norm, "recompute": recompute}
    usual = layer_spec(attention.kind, attention, **options)
    if not attention.closed_layers:
        return usual
    closed = layer_spec("swa", attention, **options)
    layers = [closed if number in attention.closed_layers else usual for number in range(model.num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_slots(usual).input_layernorm)


def layer_spec(
    kind: str, attention: AttentionConfig | None = None, *, qk_norm: bool = False, recompute: bool = False
) -> ModuleSpec:
    """The spec of one decoder layer.

    Args:
        kind: a row of `recipes.kinds.KINDS`.
        attention: constants of the attention; None takes the recipe schema's defaults.
        qk_norm: RMSNorm on q and k per head (Qwen3).
        recompute: keep the layer's inputs only and compute it again in the backward.

    Raises:
        UserError: an unknown kind, or a document mask for a kind that cannot restart at a document's border.
    """
    attention = attention or AttentionConfig()
    if kind not in KINDS:
        raise UserError(f"attention kind {kind!r} is not one of {', '.join(KINDS)}")
    row = KINDS[kind]
    if attention.document_mask and not row.document_mask:
        raise UserError(
            f"attention kind {kind} cannot restart at document borders yet: "
            f"set document_mask: false or use {' or '.join(kinds_with(lambda one: one.document_mask))}"
        )
    stock = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    self_attention = _slots(stock).self_attention
    if qk_norm:
        heads = replace(self_attention.submodules, q_layernorm=HeadNorm, k_layernorm=HeadNorm)
        self_attention = replace(self_attention, submodules=heads)
    self_attention = _with_core(self_attention, _core_attention(row, attention))
    layer = replace(stock, submodules=replace(_slots(stock), self_attention=self_attention))
    if row.gate is not None:
        return _with_global_attention(row, row.gate, attention, layer, recompute=recompute)
    return replace(layer, module=RecomputedLayer) if recompute else layer
