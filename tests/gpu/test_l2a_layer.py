"""The L2A layer on the GPU: neither its forward nor its backward makes the host wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megatron_ext.model import build_model, slice_context
from megatron_ext.parallel.layout import init_layout, leave_layout
from megatron_ext.router import leak_draw
from megatron_ext.sequence_context import SequenceContext
from recipes.schema import AttentionConfig, ModelConfig

MODEL = ModelConfig(
    num_layers=1, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=512, vocab_size=512,
    seq_length=1024, qkv_bias=True, attention=AttentionConfig(window=255, leak_probability=0.5),
)  # fmt: skip
STEPS = range(4)  # layer 1 leaks in some of them


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Groups of one process, which megatron-core's layers ask for."""
    yield init_layout(tensor=1, context=1, device="cuda", timeout_seconds=60)
    leave_layout()


@contextmanager
def no_host_sync() -> Iterator[None]:
    """torch raises where it would wait for the GPU; what Triton compiles and times is done before."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_host_sync_is_noticed():
    with pytest.raises(RuntimeError, match="synchronizing"), no_host_sync():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize(
    ("kind", "documents"),
    [("l2a", False), ("l2a", True), ("l2a_shared", False), ("context_free", False), ("l2a_freesolo", False)],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_layer_never_waits_for_the_gpu(kind, documents, recompute):
    assert 0 < sum(leak_draw(0.5, seed=0, step=step, layer=1) for step in STEPS) < len(STEPS)
    config = replace(MODEL, attention=replace(MODEL.attention, kind=kind, document_mask=documents))
    model = build_model(config, dtype=torch.bfloat16, recompute=recompute, fused=True).to("cuda", torch.bfloat16)
    layer = model.decoder.layers[0].train()
    if kind != "context_free":
        layer.router.weight.data.normal_(std=0.1)  # some gates open
    starts = (torch.arange(1024, device="cuda") // 300 * 300).expand(2, -1)
    x = torch.randn(1024, 2, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_out = torch.randn_like(x)

    def context(step: int) -> SequenceContext:
        made = slice_context(config, starts, start=0, length=1024, measure=True, step=step)
        made.penalty_scale = 1e-4
        return made

    def run(context: SequenceContext) -> None:
        layer(hidden_states=x, attention_mask=None, packed_seq_params=context)[0].backward(d_out)

    for step in STEPS:  # compiles
        run(context(step))
    contexts = [context(step) for step in STEPS]
    x.grad = None
    with no_host_sync():
        for made in contexts:
            run(made)
    assert x.grad.isfinite().all() and x.grad.any()
    opened, count = contexts[0].measured["open_fraction"][1].tolist()
    assert 0 < opened < count
