"""Tiny random models of transformers' own classes, as folders, and what both sides answer to the same tokens."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from data_prep.tokenizer import train_tokenizer
from launch.conversion import one_process
from launch.generate import load_model
from launch.run_directory import model_of
from megatron_ext import checkpoint
from megatron_ext.model import slice_context
from megatron_ext.weights import SINGLE

SMALL = {"vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 96, "initializer_range": 0.3}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen2-tied": Qwen2Config(
        hidden_size=48, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e6,
        tie_word_embeddings=True, rms_norm_eps=1e-6, **SMALL,
    ),
    "qwen2.5-untied": Qwen2Config(
        hidden_size=56, intermediate_size=72, num_attention_heads=7, num_key_value_heads=1, rope_theta=5e5,
        tie_word_embeddings=False, rms_norm_eps=1e-5, **SMALL,
    ),
    "qwen3-wide-heads": Qwen3Config(
        hidden_size=40, intermediate_size=56, num_attention_heads=6, num_key_value_heads=3, head_dim=16, rope_theta=1e6,
        tie_word_embeddings=False, rms_norm_eps=1e-6, **SMALL,
    ),
    "qwen3-narrow-heads-tied": Qwen3Config(
        hidden_size=64, intermediate_size=56, num_attention_heads=4, num_key_value_heads=4, head_dim=8, rope_theta=2e6,
        tie_word_embeddings=True, rms_norm_eps=1e-6, **SMALL,
    ),
    "llama": LlamaConfig(
        hidden_size=48, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4,
        tie_word_embeddings=True, rms_norm_eps=1e-5, **SMALL,
    ),
}  # fmt: skip

# small cells: 48 tokens are 12 cells in 6 blocks, and neither the pool nor a query takes all that there are
CELLS = {"cell_size": 4, "query_block": 8, "top_k": 2, "retain": 3, "recent": 2, "sigma": 3.0, "lam": 0.5}


def attention_of(kind: str, *, window: int) -> list[str]:
    """Overrides of an import that give a kind numbers which tiny models show."""
    own = {"context_free": {"open_probability": 0.4}, "l2a_freesolo": CELLS}.get(kind, {})
    return [f"model.attention.{key}={value}" for key, value in ({"window": window} | own).items()]


def write_model(folder: Path, config: PretrainedConfig, *, shard: str = "5GB") -> Path:
    """Save a random model whose every tensor differs from its start value, with a tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shard)
    train_tokenizer(["every word is made of letters " * 9], 300).save(folder)
    return folder


def some_tokens(length: int = 48, batch: int = 2) -> torch.Tensor:
    """[batch, length] tokens."""
    return torch.randint(300, (batch, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def their_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the model in a Hugging Face folder, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    return model.eval()(tokens).logits


@torch.no_grad()
def our_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the model in a run directory, in fp32."""
    config = model_of(run)
    with one_process():
        model = load_model(config, checkpoint.find(run))
        return model(tokens, slice_context(config, torch.zeros_like(tokens), start=0, length=tokens.shape[1]))


def stir_gates(run: Path) -> Path:
    """Give an imported L2A run gates of which about half are open, and second attentions that differ from the first."""
    file = checkpoint.find(run) / checkpoint.WEIGHTS / SINGLE
    state, generator = load_file(file), torch.Generator().manual_seed(2)
    for name, tensor in state.items():
        if name.endswith("router.weight"):
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        elif ".global_" in name:
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    save_file(state, file)
    return run
