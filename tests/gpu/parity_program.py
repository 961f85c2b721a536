"""Rank program: loss and gradients of an fp32 model, with the Triton kernels, cut over two GPUs against one GPU.

Every rank first runs the whole sequence alone with the same weights. Writes per case the largest relative RMS
difference over the loss and all parameters, and the bytes that a run leaves behind. "freesolo" has a sequence so short
that it reads every cell: where it ranks them, rounding makes a few queries choose another of two that are equal but for
it (of 93 cells the 4 best: 7e-4 and 5e-3 were measured).
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.model import build_model, slice_context
from megatron_ext.parallel.layout import Layout, init_layout, leave_layout
from megatron_ext.parallel.slices import own_slice
from recipes.kinds import ATTENTION_KINDS
from recipes.schema import AttentionConfig, ModelConfig
from tests.megatron_ext.parity_program import difference, whole

BLOCK = 128
DEVICE = "cuda"
MODEL = ModelConfig(
    num_layers=3, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1024, vocab_size=2048,
    seq_length=1100, init_std=0.05,  # no multiple of a slice
    attention=AttentionConfig(
        cell_size=64, query_block=BLOCK, top_k=4, retain=8, recent=4, window=300, open_probability=0.3,
        leak_probability=0.0,
    ),
)  # fmt: skip


def loss_and_grads(kind: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Loss of the whole sequences and the gradient of every (whole) parameter."""
    length = 550 if kind == "freesolo" else MODEL.seq_length
    case = replace(MODEL, seq_length=length, attention=replace(MODEL.attention, kind=kind))
    torch.manual_seed(7)
    model = build_model(
        case, tensor=layout.tensor, context=layout.context, tensor_group=layout.tensor_group, recompute=True
    )
    model = model.to(layout.device).train()
    draw = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):  # starts at zero, with every gate open
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    text = torch.randint(case.vocab_size, (2, case.seq_length + 1), generator=draw)
    cut = {"rank": layout.context_rank, "ranks": layout.context, "query_block": BLOCK}
    shape = (2, case.seq_length)
    parts = [text[:, :-1], text[:, 1:], torch.ones(shape), torch.zeros(shape, dtype=torch.int64)]
    tokens, labels, weights, doc_starts = (own_slice(x, **cut).to(layout.device) for x in parts)
    start = layout.context_rank * tokens.shape[1]
    context = slice_context(case, doc_starts, start=start, length=case.seq_length, seed=3, step=2)
    context.penalty_scale = 0.02
    loss = model(tokens, context, labels, weights) / case.seq_length
    loss.backward()
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    for value in found.values():
        dist.all_reduce(value, group=layout.context_group)
    return {name: whole(value, model, name, layout).cpu() for name, value in found.items()}


def bytes_left(kind: str, layout: Layout) -> int:
    """GPU memory that a run has taken and nobody can give back."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss_and_grads(kind, layout)
    gc.collect()
    return torch.cuda.memory_allocated() - before


def main(result: str) -> None:
    """Run all cases; rank 0 writes them."""
    alone = init_layout(tensor=1, context=1, device=DEVICE, timeout_seconds=120)
    want = {kind: loss_and_grads(kind, alone) for kind in ATTENTION_KINDS}
    found = {}
    for tensor, context in ((1, 2), (2, 1)):
        layout = init_layout(tensor=tensor, context=context, device=DEVICE, timeout_seconds=120)
        for kind in ATTENTION_KINDS:
            case = f"{kind} tp{tensor} cp{context}"
            found[case] = difference(loss_and_grads(kind, layout), want[kind])
            found[f"{case} left"] = bytes_left(kind, layout)
            print(case, found[case], found[f"{case} left"], flush=True)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(sys.argv[1])
