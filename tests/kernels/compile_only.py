"""Compiles what a call of our operators would launch on some GPU, without that GPU: `compile_case` in a process of its
own, as it puts compiling in the place of launching for good.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.triton_readout
import kernels.triton_rows
from kernels.triton_freesolo import triton_freesolo, triton_read_cells
from kernels.triton_rope import triton_apply_rope
from kernels.triton_sparse_query import triton_rows_attention

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int32: "i32",
         torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # of one program, by compute capability


def compile_case(capability: int, case: str, options: dict) -> dict[str, int]:
    """Shared memory in bytes of every kernel that forward and backward of `case` launch."""
    shared: dict[str, int] = {}

    def compile_only(kernel: JITFunction, *args, grid, warmup, **kwargs):
        compiled = _compile(kernel, capability, args, kwargs).metadata
        shared[compiled.name] = max(shared.get(compiled.name, 0), compiled.shared)

    JITFunction.run = compile_only
    for module in (kernels.triton_rows, kernels.triton_readout):
        module.shared_memory = lambda device: SHARED_KIB[capability] * 1024
    kernels.triton_rows.on_hopper = lambda x: options.get("hopper", False)
    CASES[case](**{name: x for name, x in options.items() if name != "hopper"})
    return shared


def _compile(kernel: JITFunction, capability: int, args: tuple, kwargs: dict):
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor | GluonDescriptor):
            layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        multiple = isinstance(value, int) and value % 16 == 0
        if signature[name] != "constexpr" and (isinstance(value, torch.Tensor) or multiple):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _leaves(*shapes: tuple) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _freesolo(D: int, G: int, retain: int | None, top_k: int = 4) -> None:
    q, k, v = _leaves((1, 256, 2, D), (1, 256, G, D), (1, 256, G, D))
    cos = torch.zeros(256, D // 2)
    sizes = {"window": 512, "cell_size": 32, "query_block": 128, "eps": 1e-8, "top_k": top_k}
    ranking = {"sigma": 4.0, "lam": 1.0, "retain": retain, "recent": 8, "deterministic": False}
    out, _ = triton_freesolo(q, k, v, torch.ones(2), torch.ones(D), cos, cos, **sizes, **ranking)
    out.backward(torch.zeros_like(out))


def _read_cells(D: int) -> None:
    q, k, v = _leaves((1, 256, 2, D), (1, 1, 8, 32, D), (1, 1, 8, 32, D))
    index = torch.arange(8).expand(1, 1, 8)
    ranking = {"top_k": 2, "sigma": 4.0, "lam": 1.0, "retain": 64, "recent": 8, "deterministic": False}
    out, _ = triton_read_cells(q, k, v, index, query_start=128, query_block=128, **ranking)
    out.backward(torch.zeros_like(out))


def _rows(D: int, window: int | None, sparse: bool, deterministic: bool) -> None:
    q, k, v = _leaves((1, 256, 4, D), (1, 256, 2, D), (1, 256, 2, D))
    options = {
        "first_key": None if window is None else torch.zeros(1, 256, dtype=torch.int64),
        "active": torch.ones(1, 256, dtype=torch.bool) if sparse else None,
    }
    out, lse = triton_rows_attention(q, k, v, window=window, scale=1.0, deterministic=deterministic, **options)
    (out.sum() + lse.sum()).backward()


def _rope() -> None:
    (q,) = _leaves((2, 256, 4, 96))
    out = triton_apply_rope(q, torch.zeros(256, 48), torch.zeros(256, 48))
    out.backward(torch.zeros_like(out))


CASES = {"freesolo": _freesolo, "read_cells": _read_cells, "rows": _rows, "rope": _rope}
