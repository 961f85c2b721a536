"""What the Triton kernels share: the choice of backend, padded head dims and rotation of half heads.

Shapes: T tokens, D head dim, DP padded head dim (a power of two, at least 16).
A padded head keeps its halves apart: lane j < DP/2 is dimension j, lane DP/2 + j is dimension D/2 + j, so that the
rotary partner of a lane is DP/2 away whatever D is.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.limits import MAX_HEAD_DIM

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)  # a logit that is not there; finite, so that a tile of them makes no NaN


def use_triton(operator: str, backend: str, *tensors: Tensor) -> bool:
    """Whether `backend` means the Triton kernels for these inputs.

    "auto" takes them on CUDA and the torch reference elsewhere; fp64, which the kernels do not have, is the
    reference's everywhere.

    Raises:
        ValueError: an unknown backend, or "triton" where it cannot run.
    """
    x = tensors[0]
    if backend == "reference":
        return False
    if backend == "auto":
        return x.is_cuda and all(t.dtype in TRITON_DTYPES for t in tensors)
    if backend != "triton":
        raise ValueError(f"{operator}: backend must be one of auto, reference, triton, got {backend!r}")
    if not x.is_cuda and not isinstance(rotate_pair, InterpretedFunction):
        raise ValueError(f"{operator}: backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1), got {x.device}")
    if any(t.dtype != x.dtype for t in tensors) or x.dtype not in TRITON_DTYPES:
        raise ValueError(f"{operator}: the Triton kernels take q, k and v all in bf16, fp16 or fp32, "
                         f"got {', '.join(str(t.dtype) for t in tensors)}")  # fmt: skip
    return True


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError for heads wider than the attention kernels take."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"the Triton kernels take a head dim of at most {MAX_HEAD_DIM}, got {head_dim}; "
                         "backend='reference' has no such limit")  # fmt: skip


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; the interpreter, which runs on a CPU, has no limit."""
    if device.type != "cuda":
        return 2**62
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block if torch.version.hip else properties.shared_memory_per_block_optin


def fine_dtype(dtype: torch.dtype) -> torch.dtype:
    """What holds numbers near 1 more finely than bf16 in as many bytes: rotated q, k, and rows in units of a size."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def padded_dim(head_dim: int) -> int:
    """DP: lanes that hold one head; tl.dot wants a power of two and at least 16."""
    return max(16, next_power_of_2(head_dim))


# In place of Triton's: called from the host, its own take as long as a tenth of a launch.


def cdiv(x: int, y: int) -> int:
    """x / y rounded up."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """The least power of two that is at least x, for x >= 1; 0 of 0."""
    return 1 << (x - 1).bit_length() if x > 0 else 0


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head of [B, T, H, D] whose last dim is dense."""
    return x.stride(0), x.stride(1), x.stride(2)


def dense_heads(x: Tensor) -> Tensor:
    """`x` itself if each head's D numbers lie side by side, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def head_lanes(D: tl.constexpr, DP: tl.constexpr):
    """Memory offset of each lane of a padded head, and whether it is there."""
    lane = tl.arange(0, DP)
    if D == DP:
        return lane, lane < D
    HALF: tl.constexpr = (D + 1) // 2
    inside = lane % (DP // 2)
    offset = (lane // (DP // 2)) * HALF + inside
    return offset, (inside < HALF) & (offset < D)


@triton.jit
def rotate_pair(first, second, cos, sin):
    """Turn dimension d together with dimension d + D/2; the inverse turn is the one with -sin."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def split_halves(x, ROWS: tl.constexpr, DP: tl.constexpr):
    """[ROWS, DP] -> its two halves [ROWS, DP/2]."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, DP // 2]), [0, 2, 1]))


@triton.jit
def dot(a, b, acc=None):
    """Matmul with fp32 sums; fp32 operands are multiplied in fp32, never in tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounding_rest(x, rounded):
    """What rounding to 16 bits left of fp32 x, as int8: a share of the largest that it can leave of that number."""
    UNIT: tl.constexpr = 127 * 2.0**8 if rounded.dtype == tl.bfloat16 else 127 * 2.0**11
    high = rounded.to(tl.float32)
    share = (x - high) / tl.where(high == 0, 1.0, high) * UNIT
    share = tl.where(high == 0, 0.0, tl.minimum(tl.maximum(share, -127.0), 127.0))
    return tl.floor(share + 0.5).to(tl.int8)


@triton.jit
def with_rest(rounded, rest):
    """fp32 x again, to 15 bits, or 18 of fp16."""
    UNIT: tl.constexpr = 127 * 2.0**8 if rounded.dtype == tl.bfloat16 else 127 * 2.0**11
    return rounded.to(tl.float32) * (1.0 + rest.to(tl.float32) / UNIT)
