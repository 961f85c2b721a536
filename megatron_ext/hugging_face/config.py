"""config.json of a Hugging Face model to the recipe's model section, and back.

Whatever a config asks for that our layers do not compute is refused by name: a model that loads and is slightly
another one is worse than none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.model import head_dim
from recipes.errors import UserError
from recipes.files import read_json
from recipes.kinds import EVERYTHING, KINDS, POOL, kinds_with
from recipes.schema import AttentionConfig, ModelConfig


class ConfigError(UserError):
    """A config.json, or a model section, that has no counterpart on the other side."""


@dataclass(frozen=True)
class Family:
    """One of transformers' own model classes that our dense layers compute."""

    model_type: str
    architecture: str
    qkv_bias: bool
    qk_norm: bool
    window: bool  # whether its config can ask for a sliding window


FAMILIES = (
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, window=True),
    Family("qwen3", "Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, window=True),
    Family("llama", "LlamaForCausalLM", qkv_bias=False, qk_norm=False, window=False),
)
L2A_TYPE = "longpitch"  # model_type of an exported L2A model, run by modeling_longpitch.py
MODELING = "modeling_longpitch"
# constants of the cells that l2a_freesolo's second look reads
CELLS = ("cell_size", "query_block", "top_k", "retain", "recent", "sigma", "lam", "eps")
# values under which a key means what our layers compute
PLAIN = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder.

    Raises:
        ConfigError, UserError: it is missing, or unreadable.
    """
    path = folder / "config.json"
    try:
        return read_json(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; name a folder that holds a Hugging Face model") from error


def model_section(config: dict[str, Any], path: Path, kind: str) -> ModelConfig:
    """The model section of a recipe for a config, with attention `kind`.

    Args:
        config: what `read_config` returned of `path`.
        kind: the attention the imported model gets.

    Raises:
        ConfigError: another architecture, or one with options that our layers do not compute.
    """
    family = _family(config, path)
    for key, plain in PLAIN.items():
        for section in ("", "rope_parameters", "rope_scaling"):
            found = ((config.get(section) or {}) if section else config).get(key, plain[0])
            if found not in plain:
                name = f"{section}.{key}" if section else key
                raise ConfigError(f"{path}: {name} is {found!r}; only {plain[0]!r} can be imported")
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{path}: its weights are quantized (quantization_config); import the model they were made of"
        )
    if config.get("attention_bias", family.qkv_bias) != family.qkv_bias:
        raise ConfigError(f"{path}: attention_bias is {config['attention_bias']}; such models cannot be imported")
    own = _l2a_constants(config, path, kind)
    window = _window_of(config, path) if family.window else None
    if window is not None and kind != "swa":
        raise ConfigError(f"{path}: its attention is a window (use_sliding_window); import it with --attention swa")
    required = (
        "num_hidden_layers hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size "
        "max_position_embeddings rms_norm_eps"
    )
    for key in required.split():
        if config.get(key) is None:
            raise ConfigError(f"{path} does not give {key}; add it, transformers would take its own default")
    return ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim"),
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_length=config["max_position_embeddings"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        norm_eps=config["rms_norm_eps"],
        attention=_attention(config, path, kind, window, own),
    )


def _family(config: dict[str, Any], path: Path) -> Family:
    model_type = config.get("model_type")
    if model_type == L2A_TYPE:
        model_type = config.get("base_model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ConfigError(f"{path}: model_type is {model_type!r}; only dense models of {known} can be imported")


def _l2a_constants(config: dict[str, Any], path: Path, kind: str) -> dict[str, Any]:
    """The gate and window of an L2A model that we exported ourselves; nothing for other models."""
    if config["model_type"] != L2A_TYPE:
        return {}
    keys = ("gate_temperature", "gate_threshold", "closed_layers")
    own = {"window": config["local_window"]} | {key: config[key] for key in keys}
    exported = "l2a_shared" if config["shared_attention"] else "l2a"
    if config.get("open_probability") is not None:  # this and the next are not in the oldest exports
        exported, own["open_probability"] = "context_free", config["open_probability"]
    if config.get("cells") is not None:
        exported, own = "l2a_freesolo", own | config["cells"]
    if kind != exported:
        raise ConfigError(f"{path} is of an L2A model; import it with --attention {exported}")
    return own


def _attention(
    config: dict[str, Any], path: Path, kind: str, window: int | None, own: dict[str, Any]
) -> AttentionConfig:
    given: dict[str, Any] = own if window is None else {"window": window}
    return AttentionConfig(kind=kind, rope_base=_rope_base(config, path), **given)


def _window_of(config: dict[str, Any], path: Path) -> int | None:
    """Tokens that every layer of a config looks back, or None for all of them."""
    if not config.get("use_sliding_window"):
        return None
    needed = ("sliding_window",) if config.get("layer_types") else ("sliding_window", "max_window_layers")
    for key in needed:
        if key not in config:
            raise ConfigError(f"{path} does not give {key}; add it, transformers would take its own default")
    types = config.get("layer_types") or [
        "sliding_attention" if layer >= config["max_window_layers"] else "full_attention"
        for layer in range(config.get("num_hidden_layers", 0))
    ]
    if set(types) == {"full_attention"}:
        return None
    if set(types) != {"sliding_attention"} or not config.get("sliding_window"):
        raise ConfigError(f"{path}: only some of its layers have a window; such models cannot be imported")
    return config["sliding_window"] - 1  # transformers counts the query's own position


def _rope_base(config: dict[str, Any], path: Path) -> float:
    """The base of the rotation: top level up to transformers 4, in rope_parameters from 5 on."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ConfigError(
            f"{path}: its positions are scaled ({kind}); only plain RoPE can be imported: remove rope_scaling from "
            "config.json if the weights were trained without it, as Qwen's base models were"
        )
    base, top = parameters.get("rope_theta"), config.get("rope_theta")
    if base is not None and top is not None and base != top:
        raise ConfigError(f"{path}: rope_theta is {top} and rope_parameters.rope_theta is {base}; which one is right?")
    base = top if base is None else base
    if base is None:
        raise ConfigError(f"{path} does not give rope_theta; add it, transformers would take its own default")
    return float(base)


def export_config(model: ModelConfig, *, dtype: str, max_positions: int, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The config.json under which transformers computes what `model` does.

    Args:
        dtype: of the exported weights, as torch names it ("bfloat16").
        max_positions: longest sequence, tokens.
        token_ids: bos_token_id and the like.

    Raises:
        ConfigError: no class of transformers, nor the modeling file, computes such a model.
    """
    family = _family_of(model)
    base = model.attention.rope_base
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": head_dim(model),
        "intermediate_size": model.ffn_size,
        "vocab_size": model.token_rows,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "rope_theta": base,  # read by transformers up to 4
        "rope_parameters": {"rope_type": "default", "rope_theta": base},  # read from 5 on
        "torch_dtype": dtype,
        **token_ids,
    }
    if family.model_type != "qwen2":
        config["attention_bias"] = False
    if KINDS[model.attention.kind].export == "modeling":
        return config | _l2a_config(model, family)
    return config | _window_config(model, family)


def _family_of(model: ModelConfig) -> Family:
    kind = model.attention.kind
    if KINDS[kind].export is None:
        exported = ", ".join(kinds_with(lambda one: one.export))
        raise ConfigError(
            f"model.attention.kind is {kind}; transformers has no such attention: only {exported} can be exported"
        )
    for family in FAMILIES:
        if (family.qkv_bias, family.qk_norm) == (model.qkv_bias, model.qk_norm):
            if kind == "swa" and not family.window:
                raise ConfigError(
                    f"transformers' {family.architecture} has no sliding window: a swa model can be exported with "
                    "model.qkv_bias or model.qk_norm only"
                )
            return family
    raise ConfigError("transformers has no class with both model.qkv_bias and model.qk_norm; it cannot be exported")


def _window_config(model: ModelConfig, family: Family) -> dict[str, Any]:
    if not family.window:
        return {}
    if EVERYTHING in KINDS[model.attention.kind].reads:
        return {"use_sliding_window": False, "sliding_window": None}
    # transformers counts the query's own position: its window n lets i - j reach n - 1
    return {
        "use_sliding_window": True,
        "sliding_window": model.attention.window + 1,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * model.num_layers,
    }


def _l2a_config(model: ModelConfig, family: Family) -> dict[str, Any]:
    attention = model.attention
    kind = KINDS[attention.kind]
    return {
        "architectures": ["LongpitchForCausalLM"],
        "model_type": L2A_TYPE,
        "auto_map": {
            "AutoConfig": f"{MODELING}.LongpitchConfig",
            "AutoModelForCausalLM": f"{MODELING}.LongpitchForCausalLM",
        },
        "base_model_type": family.model_type,
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "local_window": attention.window,
        "gate_temperature": attention.gate_temperature,
        "gate_threshold": attention.gate_threshold,
        "open_probability": None if kind.gate is None or kind.gate.learned else attention.open_probability,
        "shared_attention": kind.shared_projections,
        "cells": {key: getattr(attention, key) for key in CELLS} if kind.global_reads is POOL else None,
        "closed_layers": list(attention.closed_layers),
    }
