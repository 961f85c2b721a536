"""Qwen2.5-7B's geometry with random weights: dense and L2A run 32K tokens forward in bf16 on one GPU."""

import math
import time
from dataclasses import replace

import pytest
import torch

from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.parallel.layout import init_layout, leave_layout
from recipes.schema import AttentionConfig, ModelConfig

QWEN = ModelConfig(
    num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128, ffn_size=18944, vocab_size=152064,
    seq_length=32768, tie_embeddings=False, qkv_bias=True, norm_eps=1e-6,
    attention=AttentionConfig(rope_base=1e6, window=4094),
)  # fmt: skip
DEVICE = "cuda"
GATE = 0.01  # spread of the router's weights: scores over temperature then spread by 6
OPEN_FIFTH = 1 / (1 + math.exp(-0.84 * 6))  # threshold that a fifth of such scores pass
ALL_CLOSED = 2.0


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Groups of one process, which megatron-core's layers ask for."""
    yield init_layout(tensor=1, context=1, device=DEVICE, timeout_seconds=60)
    leave_layout()


def config(kind: str, threshold: float = OPEN_FIFTH) -> ModelConfig:
    """The geometry with another attention."""
    return replace(QWEN, attention=replace(QWEN.attention, kind=kind, gate_threshold=threshold))


@torch.no_grad()
def build(model: ModelConfig) -> LanguageModel:
    """Weights drawn on the GPU, the same for every name in every kind."""
    with torch.device("meta"):
        built = build_model(model, dtype=torch.bfloat16, fused=True)
    built.to_empty(device=DEVICE).to(torch.bfloat16)  # megatron-core leaves norms in fp32
    for name, parameter in built.named_parameters():
        generator = torch.Generator(DEVICE).manual_seed(sum(name.encode()) * 7919 + len(name))
        if name.endswith("layernorm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=GATE if "router" in name else 0.02, generator=generator)
    return built.eval()


@torch.no_grad()
def forward(built: LanguageModel, model: ModelConfig) -> dict[str, float]:
    """Mean loss of random tokens, time of a second run, peak memory, and the gates' mean share."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    tokens = torch.randint(model.vocab_size, (1, model.seq_length + 1), device=DEVICE, generator=generator)
    weights = torch.ones(1, model.seq_length, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the first compiles
        starts = torch.zeros(1, model.seq_length, dtype=torch.int64, device=DEVICE)
        context = slice_context(model, starts, start=0, length=model.seq_length, measure=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = built(tokens[:, :-1], context, tokens[:, 1:], weights).item() / model.seq_length
        seconds = time.perf_counter() - began
    shares = [(figure[0] / figure[1]).item() for figure in context.measured.get("open_fraction", {}).values()]
    found = {"loss": loss, "seconds": seconds, "gib": torch.cuda.max_memory_allocated() / 2**30}
    found["open"] = sum(shares) / len(shares) if shares else math.nan
    print(model.attention.kind, model.attention.gate_threshold, {key: round(x, 4) for key, x in found.items()})
    return found


def expected_loss(model: ModelConfig) -> float:
    """Logits of normalised states are normal with variance width * 0.02^2, and say nothing of the next token."""
    return math.log(model.vocab_size) + model.hidden_size * 0.02**2 / 2


def test_dense_and_l2a():
    dense = config("dense")
    found = forward(build(dense), dense)
    assert found["loss"] == pytest.approx(expected_loss(dense), abs=0.05)

    torch.cuda.empty_cache()
    l2a = config("l2a")
    built = build(l2a)
    found = forward(built, l2a)
    assert found["loss"] == pytest.approx(expected_loss(l2a), abs=0.05)
    assert 0.1 < found["open"] < 0.3

    # closed gates add exactly nothing: the window's model is left, bit for bit
    for layer in built.decoder.layers:
        layer.router.threshold = ALL_CLOSED
    closed = forward(built, config("l2a", ALL_CLOSED))
    del built
    swa = config("swa")
    assert closed["open"] == 0 and closed["loss"] == forward(build(swa), swa)["loss"]
