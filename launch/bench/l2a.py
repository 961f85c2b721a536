"""`longpitch bench l2a`: time and memory of L2A's two attentions beside SDPA's, in one run on one GPU.

The sparse queries are random ones of a given share; their times include listing them. 100 % is what a layer asks for
when every gate is open by decree (leak, warm-up: `active=None`) and may be SDPA itself; "100 % found open" is a mask
that happens to be full, which no host knows of.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kernels.sparse_query import sparse_query_attention
from kernels.window import sliding_window_attention
from launch.bench.timing import GRAPH_UP_TO, figures_text, machine, measure, random_inputs, sdpa

LENGTHS = (4096, 32768, 131072)
SHARES = (1.0, 0.5, 0.2, 0.1, 0.01)


def bench_l2a(
    lengths: tuple[int, ...] = LENGTHS,
    *,
    heads: int = 28,
    kv_heads: int = 4,
    head_dim: int = 128,
    shares: tuple[float, ...] = SHARES,
    window: int = 4095,
    json_path: Path | None = None,
) -> list[dict]:
    """Time causal SDPA, sparse queries at some open shares and the sliding window; bf16, batch 1, random inputs.

    Args:
        lengths: tokens T.
        shares: of queries that are open, drawn for each token by itself.
        window: tokens a window holds before the query's own.
        json_path: where the rows are written, with date, GPU and versions.
    """
    where = machine()
    print(f"L2A and SDPA, bf16, batch 1, {heads} query / {kv_heads} kv heads x {head_dim}; {where}")
    print("ms forward / backward; in brackets replayed as a CUDA graph; peak GB above inputs and outputs")
    rows = []
    for length in lengths:
        inputs = random_inputs(length, heads, kv_heads, head_dim)
        row: dict[str, Any] = {"length": length}
        for name, call in _calls(inputs, shares, window).items():
            row[name] = measure(call, inputs, graph=length <= GRAPH_UP_TO)
            print(f"{length:>7} {name:<18} {figures_text(row[name])}", flush=True)
        rows.append(row)
    if json_path is not None:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "window": window}
        json_path.write_text(json.dumps({"where": where, **sizes, "rows": rows}, indent=1))
    return rows


def _calls(
    inputs: tuple[Tensor, Tensor, Tensor], shares: tuple[float, ...], window: int
) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name."""
    q, k, v = inputs
    draw = torch.rand(q.shape[:2], device="cuda", generator=torch.Generator("cuda").manual_seed(1))

    def sparse(active: Tensor | None) -> Callable[[], Tensor]:
        return lambda: sparse_query_attention(q, k, v, active)

    calls = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v), "fa2": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v)}
    for share in shares:
        calls[f"{share:.0%} open"] = sparse(None if share == 1 else draw < share)
    calls["100% found open"] = sparse(torch.ones_like(draw, dtype=torch.bool))
    return calls | {f"window {window}": lambda: sliding_window_attention(q, k, v, window=window)}
