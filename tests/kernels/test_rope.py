"""Rotary tables and rotation."""

import pytest
import torch

from kernels.rope import apply_rope, rope_tables
from tests.numerics import RTOL, assert_close


@pytest.mark.parametrize("head_dim", [2, 6, 96])
def test_rotation_is_complex_multiplication(head_dim):
    x, half = torch.randn(2, 50, 3, head_dim, dtype=torch.float64), head_dim // 2
    angle = torch.arange(50, dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
    got = apply_rope(x, angle.cos(), angle.sin())
    assert_close("rotated", got, torch.cat([turned.real, turned.imag], dim=-1), rtol=RTOL[torch.float64])


def test_tables_are_exact_far_out():
    position = torch.tensor([15_962, 131_071, 1_000_003])
    cos, sin = rope_tables(position, 64, 5e6)
    angle = position.double()[:, None] * 5e6 ** (-torch.arange(0, 64, 2).double() / 64)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, angle.cos().float()) and torch.equal(sin, angle.sin().float())


def test_products_depend_on_distance_only():
    q, k = (torch.randn(1, 1, 1, 64, dtype=torch.float64).expand(1, 40, 1, 64) for _ in range(2))
    q, k = (apply_rope(x, *rope_tables(torch.arange(40), 64, 10000.0))[0, :, 0] for x in (q, k))
    products = q @ k.T
    assert_close("shifted", products[9:, 9:], products[:-9, :-9], rtol=1e-6)


def test_rows_may_have_their_own_positions():
    x, positions = torch.randn(2, 8, 3, 16), torch.stack([torch.arange(8), torch.arange(100, 108)])
    whole = apply_rope(x, *rope_tables(positions, 16, 10000.0))
    rows = [apply_rope(x[b : b + 1], *rope_tables(positions[b], 16, 10000.0)) for b in range(2)]
    assert torch.equal(whole, torch.cat(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_and_low_precision_rotates_in_fp32(dtype):
    x, tables = torch.randn(1, 9, 2, 8).to(dtype), rope_tables(torch.arange(9), 8, 10000.0)
    got = apply_rope(x, *tables)
    assert got.dtype == dtype
    assert torch.equal(got, apply_rope(x.double() if dtype == torch.float64 else x.float(), *tables).to(dtype))


def test_errors():
    cos, sin = rope_tables(torch.arange(4), 8, 10000.0)
    with pytest.raises(ValueError, match="even.*7"):
        rope_tables(torch.arange(4), 7, 10000.0)
    with pytest.raises(ValueError, match="integers.*float32"):
        rope_tables(torch.arange(4.0), 8, 10000.0)
    with pytest.raises(ValueError, match="even.*7"):
        apply_rope(torch.zeros(1, 4, 1, 7), cos, sin)
    with pytest.raises(ValueError, match=r"cos must be \[5, 4\].*got \[4, 4\]"):
        apply_rope(torch.zeros(1, 5, 1, 8), cos, sin)
    with pytest.raises(ValueError, match="sin must be"):
        apply_rope(torch.zeros(1, 4, 1, 8), cos, sin[:, :2])
