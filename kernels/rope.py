"""Rotary position embedding, rotate-half form: dimension d turns together with dimension d + D/2.

Shapes: B batch, T tokens, H heads, D head dim.
"""

import torch
from torch import Tensor

from kernels.attention import compute_dtype
from kernels.triton_rope import triton_apply_rope
from kernels.triton_tools import use_triton


def rope_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles.

    The angles are taken in float64 and only the results are rounded: in bf16 position 15,962 would become 15,968.

    Args:
        positions: integer positions [...].
        head_dim: D, even.
        base: the slowest wavelength is about 2 pi base.

    Returns:
        cos, sin, each fp32 [..., D/2].

    Raises:
        ValueError: odd `head_dim`, or positions that are not integers.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even to rotate in pairs, got {head_dim}")
    if positions.is_floating_point():
        raise ValueError(f"positions must be integers, got {positions.dtype}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.double()[..., None] * float(base) ** -exponent
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> Tensor:
    """Rotate every head of `x` by its position's angles.

    Args:
        x: queries or keys [B, T, H, D], any float dtype; less than fp32 is rotated in fp32.
        cos, sin: [T, D/2], or [B, T, D/2] where rows have their own positions.
        backend: "auto" (Triton on CUDA, for fp64 and elsewhere the reference), "reference" or "triton".

    Returns:
        [B, T, H, D] in the dtype of `x`.

    Raises:
        ValueError: odd D, tables of another shape, an unknown or unavailable backend.
    """
    on_gpu = use_triton("apply_rope", backend, x)
    B, T, _, D = x.shape
    if D % 2:
        raise ValueError(f"head_dim must be even to rotate in pairs, got {D}")
    expected = f"{[T, D // 2]} or {[B, T, D // 2]} for x {list(x.shape)}"
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape not in ((T, D // 2), (B, T, D // 2)):
            raise ValueError(f"{name} must be {expected}, got {list(table.shape)}")
    if on_gpu:
        return triton_apply_rope(x, cos, sin)
    dtype = compute_dtype(x)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)  # [.., T, 1, D/2]
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
