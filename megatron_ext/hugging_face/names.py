"""Which Hugging Face tensors make up which tensor of ours, and the layouts that join them.

megatron-core keeps q, k and v as one matrix, kv group by kv group (the group's query heads, its key, its value), and
the MLP's gate above its up projection. Everything else is the same tensor under another name.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

import torch

from megatron_ext.model import head_dim
from recipes.errors import UserError
from recipes.schema import ModelConfig

WHOLE_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # rows are tokens, then padding
ATTENTION = {
    "linear_qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "linear_qkv.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "linear_proj.weight": ("o_proj.weight",),
    "q_layernorm.weight": ("q_norm.weight",),
    "k_layernorm.weight": ("k_norm.weight",),
}
LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    # of an L2A layer: a second attention, its norm, and the gate; a Hugging Face base model has none of them
    "global_layernorm.weight": ("global_layernorm.weight",),
    "router.weight": ("router.weight",),
    # of a second look at cells
    "global_attention.core_attention.alpha": ("global_attn.readout.alpha",),
    "global_attention.core_attention.gain": ("global_attn.readout.gain",),
}
LAYER |= {f"self_attention.{own}": tuple(f"self_attn.{n}" for n in parts) for own, parts in ATTENTION.items()}
LAYER |= {f"global_attention.{own}": tuple(f"global_attn.{n}" for n in parts) for own, parts in ATTENTION.items()}
# where the second attention of a layer starts in a model that has one only
COPIED_FROM = {"global_layernorm.": "input_layernorm.", "global_attention.": "self_attention."}
# FreeSolo's: what the recipe gives a start, so that weights may lack it, and constants, which config.json has
START_VALUES = (".core_attention.alpha", ".core_attention.gain")
CONSTANTS = (".core_attention.sigma", ".core_attention.lam")
GATE = "router.weight"  # zero at the start: every gate is open


@dataclass(frozen=True)
class Heads:
    """The numbers that a fused q, k, v needs to be taken apart."""

    heads: int
    groups: int
    width: int


def heads_of(model: ModelConfig) -> Heads:
    """The heads of a model's attentions."""
    return Heads(model.num_heads, model.num_kv_heads or model.num_heads, head_dim(model))


def parts_of(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that our tensor `name` is joined from, in that order.

    Raises:
        UserError: no Hugging Face model has such a tensor.
    """
    if name in WHOLE_MODEL:
        return (WHOLE_MODEL[name],)
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in LAYER:
        raise UserError(f"{name} has no counterpart in a Hugging Face model; export knows dense, swa and L2A models")
    return tuple(f"model.layers.{match[1]}.{part}" for part in LAYER[match[2]])


def given_by_recipe(name: str, source: Container[str]) -> bool:
    """Whether our tensor `name` is read from no tensor of `source` because the recipe says what it is."""
    if name.endswith(START_VALUES):
        return ".global_attention." not in name or parts_of(name)[0] not in source
    return name.endswith(CONSTANTS)


def copied_from(name: str) -> str | None:
    """The tensor of ours that `name` of the second attention starts as; None for one that a base model has itself."""
    for own, original in COPIED_FROM.items():
        if f".{own}" in name:
            return name.replace(f".{own}", f".{original}")
    return None


def join(name: str, parts: list[torch.Tensor], heads: Heads) -> torch.Tensor:
    """Our tensor `name` from its Hugging Face parts, [out, in] or [out] each."""
    if ".linear_qkv." in name:
        grouped = [part.reshape(heads.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def split(name: str, tensor: torch.Tensor, heads: Heads) -> dict[str, torch.Tensor]:
    """The Hugging Face tensors that our tensor `name` holds."""
    names = parts_of(name)
    if len(names) == 1:
        return {names[0]: tensor}
    if ".linear_qkv." in name:
        grouped = tensor.reshape(heads.groups, -1, *tensor.shape[1:])
        queries = heads.heads // heads.groups * heads.width
        parts = [part.flatten(0, 1) for part in grouped.split([queries, heads.width, heads.width], dim=1)]
    else:
        parts = list(tensor.chunk(2))
    return dict(zip(names, parts, strict=True))


def expected_shape(name: str, shape: torch.Size, heads: Heads) -> list[list[int]]:
    """Shapes of the parts of our tensor `name` of `shape`, in the order of `parts_of`."""
    with torch.device("meta"):
        return [list(part.shape) for part in split(name, torch.empty(shape), heads).values()]
