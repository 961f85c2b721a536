"""`longpitch bench step`: a recipe's whole training step with each attention kind, and where its time goes.

One GPU, or several under torchrun with the recipe's parallel layout; random tokens, the engine that `train` uses.
"dense" is the same model with torch's own attention (SDPA), with the fastest kernel that torch has (cuDNN's);
"dense-fa2" takes FlashAttention-2 instead. With context parallelism "dense" is our own kernels, and there is no
"dense-fa2".
"""

import gc
import os
import re
import time
from dataclasses import replace
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from launch.bench.timing import machine
from launch.train import draw_model, optimizer_settings, precision_of, short_collections
from megatron_ext import attention
from megatron_ext.engine import ModelInput, TrainEngine
from megatron_ext.model import slice_context
from megatron_ext.parallel.layout import Layout, init_layout, pick_device
from megatron_ext.parallel.slices import padded_length
from recipes.errors import UserError
from recipes.kinds import KINDS
from recipes.load import check_kernels, check_world
from recipes.schema import Recipe

FA2 = "-fa2"
# names of GPU kernels -> what they do; the first that matches counts, the rest are elementwise work and norms
GROUPS = (
    ("attention", r"window|select|read_|prepare|pool|leave|order|offset|merge|norm_bwd|sum_runs|sum_slots|rotate"
                  r"|rows_|list_kernel|gather_kernel|scatter_kernel|flash|cudnn.*(attn|sdpa|mha)|fmha|sdpa"),
    ("matmul", r"gemm|nvjet|cutlass|xmma|cublas"),
    ("optimizer", r"adam|multi_tensor|l2norm"),
    ("copies", r"memcpy|memset"),
    ("communication", r"nccl"),
)  # fmt: skip


def bench_step(recipe: Recipe, kinds: tuple[str, ...], *, micro_batch: int, steps: int) -> list[dict]:
    """Time training steps of one micro-batch; print and return one row a kind.

    Args:
        recipe: its model, optimizer, precision and parallel layout are used; data, run_dir and initial weights are not.
        kinds: attention kinds to put into the same model.
        micro_batch: sequences per step of each data-parallel replica.
        steps: timed steps, after 3 to warm up; the median counts.

    Raises:
        UserError: the ranks that were started do not fit the parallel layout, a GPU's kernels do not take the sizes, or
            "-fa2" with context parallelism.
    """
    parallel = recipe.parallel
    if parallel.context > 1 and any(kind.endswith(FA2) for kind in kinds):
        raise UserError(
            f"parallel.context = {parallel.context}: FlashAttention-2 has no rows there; choose other kinds"
        )
    check_world(parallel, int(os.environ.get("WORLD_SIZE", "1")))
    on_gpu = pick_device("auto").type == "cuda"
    for kind in kinds:
        check_kernels(_with_kind(recipe, kind).model, on_gpu=on_gpu, context=parallel.context)
    layout = init_layout(
        tensor=parallel.tensor, context=parallel.context, device="auto", timeout_seconds=parallel.timeout_seconds
    )
    where = machine()
    length = recipe.model.seq_length
    if layout.rank == 0:
        print(
            f"{recipe.model.num_layers} layers x {recipe.model.hidden_size}, {micro_batch} x {length} tokens; "
            f"GPUs: {layout.data} replicas x {layout.context} context x {layout.tensor} tensor, "
            f"ZeRO-{parallel.zero_stage}; {where}"
        )
    rows = []
    for kind in kinds:
        sdpa = [SDPBackend.FLASH_ATTENTION] if kind.endswith(FA2) else attention.SDPA_FASTEST_FIRST
        with patch.object(attention, "SDPA_FASTEST_FIRST", sdpa):
            row = {"kind": kind, **_measure(_with_kind(recipe, kind), layout, micro_batch, steps)}
        rows.append(row)
        if layout.rank == 0:
            _print(row)
    return rows


def _print(row: dict) -> None:
    shares = "  ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
    print(
        f"{row['kind']:<12} {row['tokens_per_second']:>9.0f} tokens/s  {row['step_ms']:.1f} ms a step  "
        f"peak {row['peak_gib']:.1f} GiB  ms on the GPU: {shares}",
        flush=True,
    )


def _with_kind(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with another attention; where that has no gates, none are named among what trains."""
    kind = kind.removesuffix(FA2)
    model = replace(recipe.model, attention=replace(recipe.model.attention, kind=kind))
    train = recipe.train
    gate = KINDS[kind].gate
    if gate is None or not gate.learned:
        train = replace(train, train_only=[pattern for pattern in train.train_only if pattern != "router"])
    return replace(recipe, model=model, train=train)


def _measure(recipe: Recipe, layout: Layout, micro_batch: int, steps: int) -> dict:
    engine = _engine(recipe, layout, micro_batch)
    batch = _random_batch(recipe, layout, micro_batch)
    with short_collections():
        for _ in range(3):
            engine.train_step([batch], weight=float(batch.weights.numel()))
        torch.cuda.reset_peak_memory_stats()
        times = sorted(_timed(engine, batch) for _ in range(steps))
        step = times[len(times) // 2]
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            engine.train_step([batch], weight=float(batch.weights.numel()))
            torch.cuda.synchronize()
    tokens = micro_batch * recipe.model.seq_length * layout.data
    row = {
        "tokens_per_second": tokens / step,
        "step_ms": step * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "ms": _by_group(trace, step * 1e3),
    }
    engine.close()
    del engine
    gc.collect()  # DeepSpeed's objects hold one another; the next kind's peak is to be its own
    torch.cuda.empty_cache()
    return row


def _engine(recipe: Recipe, layout: Layout, micro_batch: int) -> TrainEngine:
    return TrainEngine(
        draw_model(recipe, layout),
        layout,
        optimizer_settings(recipe),
        zero_stage=recipe.parallel.zero_stage,
        dtype=precision_of(recipe, layout.device),
        micro_batch=micro_batch,
        accumulation=1,
        loss_chunk=recipe.train.loss_chunk,
    )


def _random_batch(recipe: Recipe, layout: Layout, micro_batch: int) -> ModelInput:
    """This rank's slice of random sequences."""
    model, ranks = recipe.model, layout.context
    length = padded_length(model.seq_length, ranks, model.attention.query_block) // ranks
    shape = (micro_batch, length)
    tokens, labels = (torch.randint(model.vocab_size, shape, device=layout.device) for _ in range(2))
    doc_starts = torch.zeros(shape, dtype=torch.int64, device=layout.device)
    context = slice_context(model, doc_starts, start=layout.context_rank * length, length=model.seq_length)
    return ModelInput(tokens, labels, torch.ones(shape, device=layout.device), context)


def _timed(engine: TrainEngine, batch: ModelInput) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.train_step([batch], weight=float(batch.weights.numel()))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _by_group(trace: profile, step_ms: float) -> dict[str, float]:
    """GPU ms by `GROUPS`; "waiting" is what is left of the step."""
    totals = dict.fromkeys([name for name, _ in GROUPS] + ["elementwise"], 0.0)
    for event in trace.key_averages():
        found = (name for name, pattern in GROUPS if re.search(pattern, event.key, re.IGNORECASE))
        totals[next(found, "elementwise")] += event.self_device_time_total / 1e3
    return totals | {"waiting": max(0.0, step_ms - sum(totals.values()))}
