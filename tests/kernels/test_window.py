"""Sliding-window attention against a T x T softmax, and identities that need no reference."""

import pytest
import torch
import torch.nn.functional as F

from kernels.window import sliding_window_attention
from tests.numerics import RTOL, assert_close, out_and_grads


def dense_with_mask(q, k, v, *, window, query_offset=0, first_key=None, scale=None):
    """The whole T x T mask at once, keys repeated to all heads."""
    (B, Tq, H, D), (Tk, G) = q.shape, k.shape[1:3]
    i = torch.arange(query_offset, query_offset + Tq)[:, None]
    j = torch.arange(Tk)
    visible = (j <= i) & (j >= i - (Tk if window is None else window))
    visible = visible.expand(B, 1, Tq, Tk)
    if first_key is not None:
        visible = visible & (j >= first_key[:, None, :, None])
    k, v = (x.repeat_interleave(H // G, dim=2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (D**-0.5 if scale is None else scale)
    weights = logits.exp() * visible  # small logits in these tests: no maximum to subtract
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def random_inputs(B, Tq, Tk, H, G, D, dtype=torch.float64):
    shapes = {"q": (B, Tq, H, D), "k": (B, Tk, G, D), "v": (B, Tk, G, D)}
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("B", "Tq", "Tk", "H", "G", "D", "window", "offset"),
    [
        pytest.param(1, 1, 1, 2, 1, 32, 512, 0, id="one-token"),
        pytest.param(2, 300, 300, 4, 2, 40, 0, 0, id="own-token-only"),
        pytest.param(1, 257, 257, 7, 1, 6, 100, 0, id="tail-of-one-gqa7"),
        pytest.param(2, 300, 300, 3, 3, 96, 5000, 0, id="window-beyond-everything"),
        pytest.param(1, 200, 513, 4, 1, 16, 130, 313, id="queries-at-the-end"),
        pytest.param(1, 70, 400, 2, 2, 16, 33, 201, id="queries-in-the-middle"),
        pytest.param(1, 200, 300, 2, 1, 16, None, 100, id="dense"),
        pytest.param(1, 129, 129, 2, 1, 1, 128, 0, id="window-is-block"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_dense(B, Tq, Tk, H, G, D, window, offset, dtype):
    inputs, d_out = random_inputs(B, Tq, Tk, H, G, D, dtype), torch.randn(B, Tq, H, D, dtype=torch.float64)
    kwargs = {"window": window, "query_offset": offset}
    got = out_and_grads(lambda q, k, v: sliding_window_attention(q, k, v, **kwargs), inputs, d_out.to(dtype))
    inputs = {name: x.double() for name, x in inputs.items()}
    want = out_and_grads(lambda q, k, v: dense_with_mask(q, k, v, **kwargs), inputs, d_out)
    for name in want:
        # with window 0, q and k have no gradient but rounding
        assert_close(name, got[name], want[name], rtol=RTOL[dtype], atol=torch.finfo(dtype).eps)


def test_scale_is_used():
    inputs = random_inputs(1, 40, 40, 2, 1, 8)
    got = sliding_window_attention(**inputs, window=7, scale=0.05)
    assert_close("out", got, dense_with_mask(**inputs, window=7, scale=0.05), rtol=1e-12)


def test_dense_is_torch_causal_attention():
    inputs = random_inputs(2, 200, 200, 4, 2, 32)
    got = sliding_window_attention(**inputs, window=None)
    q, k, v = (x.transpose(1, 2) for x in inputs.values())
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert_close("out", got, want, rtol=1e-12)
    assert torch.equal(got, sliding_window_attention(**inputs, window=199))


@pytest.mark.parametrize("window", [30, None])
def test_documents_are_as_if_alone(window):
    lengths = [1, 2, 7, 137, 60]
    inputs, d_out = random_inputs(1, sum(lengths), sum(lengths), 4, 2, 16), torch.randn(1, 207, 4, 16).double()
    starts = torch.tensor([0, 1, 3, 10, 147]).repeat_interleave(torch.tensor(lengths))[None]
    packed = out_and_grads(
        lambda q, k, v: sliding_window_attention(q, k, v, window=window, first_key=starts), inputs, d_out
    )
    parts = {name: x.split(lengths, dim=1) for name, x in {**inputs, "d_out": d_out}.items()}
    for n in range(len(lengths)):
        one = {name: parts[name][n] for name in inputs}
        alone = out_and_grads(lambda q, k, v: sliding_window_attention(q, k, v, window=window), one, parts["d_out"][n])
        for name in packed:
            got = packed[name].split(lengths, dim=1)[n]
            torch.testing.assert_close(got, alone[name], rtol=1e-10, atol=1e-12, msg=f"{name} of document {n}")


def test_query_that_sees_nothing_is_zero():
    inputs = random_inputs(1, 6, 6, 2, 1, 8)
    first_key = torch.tensor([[0, 0, 3, 0, 0, 6]])  # queries 2 and 5 start after themselves
    got = out_and_grads(
        lambda q, k, v: sliding_window_attention(q, k, v, window=4, first_key=first_key),
        inputs,
        torch.ones(1, 6, 2, 8).double(),
    )
    for name in ("out", "dq"):
        assert (got[name][:, [2, 5]] == 0).all()
    assert all(x.isfinite().all() for x in got.values())


def test_slices_equal_the_whole():
    inputs = random_inputs(1, 400, 400, 2, 1, 16)
    whole = sliding_window_attention(**inputs, window=90)
    for start in (128, 256, 300):
        first = max(0, start - 90)
        part = sliding_window_attention(
            inputs["q"][:, start:],
            inputs["k"][:, first:],
            inputs["v"][:, first:],
            window=90,
            query_offset=start - first,
        )
        assert_close("slice", part, whole[:, start:], rtol=1e-12)


def test_later_tokens_change_nothing_before():
    inputs, window = random_inputs(1, 300, 300, 2, 1, 16, torch.float32), 70
    for border in (1, 127, 128, 129, 256):
        weight = torch.randn(1, 300, 2, 16) * (torch.arange(300) < border)[:, None, None]
        changed = {name: torch.cat([x[:, :border], torch.randn_like(x[:, border:])], 1) for name, x in inputs.items()}
        first, second = (
            out_and_grads(lambda q, k, v: sliding_window_attention(q, k, v, window=window), x, weight)
            for x in (inputs, changed)
        )
        for name in first:
            assert torch.equal(first[name][:, :border], second[name][:, :border]), f"{name} before {border}"


def test_bf16_is_computed_in_fp32():
    inputs = random_inputs(1, 200, 200, 4, 2, 32, torch.bfloat16)
    got = sliding_window_attention(**inputs, window=64)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, sliding_window_attention(**{n: x.float() for n, x in inputs.items()}, window=64).bfloat16())


def test_gradcheck():
    inputs = [x.requires_grad_() for x in random_inputs(1, 9, 9, 4, 2, 4).values()]
    assert torch.autograd.gradcheck(lambda q, k, v: sliding_window_attention(q, k, v, window=3), inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "auto, reference, triton.*'cuda'"),
        ({"backend": "triton"}, "needs CUDA tensors"),
        ({"window": -1}, "window.*-1"),
        ({"query_offset": -1}, "-1"),
        ({"query_offset": 3}, "queries at 3 .. 12 need keys there, got 10"),
        ({"first_key": torch.zeros(1, 10)}, r"first_key must be \[2, 10\], got \[1, 10\]"),
        ({"v": torch.zeros(2, 10, 2, 4)}, "same shape"),
        ({"q": torch.zeros(2, 10, 3, 8)}, "3 query heads are not a multiple of 2"),
        ({"q": torch.zeros(2, 10, 4, 16)}, "agree in batch and head dim"),
        ({"q": torch.zeros(10, 4, 8)}, r"\[10, 4, 8\]"),
    ],
)
def test_errors(change, message):
    arguments = {**random_inputs(2, 10, 10, 4, 2, 8), "window": 4, **change}
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(**arguments)
