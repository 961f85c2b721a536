"""How the operators are timed: medians of events, CUDA graphs, peaks, and torch's own attention to compare with."""

from collections.abc import Callable
from datetime import date

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

GRAPH_UP_TO = 16384  # tokens up to which launches weigh enough to time a CUDA graph too


def machine() -> str:
    """GPU, versions and date, for the head of a table."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {date.today()}"


def random_inputs(length: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, T, heads, D] and k, v [1, T, kv_heads, D] in bf16, the same in every run."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, length, n, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in (heads, kv_heads, kv_heads)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A call of torch's causal attention by one of its kernels."""

    def call() -> Tensor:
        with sdpa_kernel(backend):
            query, key, value = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
            )

    return call


def measure(call: Callable[[], Tensor], leaves: tuple[Tensor, ...], *, graph: bool) -> dict[str, float]:
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


def figures_text(figures: dict[str, float]) -> str:
    """One line of `measure`'s figures."""
    text = f"{figures['forward_ms']:8.3f} / {figures['backward_ms']:8.3f}"
    if "graph_forward_ms" in figures:
        text += f" [{figures['graph_forward_ms']:.3f} / {figures['graph_backward_ms']:.3f}]"
    return text + f"   peak {figures['forward_peak_gb']:.3f} / {figures['backward_peak_gb']:.3f}"
