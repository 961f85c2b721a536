"""How the tests compare tensors, run an operator with its gradients, and find the test vectors."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VECTORS = Path(__file__).parent / "vectors"
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_close(name: str, got: Tensor, want: Tensor, *, rtol: float, atol: float = 0.0) -> None:
    """Same shape, finite, and the RMS of the difference at most `rtol` times the RMS of `want`.

    `atol` is added to that bound, for results that are zero but for rounding.
    """
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.isfinite().all(), f"{name}: {(~got.isfinite()).sum()} of {got.numel()} numbers are not finite"
    got, want = got.detach().double(), want.detach().double()
    error, size = (got - want).square().mean().sqrt(), want.square().mean().sqrt()
    assert error <= rtol * size + atol, f"{name}: RMS error {error:.2e} of {size:.2e} is above {rtol:.0e} relative"


def out_and_grads(function: Callable[..., Tensor], inputs: dict[str, Tensor], d_out: Tensor) -> dict[str, Tensor]:
    """Run `function(**inputs)` forward and backward: {"out": ..., "dq": ..., ...}, a gradient for each input."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def load_arrays(name: str) -> dict[str, np.ndarray]:
    """Everything that one file of tests/vectors/ holds.

    Most fp32 arrays lie there as `NAME.planes`, uint8 [2 or 4, ...]: all lowest bytes first and so on, which compresses
    better. Where there are two planes, the lower two bytes of every number are zero (it fits bf16).
    """
    with np.load(VECTORS / f"{name}.npz") as file:
        arrays = dict(file)
    for key in [key for key in arrays if key.endswith(".planes")]:
        planes = arrays.pop(key)
        whole = np.zeros((*planes.shape[1:], 4), np.uint8)
        whole[..., 4 - len(planes) :] = np.moveaxis(planes, 0, -1)
        arrays[key.removesuffix(".planes")] = whole.view(np.float32)[..., 0]
    return arrays


def load_vector(name: str) -> tuple[dict[str, Tensor], dict]:
    """Arrays and parameters of one test vector."""
    arrays = load_arrays(name)
    params = json.loads(str(arrays.pop("params"))) if "params" in arrays else {}
    return {key: torch.from_numpy(x) for key, x in arrays.items()}, params
