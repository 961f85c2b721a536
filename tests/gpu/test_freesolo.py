"""FreeSolo's Triton kernels on the GPU: against the fp64 reference, at full sizes, and under capture and compile."""

import pytest
import torch

from kernels.cells import choose_cells, number_cells, read_cells, split_cells
from kernels.freesolo import freesolo_attention, measured_freesolo_attention, select_cells
from kernels.rope import rope_tables
from kernels.window import sliding_window_attention
from tests.numerics import out_and_grads

# whole tensor, and the worst (head, block of 128 tokens) of it
BOUNDS = {torch.bfloat16: (3e-3, 3e-3), torch.float32: (1e-5, 1e-5)}
FS_L = {"retain": 64, "recent": 8}


def random_inputs(B, T, H, G, D, dtype):
    """Numbers that bf16 holds exactly, whatever `dtype`."""
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D)}
    inputs = {name: torch.randn(shape, device="cuda").bfloat16().to(dtype) for name, shape in shapes.items()}
    inputs |= {"alpha": 1 + 0.3 * torch.randn(H, device="cuda"), "gain": 1 + 0.3 * torch.randn(D, device="cuda")}
    return inputs


def attend(backend="triton", **kwargs):
    def call(q, k, v, alpha, gain):
        cos, sin = rope_tables(torch.arange(q.shape[1], device=q.device), q.shape[3], 10000.0)
        return freesolo_attention(q, k, v, alpha, gain, cos, sin, **kwargs, backend=backend)

    return call


def relative_errors(got, want):
    """Of the whole, and the worst (head, block of 128 tokens); [B, T, heads, D] or parameters."""
    error, want = (got.double() - want.double()).square(), want.double().square()
    whole = (error.sum() / want.sum()).sqrt().item()
    if got.dim() < 4:
        return whole, whole
    blocks = [torch.stack([part.sum((1, 3)) for part in x.split(128, dim=1)]) for x in (error, want)]
    # where the true value is exactly 0 (a query that sees itself only) the error is measured against the average block
    size = blocks[1].where(blocks[1] > 0, blocks[1].mean())
    return whole, (blocks[0] / size).sqrt().max().item()


def assert_matches(got, want, dtype):
    for name in want:
        assert got[name].isfinite().all(), f"{name} is not finite"
        errors = relative_errors(got[name], want[name])
        assert all(e <= bound for e, bound in zip(errors, BOUNDS[dtype], strict=True)), (
            f"{name}: relative error {errors[0]:.2e}, in the worst block {errors[1]:.2e}, allowed {BOUNDS[dtype]}"
        )


def assert_same_choice(got, want, q, k, *, cell_size, sigma, lam):
    """At least 99.9 % of the cells agree, and where they do not, the scores do to 1e-3."""
    agree = (got == want).double().mean().item()
    assert agree >= 0.999, f"only {agree:.5f} of the chosen cells agree"
    for b, i, h in (got != want).any(-1).nonzero().tolist():
        cells = sorted(set(got[b, i, h].tolist()) ^ set(want[b, i, h].tolist()))
        keys = torch.stack([k[b, c * cell_size : (c + 1) * cell_size, h * k.shape[2] // q.shape[2]] for c in cells])
        keys, centre = keys.double(), (torch.tensor(cells, device=q.device) + 0.5) * cell_size
        score = keys.mean(1) @ q[b, i, h].double() / q.shape[3] ** 0.5
        score += lam * keys.norm(dim=-1).amax(1) * torch.erf((i - centre) / (2 * sigma))
        assert score.max() - score.min() < 1e-3, f"query {i} of head {h} prefers other cells of {cells}: {score}"


@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "dtype", "kwargs"),
    [
        pytest.param(1, 4096, 4, 4, 64, torch.bfloat16, {"lam": 1.0, **FS_L}, id="fs-l-4k"),
        pytest.param(1, 1300, 4, 4, 64, torch.bfloat16, {"lam": 0.3}, id="fs-ragged"),
        pytest.param(2, 1001, 6, 2, 96, torch.bfloat16, {"lam": 0.0, "retain": 16, "cell_size": 16}, id="d96-gqa"),
        pytest.param(1, 1100, 2, 1, 128, torch.bfloat16, {"lam": 0.3, "top_k": 16, "cell_size": 64, "query_block": 256},
                     id="d128-k16"),
        pytest.param(1, 700, 2, 2, 32, torch.float32, {"lam": 0.3, "retain": 8, "recent": 3, "window": 0}, id="fp32"),
    ],
)  # fmt: skip
def test_matches_the_fp64_reference(B, T, H, G, D, dtype, kwargs):
    inputs = random_inputs(B, T, H, G, D, dtype)
    d_out = torch.randn(B, T, H, D, device="cuda").to(dtype)
    ranking = {name: x for name, x in kwargs.items() if name != "window"}
    got = select_cells(inputs["q"], inputs["k"], **ranking)
    want = select_cells(inputs["q"], inputs["k"], **ranking, backend="reference")
    place = {"cell_size": kwargs.get("cell_size", 32), "sigma": 4.0, "lam": kwargs["lam"]}
    assert_same_choice(got, want, inputs["q"], inputs["k"], **place)
    # compared where the choice is the same; the few other rows are left out and pass no gradient
    same = (got == want).all(-1)[..., None]
    assert same.double().mean() >= 1 - 1e-3 * got.shape[-1]
    d_out *= same
    wide = {name: x.double() for name, x in inputs.items()}
    want = out_and_grads(attend("reference", **kwargs), wide, d_out.double())
    got = out_and_grads(attend(**kwargs), inputs, d_out)
    got["out"], want["out"] = got["out"] * same, want["out"] * same
    assert_matches(got, want, dtype)


@pytest.mark.parametrize("retain", [None, 64])
def test_selection_at_128k(retain):
    q, k = (torch.randn(1, 131072, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    got = select_cells(q, k, lam=0.3, retain=retain)
    rows = slice(131072 - 2048, None)
    cells = split_cells(k, 32)
    place = {"query_start": rows.start, "query_block": 128, "top_k": 4, "sigma": 4.0, "lam": 0.3, "recent": 8}
    want = choose_cells(q[:, rows], cells, number_cells(cells), **place, retain=retain, backend="reference")
    agree = (got[:, rows] == want).double().mean().item()
    assert agree >= 0.999, f"only {agree:.5f} of the chosen cells agree"


def test_deterministic_gradients_have_the_same_bits():
    inputs = random_inputs(1, 20000, 4, 2, 64, torch.bfloat16)
    d_out = torch.randn(1, 20000, 4, 64, device="cuda").bfloat16()
    runs = [out_and_grads(attend(deterministic=True, **FS_L), inputs, d_out) for _ in range(3)]
    for name, x in runs[0].items():
        assert all(torch.equal(x, run[name]) for run in runs[1:]), name
    free = out_and_grads(attend(**FS_L), inputs, d_out)
    assert torch.equal(free["out"], runs[0]["out"])
    for name, x in runs[0].items():
        assert relative_errors(free[name], x)[0] < 1e-3, name


@pytest.mark.parametrize("retain", [None, 16])
def test_a_table_chooses_like_the_whole_sequence(retain):
    inputs, start = random_inputs(1, 8192, 4, 2, 64, torch.bfloat16), 4096
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    ranking = {"query_block": 128, "top_k": 4, "sigma": 4.0, "lam": 0.1, "retain": retain, "recent": 8}
    whole = select_cells(q, k, **ranking)
    k_cells, v_cells = split_cells(k, 32), split_cells(v, 32)
    index = number_cells(k_cells)
    part = choose_cells(q[:, start:], k_cells, index, query_start=start, **ranking)
    assert torch.equal(part, whole[:, start:])
    u, _ = read_cells(q[:, start:], k_cells, v_cells, index, query_start=start, **ranking)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    u_wide, _ = read_cells(wide[0][:, start:], split_cells(wide[1], 32), split_cells(wide[2], 32), index,
                        query_start=start, **ranking)  # fmt: skip
    du = torch.randn_like(u)
    assert relative_errors(u, u_wide)[0] < 3e-3
    grads = zip(torch.autograd.grad(u, (q, k, v), du), torch.autograd.grad(u_wide, wide, du.double()), strict=True)
    assert all(relative_errors(got, want)[0] < 3e-3 for got, want in grads)


def test_compile_keeps_one_graph():
    inputs = random_inputs(1, 2048, 4, 2, 64, torch.bfloat16)
    d_out = torch.randn(1, 2048, 4, 64, device="cuda").bfloat16()
    cos, sin = rope_tables(torch.arange(2048, device="cuda"), 64, 10000.0)

    def layer(q, k, v, alpha, gain):
        out = freesolo_attention(q * 1.0, k, v, alpha, gain, cos, sin, **FS_L, deterministic=True)
        return out + sliding_window_attention(q, k, v, window=100)

    got = out_and_grads(torch.compile(layer, fullgraph=True), inputs, d_out)
    want = out_and_grads(layer, inputs, d_out)
    for name, x in want.items():
        assert relative_errors(got[name], x)[0] < 5e-3, name


def test_the_share_of_cells_that_pools_hold():
    """As the selection kernel counts it: the reference's figure, and two small launches more for a layer that logs."""
    inputs = random_inputs(1, 4096, 4, 2, 64, torch.bfloat16)
    cos, sin = rope_tables(torch.arange(4096, device="cuda"), 64, 10000.0)
    options = {"window": 512, "cell_size": 32, "query_block": 128, "top_k": 4, "sigma": 4.0, "lam": 1.0, "eps": 1e-8}
    got, want = (
        measured_freesolo_attention(**inputs, rope_cos=cos, rope_sin=sin, **options, **FS_L, backend=backend)[1]
        for backend in ("triton", "reference")
    )
    assert 0.5 < want[..., -1].mean() < 0.7  # 72 of 124 cells, less those that are both recent and large
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def test_capture_in_a_cuda_graph():
    inputs = random_inputs(1, 4096, 4, 4, 64, torch.bfloat16)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    d_out = torch.randn(1, 4096, 4, 64, device="cuda").bfloat16()
    call = attend(**FS_L)
    cos, sin = rope_tables(torch.arange(4096, device="cuda"), 64, 10000.0)

    def step():
        out = freesolo_attention(**leaves, rope_cos=cos, rope_sin=sin, **FS_L)
        return out, *torch.autograd.grad(out, tuple(leaves.values()), d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    fresh = random_inputs(1, 4096, 4, 4, 64, torch.bfloat16)
    with torch.no_grad():
        for name, x in leaves.items():
            x.copy_(fresh[name])
    graph.replay()
    want = out_and_grads(call, fresh, d_out)
    assert torch.equal(results[0], want["out"])
    for got, x in zip(results[1:], list(want.values())[1:], strict=True):
        assert relative_errors(got, x)[0] < 1e-3


def test_more_than_2_31_numbers():
    """q, k and v as views of one projection of 2.2e9 numbers: its last head equals that head alone."""
    T, H, D = 360_100, 16, 128
    qkv = torch.randn(1, T, 3 * H, D, device="cuda", dtype=torch.bfloat16)
    assert qkv.numel() > 2**31
    parameters = {"alpha": torch.ones(H, device="cuda"), "gain": torch.ones(D, device="cuda")}
    d_out = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    whole = {name: qkv[:, :, n * H : (n + 1) * H].requires_grad_() for n, name in enumerate("qkv")}
    call = attend(deterministic=True, **FS_L)
    out = call(**whole, **parameters)
    got = (out, *torch.autograd.grad(out, list(whole.values()), d_out))
    alone = {name: x[:, :, -1:].detach().clone().requires_grad_() for name, x in whole.items()}
    out = call(**alone, alpha=parameters["alpha"][-1:], gain=parameters["gain"])
    want = (out, *torch.autograd.grad(out, list(alone.values()), d_out[:, :, -1:]))
    for x, y in zip(got, want, strict=True):
        assert relative_errors(x[:, :, -1:], y)[0] < 1e-6


@pytest.mark.parametrize(("window", "D"), [(512, 64), (None, 128), (4095, 128)])
def test_window_matches_sdpa(window, D):
    T, H, G = 5000, 4, 2
    q = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, G, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs, d_out = {"q": q, "k": k, "v": v}, torch.randn_like(q)
    position = torch.arange(T, device="cuda")
    behind = position[:, None] - position
    visible = (behind >= 0) & (behind <= (T if window is None else window))

    def dense(q, k, v):
        k, v = (x.repeat_interleave(H // G, dim=2) for x in (k, v))
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
        return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(~visible, -torch.inf).softmax(-1), v)

    got = out_and_grads(lambda **x: sliding_window_attention(**x, window=window), inputs, d_out)
    want = out_and_grads(dense, {name: x.float() for name, x in inputs.items()}, d_out.float())
    assert_matches(got, want, torch.bfloat16)
