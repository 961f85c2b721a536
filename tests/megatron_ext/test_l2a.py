"""The L2A layer: values and gradients of the vectors, and what holds when gates are all open, all closed or leak."""

import os
from unittest import mock

import pytest
import torch

from megatron_ext.context_parallel.layout import init_layout, leave_layout
from megatron_ext.l2a import L2ALayer
from megatron_ext.model import build_model, slice_context
from recipes.schema import AttentionConfig, ModelConfig
from tests.numerics import assert_close, load_vector

VECTORS = ("l2a_layer", "l2a_layer_headdim", "l2a_layer_leak")
MODEL = ModelConfig(
    num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=64, seq_length=60, qkv_bias=True,
    init_std=0.3,
    attention=AttentionConfig(
        kind="l2a", window=7, cell_size=4, query_block=8, top_k=3, retain=5, recent=2, leak_probability=0.0
    ),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Groups of one process, which megatron-core's layers ask for."""
    with mock.patch.dict(os.environ):
        os.environ.pop("RANK", None)
        yield init_layout(tensor=1, context=1, device="cpu", timeout_seconds=60)
        leave_layout()


# the vectors


def merged_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """megatron-core's rows: for each kv head its query heads, its key head, its value head."""
    parts = [x.unflatten(0, (kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(merged: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """The way back."""
    by_group = merged.unflatten(0, (kv_heads, -1))
    sizes = (heads // kv_heads * head_dim, head_dim, head_dim)
    parts = by_group.split(sizes, dim=1)
    return {name: part.flatten(0, 1) for name, part in zip("qkv", parts, strict=True)}


def vector_layer(name: str) -> tuple[L2ALayer, dict, dict]:
    """The layer of a vector in fp64, with its MLP turned to zero, and the vector."""
    found, params = load_vector(name)
    found = {key: x.double() if x.is_floating_point() else x for key, x in found.items()}
    config = ModelConfig(
        num_layers=1, hidden_size=found["in_x"].shape[1], num_heads=params["Hq"], num_kv_heads=params["Hk"],
        head_dim=params["d"], ffn_size=8, vocab_size=8, seq_length=found["in_x"].shape[0],
        qkv_bias="in_qb" in found, norm_eps=params["eps"],
        attention=AttentionConfig(
            kind="l2a", window=params["window"], rope_base=params["base"], gate_temperature=params["temp"],
            gate_threshold=params["threshold"], leak_probability=float(params["leak"]),
        ),
    )  # fmt: skip
    model = build_model(config).double()
    layer = model.decoder.layers[0]
    with torch.no_grad():
        layer.mlp.linear_fc2.weight.zero_()
        layer.input_layernorm.weight.copy_(found["in_ln"])
        layer.global_layernorm.weight.copy_(found["in_ln_g"])
        layer.router.weight.copy_(found["in_router"][None])
        for attention, suffix in ((layer.self_attention, ""), (layer.global_attention, "_g")):
            parts = (found[f"in_{x}{suffix}"] for x in "qkv")
            attention.linear_qkv.weight.copy_(merged_qkv(*parts, params["Hk"]))
            attention.linear_proj.weight.copy_(found[f"in_o{suffix}"])
            if config.qkv_bias:
                biases = (found[f"in_{x}b{suffix}"] for x in "qkv")
                attention.linear_qkv.bias.copy_(merged_qkv(*biases, params["Hk"]))
    context = slice_context(
        config, torch.zeros(1, config.seq_length, dtype=torch.int64), start=0, length=config.seq_length
    )
    return layer.train(), found, params | {"context": context}


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name):
    layer, found, params = vector_layer(name)
    context = params["context"]
    context.penalty_scale = params["reg_coeff"]
    decided = []
    layer.router.register_forward_hook(lambda _module, _inputs, gates: decided.append(gates))
    x = found["in_x"][:, None].requires_grad_()
    y, _ = layer(hidden_states=x, attention_mask=None, packed_seq_params=context)
    y.backward(found["dy"][:, None])
    assert torch.equal(decided[0].is_open[:, 0], found["gate"])
    assert context.penalties[1].item() == pytest.approx(found["reg"].item(), rel=1e-6)
    assert_close("y", y[:, 0], found["y"], rtol=1e-6)
    got = {"x": x.grad[:, 0], "ln": layer.input_layernorm.weight.grad, "ln_g": layer.global_layernorm.weight.grad}
    got["router"] = layer.router.weight.grad[0]
    for attention, suffix in ((layer.self_attention, ""), (layer.global_attention, "_g")):
        got[f"o{suffix}"] = attention.linear_proj.weight.grad
        shape = (params["Hq"], params["Hk"], params["d"])
        weights = split_qkv(attention.linear_qkv.weight.grad, *shape)
        got |= {f"{part}{suffix}": grad for part, grad in weights.items()}
        if "in_qb" in found:
            biases = split_qkv(attention.linear_qkv.bias.grad, *shape)
            got |= {f"{part}b{suffix}": grad for part, grad in biases.items()}
    wanted = {key.removeprefix("grad_"): x for key, x in found.items() if key.startswith("grad_")}
    assert got.keys() == wanted.keys()
    for key, want in wanted.items():
        assert_close(key, got[key], want, rtol=1e-5, atol=1e-7)
