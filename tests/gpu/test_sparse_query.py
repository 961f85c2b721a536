"""Sparse-query and window attention on the GPU: against the fp64 reference, at full sizes, and under capture."""

import pytest
import torch

import kernels.triton_rows
from kernels.sparse_query import merge_partial_results, sparse_query_attention, sparse_query_rows
from kernels.window import sliding_window_attention
from tests.numerics import out_and_grads

BOUND = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def random_inputs(B, T, H, G, D, dtype):
    """Numbers that bf16 holds exactly, whatever `dtype`."""
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D)}
    return {name: torch.randn(shape, device="cuda").bfloat16().to(dtype) for name, shape in shapes.items()}


def assert_matches(got, want, bound):
    for name in want:
        assert got[name].isfinite().all(), f"{name} is not finite"
        error = (got[name].double() - want[name].double()).norm() / want[name].double().norm().clamp_min(1e-9)
        assert error <= bound, f"{name}: relative error {error:.2e}, allowed {bound}"


def against_reference(function, inputs, dtype, **options):
    """Both backends on the same numbers; returns Triton's."""
    d_out = torch.randn_like(inputs["q"])
    got = out_and_grads(lambda **x: function(**x, **options, backend="triton"), inputs, d_out)
    options.pop("deterministic", None)
    wide = {name: x.double() for name, x in inputs.items()}
    want = out_and_grads(lambda **x: function(**x, **options, backend="reference"), wide, d_out.double())
    assert_matches(got, want, BOUND[dtype])
    return got


@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "share", "documents", "dtype"),
    [
        pytest.param(2, 1000, 7, 1, 128, 0.3, False, torch.bfloat16, id="gqa7"),
        pytest.param(1, 777, 4, 2, 64, 0.5, True, torch.bfloat16, id="d64-documents"),
        pytest.param(2, 1500, 14, 2, 128, 0.5, True, torch.float16, id="fp16-documents"),
        pytest.param(1, 900, 8, 2, 96, 0.2, False, torch.bfloat16, id="d96"),
        pytest.param(1, 300, 4, 2, 128, 0.0, False, torch.bfloat16, id="none"),
        pytest.param(1, 2048, 8, 2, 128, 1.0, False, torch.bfloat16, id="all"),
        pytest.param(1, 3000, 32, 1, 128, 0.03, False, torch.bfloat16, id="few-of-32-heads"),
        pytest.param(2, 500, 4, 2, 128, 0.5, True, torch.float32, id="fp32"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse_queries_match_the_fp64_reference(B, T, H, G, D, share, documents, dtype, deterministic):
    active = torch.rand(B, T, device="cuda") < share
    borders = torch.tensor([0, 1, T // 3, B * T], device="cuda").int() if documents else None
    options = {"active": active, "cu_seqlens": borders, "deterministic": deterministic}
    got = against_reference(sparse_query_attention, random_inputs(B, T, H, G, D, dtype), dtype, **options)
    assert (got["out"][~active] == 0).all()
    assert (got["dq"][~active] == 0).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("D", "H", "G", "window"), [(96, 8, 2, 200), (128, 7, 1, 4095), (64, 4, 4, 0)])
def test_windows_match_the_fp64_reference(D, H, G, window, deterministic):
    starts = (torch.arange(900, device="cuda") // 250 * 250)[None]
    inputs = random_inputs(1, 900, H, G, D, torch.bfloat16)
    if window == 0:  # its dq and dk are zero but for rounding
        got = out_and_grads(lambda **x: sliding_window_attention(**x, window=0), inputs, inputs["q"])
        torch.testing.assert_close(got["out"], inputs["v"])
        return
    options = {"window": window, "first_key": starts, "deterministic": deterministic}
    against_reference(sliding_window_attention, inputs, torch.bfloat16, **options)


@pytest.mark.parametrize("dim", [0, 2], ids=["sequence", "head"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [96, 128])
def test_what_stands_beside_a_head_does_not_reach_it(D, deterministic, dim):
    """The next head, or the next sequence, is infinite; what pads a head's lanes and the last tile of keys is zero."""
    inputs = random_inputs(2, 700, 4, 2, D, torch.bfloat16)
    d_out = torch.randn_like(inputs["q"])
    call = lambda **x: sliding_window_attention(**x, window=200, deterministic=deterministic)  # noqa: E731 - used twice
    want = out_and_grads(call, inputs, d_out)
    for x in inputs.values():
        x.narrow(dim, x.shape[dim] // 2, x.shape[dim] // 2).fill_(torch.inf)
    got = out_and_grads(call, inputs, d_out)
    own = {name: x.narrow(dim, 0, x.shape[dim] // 2) for name, x in got.items()}
    assert_matches(own, {name: x.narrow(dim, 0, x.shape[dim] // 2) for name, x in want.items()}, 1e-3)


def test_rows_in_any_order_with_gradient_through_lse():
    inputs = random_inputs(2, 600, 8, 2, 128, torch.bfloat16)
    positions = torch.randint(0, 900, (2, 600), device="cuda")
    positions[:, ::7] = -1
    starts = (positions - torch.randint(0, 500, (2, 600), device="cuda")).clamp_min(0)
    weight = torch.randn(2, 600, 8 * 129, device="cuda", dtype=torch.float64)

    def call(q, k, v, backend):
        options = {"key_start": 100, "document_start": starts, "backend": backend}
        out, lse = sparse_query_rows(q, positions, k, v, **options)
        return torch.cat([out.flatten(2), lse.where(lse > -torch.inf, 0).to(out.dtype)], 2)

    got = out_and_grads(lambda **x: call(**x, backend="triton"), inputs, weight.bfloat16())
    wide = {name: x.double() for name, x in inputs.items()}
    want = out_and_grads(lambda **x: call(**x, backend="reference"), wide, weight.bfloat16().double())
    assert_matches(got, want, BOUND[torch.bfloat16])


def test_padding_between_rows_takes_no_time():
    """As context parallelism deals them: a few rows of a slice and room for all. Walked, it takes 2.8 times as long."""
    inputs = random_inputs(1, 131072, 6, 1, 128, torch.bfloat16)
    places = torch.arange(131072, device="cuda")
    dealt = places.where(places % 32768 < 6554, -1)[None]
    rows = dealt[dealt >= 0]

    def milliseconds(q, positions):
        q, k, v = (x.detach().requires_grad_() for x in (q, inputs["k"], inputs["v"]))
        times = []
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out, _ = sparse_query_rows(q, positions, k, v)
            out.backward(out.detach())
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times[1:])

    packed, with_padding = milliseconds(inputs["q"][:, rows], rows[None]), milliseconds(inputs["q"], dealt)
    print(f"packed {packed:.1f} ms, with padding {with_padding:.1f} ms")
    assert with_padding < 1.4 * packed


def test_pieces_of_keys_merge_to_the_whole_at_128k():
    inputs = random_inputs(1, 131072, 28, 4, 128, torch.bfloat16)
    positions = torch.rand(131072, device="cuda").topk(1311).indices.sort().values[None]
    rows = inputs["q"][:, positions[0]]
    active = torch.zeros(1, 131072, dtype=torch.bool, device="cuda").index_fill(1, positions[0], True)
    whole = sparse_query_attention(**inputs, active=active)[:, positions[0]]
    pieces = [
        sparse_query_rows(rows, positions, inputs["k"][:, a : a + 32768], inputs["v"][:, a : a + 32768], key_start=a)
        for a in range(0, 131072, 32768)
    ]
    merged, _ = merge_partial_results(*(list(x) for x in zip(*pieces, strict=True)))
    few = slice(0, 1311, 20)
    k, v = inputs["k"].double(), inputs["v"].double()
    want, _ = sparse_query_rows(rows[:, few].double(), positions[:, few], k, v, backend="reference")
    assert_matches({"whole": whole[:, few], "merged": merged[:, few]}, {"whole": want, "merged": want}, 4e-3)


def test_offsets_beyond_32_bits():
    """More than 2^31 numbers in q; the last rows are the ones that would wrap."""
    T, H = 131072, 132
    q = torch.randn(1, T, H, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    active = torch.zeros(1, T, dtype=torch.bool, device="cuda")
    active[:, -3:] = True
    got = out_and_grads(lambda **x: sparse_query_attention(**x, active=active), {"q": q, "k": k, "v": v}, q)
    positions = torch.arange(T - 3, T, device="cuda")[None]
    want = out_and_grads(
        lambda q, k, v: sparse_query_rows(q, positions, k, v, backend="reference")[0],
        {"q": q[:, -3:].double(), "k": k.double(), "v": v.double()},
        q[:, -3:].double(),
    )
    assert (got["out"][:, :-3] == 0).all()
    assert_matches({**got, "out": got["out"][:, -3:], "dq": got["dq"][:, -3:]}, want, 4e-3)


def test_deterministic_gradients_have_the_same_bits_and_the_hopper_kernels_agree():
    inputs = random_inputs(1, 4096, 14, 2, 128, torch.bfloat16)
    active, d_out = torch.rand(1, 4096, device="cuda") < 0.3, torch.randn_like(inputs["q"])

    def run(deterministic):
        call = lambda **x: sparse_query_attention(**x, active=active, deterministic=deterministic)  # noqa: E731 - named for its two uses
        return out_and_grads(call, inputs, d_out)

    first, second, fast = run(True), run(True), run(False)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert_matches(fast, first, 4e-3)


@pytest.mark.skipif(
    not kernels.triton_rows._is_hopper(torch.device("cuda")), reason="compares the kernels for Hopper with the others"
)
def test_other_gpus_kernels_serve_the_same(monkeypatch):
    inputs = random_inputs(1, 2000, 14, 2, 128, torch.bfloat16)
    monkeypatch.setattr(kernels.triton_rows, "on_hopper", lambda x: False)
    against_reference(
        sparse_query_attention, inputs, torch.bfloat16, active=torch.rand(1, 2000, device="cuda") < 0.3
    )  # fmt: skip


def test_captured_in_a_graph_it_follows_the_mask():
    """No host sync: the number of active queries may change between replays."""
    inputs = random_inputs(1, 1024, 8, 2, 64, torch.bfloat16)
    active = torch.ones(1, 1024, dtype=torch.bool, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse_query_attention(**inputs, active=active)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_query_attention(**inputs, active=active)
    for share in (0.0, 0.1, 0.9):
        active.copy_(torch.rand(1, 1024, device="cuda") < share)
        graph.replay()
        assert torch.equal(out, sparse_query_attention(**inputs, active=active))
