"""`longpitch bench`: time and memory of our attention beside SDPA's, in one run on one GPU.

Every figure is a median. What is reported is the ratio: an absolute time holds for the GPU it was measured on.
"""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.freesolo import freesolo_attention
from kernels.rope import rope_tables

LENGTHS = (4096, 16384, 32768, 65536, 131072, 262144)
_GRAPH_UP_TO = 16384  # tokens up to which launches weigh enough to time a CUDA graph too


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
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {date.today()}"
    print(f"FreeSolo and SDPA, bf16, batch 1, {heads} heads x {head_dim}; {where}")
    print("ms forward / backward; in brackets replayed as a CUDA graph; peak GB above inputs and outputs")
    rows = []
    for length in lengths:
        inputs = _inputs(length, heads, head_dim)
        row = {"length": length}
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            row[name] = _measure(_sdpa(backend, *inputs), inputs, graph=length <= _GRAPH_UP_TO)
            print(f"{length:>7} {name:<14} {_text(row[name])}", flush=True)
        for kind in kinds:
            for weight in lam:
                name = f"{kind} lam={weight:g}"
                call, leaves = _freesolo(*inputs, lam=weight, retain=retain if kind == "fs_l" else None)
                row[name] = _measure(call, leaves, graph=length <= _GRAPH_UP_TO)
                print(f"{length:>7} {name:<14} {_text(row[name])}   {_ratios(row, name)}", flush=True)
        rows.append(row)
    if json_path is not None:
        json_path.write_text(json.dumps({"where": where, "heads": heads, "head_dim": head_dim, "rows": rows}, indent=1))
    return rows


def _inputs(length: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, length, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )

    return call


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


def _measure(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], *, graph: bool) -> dict[str, float]:
    """Median ms and peak bytes of forward and backward."""
    out = call()
    d_out = torch.randn_like(out)

    def backward(out: Tensor = out) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    backward()
    figures = {"forward_ms": _median(call), "backward_ms": _median(backward)}
    del out, backward
    figures |= _graph_times(call, leaves, d_out) if graph else {}
    return figures | _peaks(call, leaves, d_out)


def _median(call: Callable[[], object]) -> float:
    """Of at least five calls; of one alone the clock, which heat moves by a tenth, would decide."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return triton.testing.do_bench(call, warmup=30, rep=max(150, 6 * began.elapsed_time(ended)), return_mode="median")


def _graph_times(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], d_out: Tensor) -> dict[str, float]:
    """Forward and backward captured each in a CUDA graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(call(), leaves, d_out)
    torch.cuda.current_stream().wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = call()
    with torch.cuda.graph(backward, pool=forward.pool()):
        grads = torch.autograd.grad(out, leaves, d_out)
    times = {"graph_forward_ms": _median(forward.replay), "graph_backward_ms": _median(backward.replay)}
    del out, grads
    return times


def _peaks(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], d_out: Tensor) -> dict[str, float]:
    """Largest GB above inputs and outputs; gradients count as outputs of the backward."""
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    torch.cuda.synchronize()
    size = out.numel() * out.element_size()
    forward = torch.cuda.max_memory_allocated() - base - size
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, leaves, d_out)
    torch.cuda.synchronize()
    results = size + sum(x.numel() * x.element_size() for x in grads)
    backward = torch.cuda.max_memory_allocated() - base - results
    return {"forward_peak_gb": forward / 1e9, "backward_peak_gb": backward / 1e9}


def _text(figures: dict[str, float]) -> str:
    text = f"{figures['forward_ms']:8.3f} / {figures['backward_ms']:8.3f}"
    if "graph_forward_ms" in figures:
        text += f" [{figures['graph_forward_ms']:.3f} / {figures['graph_backward_ms']:.3f}]"
    return text + f"   peak {figures['forward_peak_gb']:.3f} / {figures['backward_peak_gb']:.3f}"


def _ratios(row: dict, name: str) -> str:
    """How many times faster than each SDPA backend, forward / backward, by the better way of launching each."""

    def best(figures: dict[str, float], direction: str) -> float:
        return min(value for key, value in figures.items() if key.endswith(f"{direction}_ms"))

    parts = []
    for other in ("cudnn", "fa2"):
        forward, backward = (best(row[other], way) / best(row[name], way) for way in ("forward", "backward"))
        parts.append(f"{forward:.1f}x / {backward:.1f}x {other}")
    return "  ".join(parts)


if __name__ == "__main__":
    bench_freesolo()
