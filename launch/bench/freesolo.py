"""`longpitch bench freesolo`: time and memory of our attention beside SDPA's, in one run on one GPU.

Every figure is a median. What is reported is the ratio: an absolute time holds for the GPU it was measured on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kernels.freesolo import freesolo_attention
from kernels.rope import rope_tables
from launch.bench.timing import GRAPH_UP_TO, figures_text, machine, measure, random_inputs, sdpa

LENGTHS = (4096, 16384, 32768, 65536, 131072, 262144)


def bench_freesolo(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: int = 16,
    head_dim: int = 64,
    kinds: tuple[str, ...] = ("fs_l", "fs"),
    lam: tuple[float, ...] = (1.0, 0.0),
    retain: int = 64,
    json_path: Path | None = None,
) -> list[dict]:
    """Time FreeSolo's whole operator and causal SDPA (cuDNN, FlashAttention-2), bf16, batch 1; print and return rows.

    Inputs are random. With the paper's lam = 1 nearly all queries of a head then choose the same few cells (those of
    largest keys); with lam = 0 choices spread over all candidates. Trained models lie between.

    Args:
        lengths: tokens T.
        kinds: "fs_l" (retain best cells kept) and "fs" (every cell ranked).
        lam: weights of the positional term to measure.
        json_path: where the rows are written, with date, GPU and versions.
    """
    where = machine()
    print(f"FreeSolo and SDPA, bf16, batch 1, {heads} heads x {head_dim}; {where}")
    print("ms forward / backward; in brackets replayed as a CUDA graph; peak GB above inputs and outputs")
    rows = []
    for length in lengths:
        inputs = random_inputs(length, heads, heads, head_dim)
        row: dict[str, Any] = {"length": length}
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            row[name] = measure(sdpa(backend, *inputs), inputs, graph=length <= GRAPH_UP_TO)
            print(f"{length:>7} {name:<14} {figures_text(row[name])}", flush=True)
        for kind in kinds:
            for weight in lam:
                name = f"{kind} lam={weight:g}"
                call, leaves = _freesolo(*inputs, lam=weight, retain=retain if kind == "fs_l" else None)
                row[name] = measure(call, leaves, graph=length <= GRAPH_UP_TO)
                print(f"{length:>7} {name:<14} {figures_text(row[name])}   {_ratios(row, name)}", flush=True)
        rows.append(row)
    if json_path is not None:
        json_path.write_text(json.dumps({"where": where, "heads": heads, "head_dim": head_dim, "rows": rows}, indent=1))
    return rows


def _freesolo(
    q: Tensor, k: Tensor, v: Tensor, *, lam: float, retain: int | None
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    _, T, H, D = q.shape
    alpha = torch.ones(H, device="cuda", requires_grad=True)
    gain = torch.ones(D, device="cuda", requires_grad=True)
    cos, sin = rope_tables(torch.arange(T, device="cuda"), D, 10000.0)

    def call() -> Tensor:
        return freesolo_attention(q, k, v, alpha, gain, cos, sin, lam=lam, retain=retain)

    return call, (q, k, v, alpha, gain)


def _ratios(row: dict, name: str) -> str:
    """How many times faster than each SDPA backend, forward / backward, by the better way of launching each."""

    def best(figures: dict[str, float], direction: str) -> float:
        return min(value for key, value in figures.items() if key.endswith(f"{direction}_ms"))

    parts = []
    for other in ("cudnn", "fa2"):
        forward, backward = (best(row[other], way) / best(row[name], way) for way in ("forward", "backward"))
        parts.append(f"{forward:.1f}x / {backward:.1f}x {other}")
    return "  ".join(parts)
