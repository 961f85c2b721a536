"""Rank program: loss and every gradient of a small fp64 model under context and tensor parallelism against one rank.

Every rank first runs the whole sequence alone with the same weights, so the comparison needs no second launch.
Prints per case the largest relative RMS difference over the loss and all parameters.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.parallel.collectives import ledger, start_gather
from megatron_ext.parallel.layout import Layout, init_layout
from megatron_ext.parallel.slices import own_slice
from recipes.kinds import L2A_KINDS
from recipes.schema import AttentionConfig, ModelConfig

BLOCK = 16
MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=12, ffn_size=48, vocab_size=80, seq_length=200,
    vocab_tokens=64,  # the second of two tensor ranks holds padding besides
    qkv_bias=True, init_std=0.3,
    attention=AttentionConfig(
        cell_size=4, query_block=BLOCK, top_k=3, retain=5, recent=3, window=20, alpha_init=0.7, gate_temperature=0.5,
        open_probability=0.4, leak_probability=0.5,
    ),
)  # fmt: skip
DRAWS = {"seed": 3, "step": 2}  # layer 1 leaks and layer 2 does not
TIMEOUT = 100.5  # seconds; no whole number of minutes
PENALTY_SCALE = 0.02
LAYOUTS = {4: ((1, 2), (1, 4), (2, 1), (2, 2)), 8: ((2, 4),)}  # (tensor, context) by number of ranks

# name -> (kind, length, window, document mask, norm of q and k): slices shorter than the window, lengths that are no
# multiple of a slice
SEQUENCES = {
    "dense": ("dense", 200, 20, False),
    "dense_documents": ("dense", 200, 20, True),
    "swa": ("swa", 200, 20, False),
    "swa_window_over_slices": ("swa", 137, 90, False),
    "swa_window_0": ("swa", 70, 0, False),
    "swa_documents": ("swa", 200, 90, True),
    "freesolo": ("freesolo", 200, 20, False),
    "freesolo_ragged": ("freesolo", 137, 90, False),
    "freesolo_l": ("freesolo_l", 200, 20, False),
    "freesolo_l_ragged": ("freesolo_l", 137, 90, False),
    "freesolo_l_short_slices": ("freesolo_l", 60, 20, False),
    "l2a": ("l2a", 200, 20, False, True),
    "l2a_documents": ("l2a", 137, 90, True),
    "l2a_shared": ("l2a_shared", 137, 90, False),
    "l2a_freesolo": ("l2a_freesolo", 200, 20, False),
    "context_free_window_0": ("context_free", 137, 0, False),
}


def config(kind: str, length: int, window: int, document_mask: bool, qk_norm: bool = False) -> ModelConfig:
    """The model of a case."""
    attention = replace(MODEL.attention, kind=kind, window=window, document_mask=document_mask)
    return replace(MODEL, seq_length=length, qk_norm=qk_norm, attention=attention)


def batch(length: int) -> dict[str, torch.Tensor]:
    """Two sequences with repeated text (exact ties between cells), uneven weights, three documents."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(64, (2, length), generator=generator)
    tokens[:, 32:48] = tokens[:, 0:16]
    labels = torch.randint(64, (2, length), generator=generator)
    weights = (torch.rand(2, length, generator=generator) < 0.7).double() * torch.rand(2, length, generator=generator)
    weights[:, length // 2 :] *= torch.arange(length - length // 2) % 3 == 0
    weights[:, -(length // 4) :] = 0  # the last of four ranks has nothing to learn
    borders = torch.tensor([0, length // 5, length // 2 + 3])
    doc_starts = borders[torch.bucketize(torch.arange(length), borders, right=True) - 1].expand(2, length)
    return {"tokens": tokens, "labels": labels, "weights": weights, "doc_starts": doc_starts}


def build(model: ModelConfig, layout: Layout, *, recompute: bool = False) -> LanguageModel:
    """The fp64 model with the same weights on every layout."""
    torch.manual_seed(7)
    built = build_model(
        model, tensor=layout.tensor, context=layout.context, tensor_group=layout.tensor_group, recompute=recompute
    ).double()
    generator = torch.Generator().manual_seed(11)
    for name, parameter in built.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):  # norms, alpha, gain start at constants: move them
            whole = torch.rand(parameter.numel() * (layout.tensor if is_cut(parameter) else 1), generator=generator)
            part = whole.chunk(layout.tensor)[layout.tensor_rank] if is_cut(parameter) else whole
            parameter.data.add_(part.double() * 0.3)
        if name.endswith("router.weight"):  # starts at zero, with every gate open
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return built.train()


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether tensor-parallel ranks hold different parts of it."""
    return getattr(parameter, "tensor_model_parallel", False)


def loss_and_grads(model: LanguageModel, case: ModelConfig, layout: Layout, measured: dict) -> dict[str, torch.Tensor]:
    """Loss of the whole sequence and the gradient of every (whole) parameter."""
    parts = {
        name: own_slice(x, rank=layout.context_rank, ranks=layout.context, query_block=BLOCK)
        for name, x in batch(case.seq_length).items()
    }
    start = layout.context_rank * parts["tokens"].shape[1]
    context = slice_context(case, parts["doc_starts"], start=start, length=case.seq_length, measure=True, **DRAWS)
    context.penalty_scale = PENALTY_SCALE
    gates = torch.zeros(MODEL.num_layers, 2, case.seq_length, dtype=torch.float64)
    watch_gates(model, gates, start)
    loss = model(parts["tokens"], context, parts["labels"], parts["weights"], loss_chunk=33)
    loss.backward()
    for name, by_layer in context.measured.items():
        measured[name] = {}
        for layer, value in by_layer.items():
            total, count = world_sum(value).tolist()
            measured[name][layer] = total / count
    found = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    if case.attention.kind in L2A_KINDS:
        found["gates"] = gates
        found["penalty"] = sum(context.penalties.values(), torch.zeros((), dtype=torch.float64))
    for value in found.values():
        dist.all_reduce(value, group=layout.context_group)
    return {name: whole(value, model, name, layout) for name, value in found.items()}


def watch_gates(model: LanguageModel, gates: torch.Tensor, start: int) -> None:
    """Write what every layer's gates decide for this slice into gates [layers, B, T of the sequence]."""

    def note(layer: int):
        def hook(_module, _inputs, decided):
            real = gates[layer, :, start : start + decided.is_open.shape[0]]
            real.copy_(decided.is_open.t()[:, : real.shape[1]])

        return hook

    for number, layer in enumerate(model.decoder.layers):
        if hasattr(layer, "router"):
            layer.router.register_forward_hook(note(number))


def world_sum(value: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks: figures are sums and counts, so repetitions cancel."""
    dist.all_reduce(value)
    return value


def whole(value: torch.Tensor, model: LanguageModel, name: str, layout: Layout) -> torch.Tensor:
    """Put a tensor-parallel gradient together; a replicated one must be equal on all ranks."""
    parameter = dict(model.named_parameters()).get(name)
    parts = [torch.empty_like(value) for _ in range(layout.tensor)]
    dist.all_gather(parts, value.contiguous(), group=layout.tensor_group)
    if parameter is None or not is_cut(parameter):
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between tensor-parallel ranks"
        return value
    strided = [part.chunk(parameter.partition_stride, parameter.partition_dim) for part in parts]
    return torch.cat([part for chunk in zip(*strided, strict=True) for part in chunk], parameter.partition_dim)


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest relative RMS difference."""
    assert got.keys() == want.keys()
    return max(((got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-300)).item() for n in want)


def run(case: ModelConfig, layout: Layout, recompute: bool = False) -> tuple[dict, dict]:
    """Loss, gradients and the measured figures under one layout."""
    measured: dict = {}
    return loss_and_grads(build(case, layout, recompute=recompute), case, layout, measured), measured


def lay_out(tensor: int, context: int) -> Layout:
    """The groups of a layout. Every new cut leaves threads of gloo behind, so main makes each once."""
    return init_layout(tensor=tensor, context=context, device="cpu", timeout_seconds=TIMEOUT)


def timeouts(layout: Layout) -> list[float]:
    """Seconds after which a collective of each of the layout's groups gives up."""
    groups = (layout.tensor_group, layout.context_group, layout.data_context_group, dist.group.WORLD)
    # torch has no public name for the time-out of a group
    backends = [group._get_backend(layout.device) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def gathered_is_freed(layout: Layout) -> bool:
    """Whether what was gathered goes when its last user does, while the graph waits for the backward."""
    finish = start_gather(torch.ones(3, requires_grad=True), layout.context_group, "keys")
    gathered = finish()
    graph, storage = gathered.sum(), StorageWeakRef(gathered.untyped_storage())
    del finish, gathered
    return storage.expired() and graph.grad_fn is not None


def recomputation(kind: str, layout: Layout, found: dict) -> None:
    """Gradients with and without recomputation, and what the layers measure."""
    case = config(kind, 200, 20, False)
    plain, _ = run(case, layout)
    again, _ = run(case, layout, recompute=True)
    found[f"{kind} recompute equal"] = all(torch.equal(plain[n], again[n]) for n in plain)


def main(result: str) -> None:
    """Run all cases; rank 0 writes them."""
    found: dict = {}
    cases = {name: config(*shape) for name, shape in SEQUENCES.items()}
    alone = lay_out(1, 1)
    want = {name: run(case, alone) for name, case in cases.items()}
    for tensor, context in LAYOUTS[dist.get_world_size()]:
        layout = lay_out(tensor, context)
        found[f"tp{tensor} cp{context} timeouts"] = timeouts(layout)
        for name, case in cases.items():
            ledger.clear()
            got, measured = run(case, layout)
            found[f"{name} tp{tensor} cp{context}"] = difference(got, want[name][0])
            found[f"{name} tp{tensor} cp{context} measured"] = [measured, want[name][1]]
            found[f"{name} tp{tensor} cp{context} bytes"] = dict(ledger)
        if (tensor, context) == (1, 2):
            found["gathered is freed"] = gathered_is_freed(layout)
            for kind in ("swa", "freesolo", "freesolo_l", "l2a"):
                recomputation(kind, layout, found)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
