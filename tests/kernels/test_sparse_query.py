"""Attention for some queries: against a stored vector, the definition and a T x T softmax, and by identities alone."""

import pytest
import torch
import torch.nn.functional as F

from kernels.sparse_query import merge_partial_results, sparse_query_attention, sparse_query_rows
from tests.definitions import sparse_query_by_loops
from tests.numerics import RTOL, assert_close, load_vector, out_and_grads


def random_inputs(B, T, H, G, D, dtype=torch.float64):
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D)}
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def pattern(name, B, T):
    """bool [B, T]; each batch row has a count of its own."""
    at = torch.arange(T).expand(B, T)
    return {
        "none": torch.zeros(B, T, dtype=torch.bool),
        "all": torch.ones(B, T, dtype=torch.bool),
        "first": at == 0,
        "last": at == T - 1,
        "half, then none": (at >= T // 2) & (torch.arange(B)[:, None] % 2 == 0),
        "random": torch.rand(B, T) < torch.linspace(0.05, 0.9, B)[:, None],
    }[name]


def plain(q, k, v, active, *, first_key=None, scale=None):
    """The whole T x T mask at once, keys repeated to all heads; differentiable twice over, no log-sum-exp tricks."""
    B, T, H, D = q.shape
    j = torch.arange(T)
    visible = (j <= j[:, None]).expand(B, T, T)
    if first_key is not None:
        visible = visible & (j >= first_key[:, :, None])
    k, v = (x.repeat_interleave(H // k.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (D**-0.5 if scale is None else scale)
    weights = logits.exp() * visible[:, None]  # small logits in these tests: no maximum to subtract
    out = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)
    return out * active[:, :, None, None]


def attend_one(inputs, active):
    """One sequence, without a batch dimension."""
    return sparse_query_attention(**{key: x[None] for key, x in inputs.items()}, active=active[None])[0]


def test_vector():
    """Stored are the first kv head and its three query heads; the definition says the same."""
    data, _ = load_vector("sparse_query_20")
    inputs, active, d_out = {key: data[key] for key in "qkv"}, data["active"], data["do"]
    want = {"out": data["o"], **{key: data[key] for key in ("dq", "dk", "dv")}}
    defined = sparse_query_by_loops(**inputs, active=active, d_out=d_out)
    got = out_and_grads(lambda **x: attend_one(x, active), inputs, d_out)
    for key in want:
        assert_close(key, defined[key], want[key], rtol=1e-7)
        assert_close(key, got[key], want[key], rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "opened"),
    [
        pytest.param((333, 6, 2, 32), "fifth", id="20"),
        pytest.param((300, 7, 1, 128), "all", id="all"),
        pytest.param((130, 4, 1, 32), "none", id="none"),
        pytest.param((257, 4, 4, 64), "one", id="one"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_definition(shape, opened, dtype):
    T, H, _, D = shape
    inputs = {key: x[0] for key, x in random_inputs(1, *shape, dtype=dtype).items()}
    d_out = torch.randn(T, H, D, dtype=torch.float64).to(dtype)
    at = torch.arange(T)
    active = {"fifth": torch.rand(T) < 0.2, "all": at >= 0, "none": at < 0, "one": at == 181}[opened]
    want = sparse_query_by_loops(**inputs, active=active, d_out=d_out)
    got = out_and_grads(lambda **x: attend_one(x, active), inputs, d_out)
    for key in want:
        assert_close(key, got[key], want[key], rtol=RTOL[dtype], atol=1e-15)


@pytest.mark.parametrize("name", ["none", "all", "first", "last", "half, then none", "random"])
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D"), [(1, 1, 2, 1, 8), (3, 70, 4, 2, 12), (2, 300, 7, 1, 16)], ids=["one-token", "b3", "gqa7"]
)
def test_matches_plain(name, B, T, H, G, D):
    inputs, active, d_out = random_inputs(B, T, H, G, D), pattern(name, B, T), torch.randn(B, T, H, D).double()
    got = out_and_grads(lambda **x: sparse_query_attention(**x, active=active), inputs, d_out)
    want = out_and_grads(lambda **x: plain(**x, active=active), inputs, d_out)
    for key in want:
        assert_close(key, got[key], want[key], rtol=RTOL[torch.float64], atol=1e-15)
    assert (got["out"][~active] == 0).all()
    assert (got["dq"][~active] == 0).all()


def test_all_active_is_torch_causal_attention():
    inputs = random_inputs(2, 200, 4, 2, 32)
    q, k, v = (x.transpose(1, 2) for x in inputs.values())
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    for active in (None, torch.ones(2, 200, dtype=torch.bool)):
        assert_close("out", sparse_query_attention(**inputs, active=active), want, rtol=1e-12)
    assert_close("scaled", sparse_query_attention(**inputs, active=None, scale=0.05),
                 plain(**inputs, active=torch.ones(2, 200), scale=0.05), rtol=1e-12)  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.3, None])
def test_documents_are_as_if_alone(share):
    """Documents of the flattened batch; one that would cross into the second row is cut there."""
    lengths = [[1, 2, 7, 137, 60], [90, 117]]
    inputs, d_out = random_inputs(2, 207, 4, 2, 16), torch.randn(2, 207, 4, 16).double()
    active = None if share is None else torch.rand(2, 207) < share
    borders = torch.tensor([0, *sum(lengths, [])]).cumsum(0)
    for cu_seqlens in (borders.int(), borders[borders != 207].int()):
        packed = out_and_grads(
            lambda **x: sparse_query_attention(**x, active=active, cu_seqlens=cu_seqlens),  # noqa: B023 - called at once
            inputs,
            d_out,
        )
        for row in range(2):
            cut = {key: x[row : row + 1].split(lengths[row], 1) for key, x in {**inputs, **packed, "do": d_out}.items()}
            opens = [None] * 9 if active is None else active[row : row + 1].split(lengths[row], 1)
            for n in range(len(lengths[row])):
                one = {key: cut[key][n] for key in inputs}
                alone = out_and_grads(lambda **x: sparse_query_attention(**x, active=opens[n]), one, cut["do"][n])  # noqa: B023 - called at once
                for key in packed:
                    torch.testing.assert_close(cut[key][n], alone[key], rtol=1e-10, atol=1e-12, msg=f"{key} {row} {n}")


def test_later_tokens_change_nothing_before():
    inputs, active = random_inputs(1, 300, 2, 1, 16, torch.float32), torch.rand(1, 300) < 0.4
    for border in (1, 127, 128, 129, 256):
        weight = torch.randn(1, 300, 2, 16) * (torch.arange(300) < border)[:, None, None]
        changed = {name: torch.cat([x[:, :border], torch.randn_like(x[:, border:])], 1) for name, x in inputs.items()}
        first, second = (
            out_and_grads(lambda **x: sparse_query_attention(**x, active=active), x, weight) for x in (inputs, changed)
        )
        for name in first:
            assert torch.equal(first[name][:, :border], second[name][:, :border]), f"{name} before {border}"


@pytest.mark.parametrize("cuts", [[0, 61, 61, 200], [0, 1, 199, 200], [0, 200]])
def test_merged_pieces_are_the_whole(cuts):
    """Rows in any order, with padding and repetitions, over pieces of keys; gradients pass through each lse."""
    B, N, S, H, G, D = 2, 50, 200, 4, 2, 8
    positions = torch.randint(0, S, (B, N))
    positions[0, ::7] = -1
    positions[1, :2] = torch.tensor([0, S - 1])
    inputs = random_inputs(B, S, H, G, D) | {"q": torch.randn(B, N, H, D).double()}
    starts = (positions - torch.randint(0, 90, (B, N))).clamp_min(0)

    def pieces(q, k, v):
        results = [
            sparse_query_rows(q, positions, k[:, a:z], v[:, a:z], key_start=a, document_start=starts)
            for a, z in zip(cuts, cuts[1:], strict=False)
        ]
        return torch.cat([x.flatten(2) for x in merge_partial_results(*map(list, zip(*results, strict=True)))], 2)

    def whole(q, k, v):
        rows = positions.clamp_min(0)
        every = torch.zeros(B, S, H, D).double()
        out, lse = [], []
        for n in range(N):  # one row at a time in the place of its position
            at = rows[:, n, None, None, None].expand(B, 1, H, D)
            first = starts[:, n, None].expand(B, S)
            mask = torch.arange(S) == rows[:, n, None]
            placed = every.scatter(1, at, q[:, n : n + 1])
            out.append(plain(placed, k, v, mask, first_key=first.minimum(torch.arange(S))).gather(1, at))
            logits = torch.einsum("bghd,bjgd->bjgh", q[:, n].unflatten(1, (G, -1)), k).flatten(2) * D**-0.5
            j = torch.arange(S)
            seen = (j <= rows[:, n, None]) & (j >= starts[:, n, None])
            lse.append(logits.masked_fill(~seen[..., None], -torch.inf).logsumexp(1)[:, None])
        padding = positions[:, :, None] < 0
        out = torch.cat(out, 1).masked_fill(padding[..., None], 0)
        return torch.cat([out.flatten(2), torch.cat(lse, 1).masked_fill(padding, -torch.inf)], 2)

    weight = torch.randn(B, N, H * D + H).double()
    got, want = (
        out_and_grads(lambda **x: f(**x).where(positions[..., None] >= 0, 0), inputs, weight)  # noqa: B023 - called at once
        for f in (pieces, whole)
    )
    for key in want:
        assert_close(key, got[key], want[key], rtol=1e-9)
    out, lse = pieces(**inputs).split([H * D, H], 2)
    assert (out[positions < 0] == 0).all()
    assert (lse[positions < 0] == -torch.inf).all()


def test_merging_pieces_far_apart_and_empty():
    outs = [torch.full((1, 3, 1, 2), float(n), requires_grad=True) for n in (1, 2, 3)]
    minus = -torch.inf
    each = [[0.0, 500.0, minus], [200.0, 300.0, minus], [minus, 500.0, minus]]
    lses = [torch.tensor(x, requires_grad=True).view(1, 3, 1) for x in each]
    out, lse = merge_partial_results(outs, lses)
    assert torch.equal(out[0, :, 0, 0], torch.tensor([2.0, 2.0, 0.0]))
    torch.testing.assert_close(lse[0, :, 0], torch.tensor([200.0, 500 + torch.tensor(2.0).log(), minus]))
    grads = torch.autograd.grad([out.sum(), lse[:, :2].sum()], outs + lses)
    assert all(grad.isfinite().all() for grad in grads)


def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in random_inputs(1, 9, 4, 2, 4).values())
    active = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 1, 0]]).bool()
    assert torch.autograd.gradcheck(lambda q, k, v: sparse_query_attention(q, k, v, active), (q, k, v))
    positions = torch.tensor([[5, 7, 2, 8, 6, 8, 4, 3, 5]])
    assert torch.autograd.gradcheck(lambda q, k, v: sparse_query_rows(q, positions, k, v, key_start=1), (q, k, v))


def test_bf16_is_computed_in_fp32():
    inputs, active = random_inputs(1, 200, 4, 2, 32, torch.bfloat16), torch.rand(1, 200) < 0.3
    got = sparse_query_attention(**inputs, active=active)
    assert got.dtype == torch.bfloat16
    wide = sparse_query_attention(**{n: x.float() for n, x in inputs.items()}, active=active)
    assert torch.equal(got, wide.bfloat16())
    out, lse = sparse_query_rows(inputs["q"], torch.arange(200)[None], inputs["k"], inputs["v"])
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "auto, reference, triton.*'cuda'"),
        ({"backend": "triton"}, "needs CUDA tensors"),
        ({"active": torch.zeros(2, 9, dtype=torch.bool)}, r"active must be bool \[2, 10\].*\[2, 9\]"),
        ({"active": torch.zeros(2, 10)}, r"active must be bool.*float32"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "cu_seqlens must be int32.*int64"),
        ({"cu_seqlens": torch.tensor([0]).int()}, r"documents \+ 1.*\[1\]"),
        ({"q": torch.zeros(2, 9, 4, 8)}, "q has 9 tokens but k has 10"),
        ({"v": torch.zeros(2, 10, 2, 4)}, "same shape"),
        ({"q": torch.zeros(2, 10, 3, 8)}, "3 query heads are not a multiple of 2"),
    ],
)
def test_errors(change, message):
    arguments = {**random_inputs(2, 10, 4, 2, 8), "active": torch.ones(2, 10, dtype=torch.bool), **change}
    with pytest.raises(ValueError, match=message):
        sparse_query_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(2, 9).int()}, r"positions must be int32 or int64 \[2, 10\].*\[2, 9\]"),
        ({"positions": torch.zeros(2, 10)}, "positions must be int32 or int64.*float32"),
        ({"document_start": torch.zeros(1, 10).int()}, "document_start"),
    ],
)
def test_errors_of_rows(change, message):
    q, k, v = random_inputs(2, 10, 4, 2, 8).values()
    with pytest.raises(ValueError, match=message):
        sparse_query_rows(q, k=k, v=v, **{"positions": torch.zeros(2, 10).int(), **change})
    with pytest.raises(ValueError, match="one lse for each out"):
        merge_partial_results([], [])
