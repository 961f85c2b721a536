"""The chunked linear cross entropy gives torch's own value and gradients, whatever the chunk and the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.loss import linear_cross_entropy
from tests.numerics import RTOL, assert_close, out_and_grads

N, WIDTH, VOCABULARY = 23, 12, 31


def plain(hidden, weight, labels, token_weights):
    """The definition, with all logits at once."""
    return (F.cross_entropy(hidden @ weight.t(), labels, reduction="none") * token_weights).sum()


def problem(dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Differentiable inputs, labels that reach both ends of the vocabulary, weights with zeros among them."""
    inputs = {"hidden": torch.randn(N, WIDTH, dtype=dtype), "weight": torch.randn(VOCABULARY, WIDTH, dtype=dtype)}
    labels = torch.randint(VOCABULARY, (N,))
    labels[0], labels[-1] = VOCABULARY - 1, 0
    token_weights = torch.rand(N, dtype=torch.float64) * 3
    token_weights[torch.arange(N) % 4 == 1] = 0
    return inputs, labels, token_weights


def compare(inputs, labels, token_weights, *, chunk: int, rtol: float, d_out: float = 1.0) -> None:
    """Value and both gradients against the definition in fp64."""
    wide = {name: x.double() for name, x in inputs.items()}
    want = out_and_grads(lambda **x: plain(**x, labels=labels, token_weights=token_weights), wide, torch.tensor(d_out))
    got = out_and_grads(
        lambda **x: linear_cross_entropy(**x, labels=labels, token_weights=token_weights, chunk=chunk),
        inputs,
        torch.tensor(d_out),
    )
    for name in want:
        assert_close(name, got[name], want[name], rtol=rtol)
    for name, x in inputs.items():
        assert got[f"d{name}"].dtype == x.dtype


@pytest.mark.parametrize("chunk", [1, 7, N, N + 5])
def test_equals_cross_entropy(chunk):
    compare(*problem(), chunk=chunk, rtol=RTOL[torch.float64])


@pytest.mark.parametrize("d_out", [0.0, -2.5, 1e-3])
def test_gradients_scale_with_the_upstream_one(d_out):
    compare(*problem(), chunk=7, rtol=RTOL[torch.float64], d_out=d_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_close_to_fp64(dtype):
    inputs, labels, token_weights = problem(dtype)
    compare(inputs, labels, token_weights.float(), chunk=7, rtol=RTOL[dtype])


def test_value_of_bf16_is_fp32():
    inputs, labels, token_weights = problem(torch.bfloat16)
    assert linear_cross_entropy(**inputs, labels=labels, token_weights=token_weights, chunk=7).dtype == torch.float32


def test_weight_gradient_does_not_lose_small_parts_in_bf16():
    """4096 equal parts summed one chunk at a time: a bf16 sum would stop growing at 256."""
    hidden = torch.ones(4096, 2, dtype=torch.bfloat16)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, torch.ones(4096), chunk=1).backward()
    assert weight.grad.tolist() == [[-2048, -2048], [2048, 2048]]


def test_tokens_of_weight_zero_do_not_matter():
    inputs, labels, token_weights = problem()
    leaves = [x.requires_grad_() for x in inputs.values()]
    loss = linear_cross_entropy(*leaves, labels, token_weights, chunk=7)
    d_hidden, d_weight = torch.autograd.grad(loss, leaves)
    off = token_weights == 0
    assert off.any() and (d_hidden[off] == 0).all() and (d_hidden[~off] != 0).any(dim=1).all()
    other = labels.where(~off, (labels + 1) % VOCABULARY)
    again = linear_cross_entropy(*leaves, other, token_weights, chunk=7)
    assert torch.equal(again, loss)
    assert torch.equal(torch.autograd.grad(again, leaves[1])[0], d_weight)


def test_all_weights_zero():
    inputs, labels, token_weights = problem()
    leaves = [x.requires_grad_() for x in inputs.values()]
    loss = linear_cross_entropy(*leaves, labels, torch.zeros_like(token_weights), chunk=7)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_input_frozen(trained):
    inputs, labels, token_weights = problem()
    want = out_and_grads(
        lambda **x: plain(**x, labels=labels, token_weights=token_weights), inputs, torch.tensor(1.0).double()
    )
    inputs[trained].requires_grad_()
    linear_cross_entropy(**inputs, labels=labels, token_weights=token_weights, chunk=7).backward()
    assert_close(trained, inputs[trained].grad, want[f"d{trained}"], rtol=1e-9)
    assert [x.grad is None for x in inputs.values()].count(True) == 1


def test_large_logits_stay_finite():
    inputs, labels, token_weights = problem()
    inputs["hidden"] *= 1e4
    compare(inputs, labels, token_weights, chunk=7, rtol=RTOL[torch.float64])


def test_without_gradients():
    inputs, labels, token_weights = problem()
    want = plain(**inputs, labels=labels, token_weights=token_weights)
    inputs["weight"].requires_grad_()
    with torch.no_grad():
        got = linear_cross_entropy(**inputs, labels=labels, token_weights=token_weights, chunk=7)
    assert not got.requires_grad
    assert_close("loss", got, want, rtol=1e-9)


class _CountProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.mm.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["inputs without gradient", "no_grad"])
def test_evaluation_makes_no_gradients(mode):
    """One product a chunk: an evaluation that also built the gradients would cost three times as much."""
    inputs, labels, token_weights = problem()
    for x in inputs.values():
        x.requires_grad_(mode == "no_grad")
    with torch.no_grad(), _CountProducts() as products:
        linear_cross_entropy(**inputs, labels=labels, token_weights=token_weights, chunk=7)
    assert products.count == 4
