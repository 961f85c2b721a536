"""Gates: hard forward, soft backward, and draws that depend on seed, step, layer and position alone."""

import pytest
import torch

from megatron_ext.router import ContextFreeGate, Router, leak_draw, open_draw
from megatron_ext.sequence_context import SequenceContext


class Config:
    """What a gate reads of megatron-core's configuration."""

    hidden_size = 16
    params_dtype = torch.float32


def router(**changes) -> Router:
    return Router(Config, **({"temperature": 0.1, "threshold": 0.5} | changes))


def context(**changes) -> SequenceContext:
    tables = {"rope_cos": torch.empty(0), "rope_sin": torch.empty(0)}
    return SequenceContext(length=100, **tables, **changes)


def test_every_gate_starts_open():
    gates = router()(torch.randn(100, 2, 16), context(), 1)
    assert gates.is_open.all() and (gates.value == 1).all() and (gates.probability == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gate_is_hard_and_its_gradient_that_of_p(dtype):
    gate = router(temperature=0.7, threshold=0.6).to(dtype)
    gate.weight.data.normal_()
    z = torch.randn(100, 2, 16).to(dtype).requires_grad_()
    gates = gate(z, context(), 1)
    wide = torch.promote_types(dtype, torch.float32)
    p = (z.to(wide) @ gate.weight.to(wide)[0] / 0.7).sigmoid()
    torch.testing.assert_close(gates.probability, p, rtol=1e-5, atol=1e-6)
    assert torch.equal(gates.is_open, gates.probability >= 0.6)
    assert torch.equal(gates.value, gates.is_open.to(wide))
    d_value = torch.randn_like(gates.value)
    got = torch.autograd.grad(gates.value, (z, gate.weight), d_value)
    want = torch.autograd.grad(p, (z, gate.weight), d_value)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-4)


def test_threshold_itself_is_open():
    assert router(threshold=0.5)(torch.zeros(1, 1, 16), context(), 1).is_open.all()


def test_leak_draws_come_as_often_as_asked():
    draws = [leak_draw(0.1, seed=7, step=step, layer=layer) for step in range(500) for layer in range(1, 33)]
    assert sum(draws) / len(draws) == pytest.approx(0.1, abs=0.01)
    per_layer = [sum(draws[layer::32]) for layer in range(32)]
    assert min(per_layer) > 20 and max(per_layer) < 90  # 50 expected: no layer and no step is left out


def test_leak_draw_depends_on_each_argument():
    def draws(**changes) -> list[bool]:
        return [leak_draw(0.5, **({"seed": 1, "layer": 2, "step": step} | changes)) for step in range(64)]

    assert draws() == draws()
    assert draws() != draws(seed=2) and draws() != draws(layer=3)
    assert not any(leak_draw(0.0, seed=s, step=0, layer=1) for s in range(100))
    assert all(leak_draw(1.0, seed=s, step=0, layer=1) for s in range(100))


def test_open_draw_is_the_same_in_slices():
    positions = torch.arange(1000)
    whole = open_draw(positions, 0.3, seed=5, step=2, layer=4)
    parts = [open_draw(part, 0.3, seed=5, step=2, layer=4) for part in positions.split(300)]
    assert torch.equal(whole, torch.cat(parts))


def test_open_draw_comes_as_often_as_asked():
    positions = torch.arange(100_000)
    for probability in (0.0, 0.02, 0.5, 1.0):
        share = open_draw(positions, probability, seed=5, step=2, layer=4).double().mean().item()
        assert share == pytest.approx(probability, abs=0.01)
    other = open_draw(positions, 0.5, seed=5, step=3, layer=4) == open_draw(positions, 0.5, seed=5, step=2, layer=4)
    assert other.double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_context_free_gate_looks_at_positions_only():
    gate = ContextFreeGate(Config, open_probability=0.4)
    one = gate(torch.randn(60, 2, 16), context(seed=3, step=1), 2)
    later = gate(torch.randn(40, 2, 16), context(seed=3, step=1, start=20), 2)
    assert torch.equal(one.is_open[20:], later.is_open[:40]) and one.probability is None
    assert torch.equal(one.is_open[:, 0], one.is_open[:, 1])
    assert torch.equal(one.value, one.is_open.float())
    assert not list(gate.parameters())
