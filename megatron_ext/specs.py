"""Layer specs: the stock megatron-core layer with its core attention swapped, and for the L2A kinds a second look."""

from collections.abc import Callable
from dataclasses import fields, replace

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
from recipes.schema import AttentionConfig, ModelConfig


class _Recomputed:
    """Mixed in before a layer: it keeps nothing but its inputs for the backward.

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
        hidden, *others = super().forward(*args, **kwargs)
        return hidden * torch.ones((), dtype=hidden.dtype, device=hidden.device), *others


class RecomputedLayer(_Recomputed, TransformerLayer):
    """The stock layer, recomputed."""


class RecomputedL2ALayer(_Recomputed, L2ALayer):
    """The L2A layer, recomputed; what it draws is a function of the step, so both passes draw alike."""


def _dense(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=WindowAttention, params={"window": None, "backend": attention.backend})


def _swa(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=WindowAttention, params={"window": attention.window, "backend": attention.backend})


# constants of FreeSolo that its core attention is built with
_FREESOLO = ("backend", "window", "cell_size", "query_block", "top_k", "sigma", "lam", "recent", "eps", "alpha_init")


def _freesolo(attention: AttentionConfig, retain: int | None = None) -> ModuleSpec:
    params = {name: getattr(attention, name) for name in _FREESOLO} | {"retain": retain}
    return ModuleSpec(module=FreeSoloAttention, params=params)


def _freesolo_l(attention: AttentionConfig) -> ModuleSpec:
    return _freesolo(attention, retain=attention.retain)


def _shared(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=SharedAttention, params={"window": attention.window, "backend": attention.backend})


def _sparse_query(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=SparseQueryAttention, params={"backend": attention.backend})


CORE_ATTENTIONS: dict[str, Callable[[AttentionConfig], ModuleSpec]] = {
    "dense": _dense,
    "swa": _swa,
    "freesolo": _freesolo,
    "freesolo_l": _freesolo_l,
    "l2a": _swa,
    "l2a_shared": _shared,
    "l2a_freesolo": _swa,
    "context_free": _swa,
}
# what the second attention of an L2A layer computes; None: the first one's module is used again
GLOBAL_ATTENTIONS: dict[str, Callable[[AttentionConfig], ModuleSpec] | None] = {
    "l2a": _sparse_query,
    "l2a_shared": None,
    "l2a_freesolo": _freesolo_l,
    "context_free": _sparse_query,
}
KINDS_WITH_DOCUMENT_MASK = ("dense", "swa", "l2a", "l2a_shared", "context_free")


def _gate(kind: str, attention: AttentionConfig) -> ModuleSpec:
    if kind == "context_free":
        return ModuleSpec(module=ContextFreeGate, params={"open_probability": attention.open_probability})
    constants = {"temperature": attention.gate_temperature, "threshold": attention.gate_threshold}
    return ModuleSpec(module=Router, params=constants)


def _with_second_look(kind: str, attention: AttentionConfig, layer: ModuleSpec, *, recompute: bool) -> ModuleSpec:
    """The L2A layer whose first attention is that of `layer`."""
    slots = {one.name: getattr(layer.submodules, one.name) for one in fields(layer.submodules)}
    core = GLOBAL_ATTENTIONS[kind]
    global_attention = None if core is None else _with_core(layer.submodules.self_attention, core(attention))
    return ModuleSpec(
        module=RecomputedL2ALayer if recompute else L2ALayer,
        params={"leak_probability": attention.leak_probability},
        submodules=L2ASubmodules(
            **slots,
            global_layernorm=layer.submodules.input_layernorm,
            global_attention=global_attention,
            gate=_gate(kind, attention),
        ),
    )


def _with_core(self_attention: ModuleSpec, core: ModuleSpec) -> ModuleSpec:
    return replace(self_attention, submodules=replace(self_attention.submodules, core_attention=core))


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
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=usual.submodules.input_layernorm)


def layer_spec(
    kind: str, attention: AttentionConfig | None = None, *, qk_norm: bool = False, recompute: bool = False
) -> ModuleSpec:
    """The spec of one decoder layer.

    Args:
        kind: one of `recipes.schema.ATTENTION_KINDS`.
        attention: constants of the attention; None takes the recipe schema's defaults.
        qk_norm: RMSNorm on q and k per head (Qwen3).
        recompute: keep the layer's inputs only and compute it again in the backward.

    Raises:
        UserError: an unknown kind, or a document mask for a kind that cannot restart at a document's border.
    """
    attention = attention or AttentionConfig()
    if kind not in CORE_ATTENTIONS:
        raise UserError(f"attention kind {kind!r} is not one of {', '.join(CORE_ATTENTIONS)}")
    if attention.document_mask and kind not in KINDS_WITH_DOCUMENT_MASK:
        raise UserError(
            f"attention kind {kind} cannot restart at document borders yet: "
            f"set document_mask: false or use {' or '.join(KINDS_WITH_DOCUMENT_MASK)}"
        )
    stock = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    if qk_norm:
        heads = replace(stock.submodules.self_attention.submodules, q_layernorm=HeadNorm, k_layernorm=HeadNorm)
        attention_spec = replace(stock.submodules.self_attention, submodules=heads)
        stock = replace(stock, submodules=replace(stock.submodules, self_attention=attention_spec))
    self_attention = _with_core(stock.submodules.self_attention, CORE_ATTENTIONS[kind](attention))
    layer = replace(stock, submodules=replace(stock.submodules, self_attention=self_attention))
    if kind in GLOBAL_ATTENTIONS:
        return _with_second_look(kind, attention, layer, recompute=recompute)
    return replace(layer, module=RecomputedLayer) if recompute else layer
