"""Every kernel compiles for a Hopper GPU, which is not needed for it.

The interpreter accepts programs that the compiler refuses, such as branches that give a name different shapes.
"""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.triton_rows
from kernels.triton_freesolo import triton_freesolo, triton_read_cells
from kernels.triton_rope import triton_apply_rope
from kernels.triton_sparse_query import triton_rows_attention

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int32: "i32",
         torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip


def compile_only(kernel: JITFunction, *args, grid, warmup, **kwargs):
    """Compile what a launch would run."""
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
    compiled.append(triton.compile(source, target=HOPPER, options=options).metadata)


compiled = []


@pytest.fixture(autouse=True)
def _compile(monkeypatch):
    compiled.clear()
    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield
    assert compiled
    shared = {kernel.name: kernel.shared for kernel in compiled}
    assert max(shared.values()) <= 227 * 1024, f"more shared memory than a Hopper multiprocessor has: {shared}"


def leaves(*shapes, dtype=torch.bfloat16):
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


RANKING = {"top_k": 4, "sigma": 4.0, "lam": 1.0, "recent": 8, "deterministic": False}


@pytest.mark.parametrize(("D", "G", "retain"), [(64, 2, 64), pytest.param(96, 1, None, marks=pytest.mark.slow)])
def test_freesolo(D, G, retain):
    q, k, v = leaves((1, 256, 2, D), (1, 256, G, D), (1, 256, G, D))
    cos = torch.zeros(256, D // 2)
    sizes = {"window": 512, "cell_size": 32, "query_block": 128, "eps": 1e-8}
    out, _ = triton_freesolo(q, k, v, torch.ones(2), torch.ones(D), cos, cos, retain=retain, **sizes, **RANKING)
    out.backward(torch.zeros_like(out))


def test_read_cells():
    q, k, v = leaves((1, 256, 2, 64), (1, 1, 8, 32, 64), (1, 1, 8, 32, 64))
    index = torch.arange(8).expand(1, 1, 8)
    out, _ = triton_read_cells(q, k, v, index, query_start=128, query_block=128, retain=64, **RANKING)
    out.backward(torch.zeros_like(out))


@pytest.mark.parametrize(
    ("D", "window", "documents", "sparse", "deterministic", "hopper"),
    [
        pytest.param(128, 4095, True, False, False, True, id="window"),
        pytest.param(128, None, False, True, False, True, id="sparse"),
        pytest.param(96, None, True, True, True, False, id="deterministic"),
        pytest.param(64, None, False, True, False, True, marks=pytest.mark.slow, id="d64"),
        pytest.param(128, None, False, True, False, False, marks=pytest.mark.slow, id="other-gpus"),
    ],
)
def test_rows(D, window, documents, sparse, deterministic, hopper, monkeypatch):
    monkeypatch.setattr(kernels.triton_rows, "on_hopper", lambda x: hopper)
    q, k, v = leaves((1, 256, 4, D), (1, 256, 2, D), (1, 256, 2, D))
    options = {
        "first_key": torch.zeros(1, 256, dtype=torch.int64) if documents else None,
        "active": torch.ones(1, 256, dtype=torch.bool) if sparse else None,
    }
    out, lse = triton_rows_attention(q, k, v, window=window, scale=1.0, deterministic=deterministic, **options)
    (out.sum() + lse.sum()).backward()


def test_rope():
    (q,) = leaves((2, 256, 4, 96))
    out = triton_apply_rope(q, torch.zeros(256, 48), torch.zeros(256, 48))
    out.backward(torch.zeros_like(out))
