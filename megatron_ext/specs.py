"""Layer specs: the stock megatron-core layer with its core attention swapped, one function a kind."""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

from megatron_ext.attention import FreeSoloAttention, WindowAttention
from recipes.schema import AttentionConfig


class RecomputedLayer(TransformerLayer):
    """The stock layer, keeping nothing but its inputs for the backward.

    Non-reentrant, because that alone runs without hooks into CUDA's random state and gives ZeRO the same gradients.
    """

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _dense(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=WindowAttention, params={"window": None, "backend": attention.backend})


def _swa(attention: AttentionConfig) -> ModuleSpec:
    return ModuleSpec(module=WindowAttention, params={"window": attention.window, "backend": attention.backend})


def _freesolo(attention: AttentionConfig, retain: int | None = None) -> ModuleSpec:
    shared = asdict(attention)
    for key in ("kind", "retain", "rope_base", "document_mask", "restart_positions"):
        del shared[key]
    params = shared | {"retain": retain}
    return ModuleSpec(module=FreeSoloAttention, params=params)


def _freesolo_l(attention: AttentionConfig) -> ModuleSpec:
    return _freesolo(attention, retain=attention.retain)


CORE_ATTENTIONS: dict[str, Callable[[AttentionConfig], ModuleSpec]] = {
    "dense": _dense,
    "swa": _swa,
    "freesolo": _freesolo,
    "freesolo_l": _freesolo_l,
}
KINDS_WITH_DOCUMENT_MASK = ("dense", "swa")


def layer_spec(
    kind: str, attention: AttentionConfig | None = None, *, qk_norm: bool = False, recompute: bool = False
) -> ModuleSpec:
    """The spec of one decoder layer.

    Args:
        kind: dense, swa, freesolo or freesolo_l.
        attention: constants of the attention; None takes the recipe schema's defaults.
        qk_norm: RMSNorm on q and k per head (Qwen3).
        recompute: keep the layer's inputs only and compute it again in the backward.

    Raises:
        ValueError: an unknown kind, or a document mask for a kind that cannot restart at a document's border.
    """
    attention = attention or AttentionConfig()
    if kind not in CORE_ATTENTIONS:
        raise ValueError(f"attention kind {kind!r} is not one of {', '.join(CORE_ATTENTIONS)}")
    if attention.document_mask and kind not in KINDS_WITH_DOCUMENT_MASK:
        raise ValueError(
            f"attention kind {kind} cannot restart at document borders yet: "
            f"set document_mask: false or use {' or '.join(KINDS_WITH_DOCUMENT_MASK)}"
        )
    stock = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    heads = replace(stock.submodules.self_attention.submodules, core_attention=CORE_ATTENTIONS[kind](attention))
    self_attention = replace(stock.submodules.self_attention, submodules=heads)
    return replace(
        stock,
        module=RecomputedLayer if recompute else stock.module,
        submodules=replace(stock.submodules, self_attention=self_attention),
    )
