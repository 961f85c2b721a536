"""FreeSolo attention against stored vectors, against the definition in loops, and identities that need neither."""

import resource

import pytest
import torch
import torch.nn.functional as F

from kernels.freesolo import freesolo_attention, select_cells
from kernels.rope import apply_rope, rope_tables
from kernels.window import sliding_window_attention
from tests.definitions import freesolo_by_loops, rope_angles, select_cells_by_loops
from tests.numerics import RTOL, VECTORS, assert_close, load_vector, out_and_grads

STORED = ["fs_one_token", "fs_ragged", "fsl_small"]
# [T, H, G, D] and options; what the definition finds for them stands in for stored results
DEFINED = {
    "fs_default": ((1000, 2, 1, 64), {}),
    "fs_head96_gqa7": ((330, 7, 1, 96), {"window": 128}),
    "fs_shorter_than_block": ((100, 2, 1, 32), {}),
    "fsl_two_groups": (
        (700, 4, 2, 32),
        {"window": 96, "cell_size": 16, "query_block": 64, "top_k": 3, "retain": 6, "recent": 2},
    ),
    "fsl_wide": ((1536, 2, 1, 64), {"retain": 12, "recent": 4}),
}
SMALL = {"cell_size": 8, "query_block": 32, "top_k": 3}  # cells and blocks that short sequences have several of


def random_inputs(B, T, H, G, D, dtype=torch.float64, key_scale=1.0):
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D), "alpha": (H,), "gain": (D,)}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    inputs["k"] *= key_scale
    return {name: x.to(dtype) for name, x in inputs.items()}


def attend(inputs, **kwargs):
    _, T, _, D = inputs["q"].shape
    return freesolo_attention(**{**inputs, **rope_of(T, D), **kwargs})


def rope_of(T, D):
    cos, sin = rope_tables(torch.arange(T), D, 10000.0)
    return {"rope_cos": cos, "rope_sin": sin}


def defined(inputs, d_out, *, window=512, **ranking):
    """(selection [B, T, H, K], output and gradients) of the definition, batch rows one after the other."""
    cell_size, found = ranking.get("cell_size", 32), []
    for b in range(len(inputs["q"])):
        row = {name: x[b] if x.dim() == 4 else x for name, x in inputs.items()}
        selected = select_cells_by_loops(row["q"], row["k"], **ranking)
        got = freesolo_by_loops(**row, d_out=d_out[b], selected=selected, window=window, cell_size=cell_size)
        found.append({"selected": selected, **got})
    shared = {name: sum(one[name] for one in found) for name in ("dalpha", "dgain")}
    return {name: torch.stack([one[name] for one in found]) for name in found[0]} | shared


# Against vectors and definition


def test_every_vector_is_used():
    assert {path.stem for path in VECTORS.glob("fs*.npz") if not path.stem.startswith("fsb_")} == set(STORED)


def vector(name: str) -> tuple[dict, dict, dict]:
    """(inputs with d_out, wanted, options of `freesolo_attention` less rope) of a stored or defined case."""
    if name in DEFINED:
        shape, options = DEFINED[name]
        inputs = random_inputs(1, *shape, dtype=torch.bfloat16)  # numbers that fp32 and fp64 hold alike
        inputs["d_out"] = torch.randn(1, shape[0], shape[1], shape[3]).bfloat16()
        given = {key: x for key, x in inputs.items() if key != "d_out"}
        return inputs, defined(given, inputs["d_out"], **options), options
    stored, params = load_vector(name)
    names = {"s": "cell_size", "B": "query_block", "K": "top_k", "P": "retain", "W": "recent", "w": "window"}
    names |= {key: key for key in ("sigma", "lam", "eps")}
    options = {names[key]: value for key, value in params.items() if key in names and value is not None}
    assert params["rope_base"] == 10000.0
    stored = {key: x[None] if x.dim() == 3 else x for key, x in stored.items()}
    inputs = {key: stored.pop(key) for key in ("q", "k", "v", "alpha", "gain")} | {"d_out": stored.pop("do")}
    return inputs, {"out": stored.pop("o"), **stored}, options


@pytest.mark.parametrize("name", [*STORED, *DEFINED])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors(name, dtype):
    inputs, want, options = vector(name)
    inputs = {key: x.to(dtype) for key, x in inputs.items()}
    d_out = inputs.pop("d_out")
    ranking = {key: x for key, x in options.items() if key not in ("window", "eps")}
    selected = select_cells(inputs["q"], inputs["k"], **ranking)
    assert selected.dtype == torch.int32
    assert torch.equal(selected, want.pop("selected").int())

    got = out_and_grads(lambda **x: attend(x, **options), inputs, d_out)
    assert "dq" in want and want.keys() <= got.keys()
    # the vectors are stored in fp32, and so are cos and sin
    rtol = 1e-6 if dtype == torch.float64 else RTOL[torch.float32]
    for key in want:
        assert_close(key, got[key], want[key], rtol=rtol)


@pytest.mark.parametrize("name", STORED)
def test_definition_is_what_the_vectors_say(name):
    inputs, want, options = vector(name)
    assert options.pop("eps") == 1e-8
    found = defined({key: x for key, x in inputs.items() if key != "d_out"}, inputs["d_out"], **options)
    assert torch.equal(found["selected"], want.pop("selected").int())
    for key in want:
        assert_close(key, found[key], want[key], rtol=1e-7)


@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        pytest.param((1, 1, 2, 1, 6), SMALL, id="one-token"),
        pytest.param((1, 7, 2, 2, 6), SMALL, id="shorter-than-cell"),
        pytest.param((2, 31, 2, 1, 40), SMALL, id="shorter-than-block"),
        pytest.param((2, 97, 4, 2, 40), {**SMALL, "window": 20}, id="tail-of-one"),
        pytest.param((1, 121, 7, 1, 96), {**SMALL, "cell_size": 16, "window": 40}, id="head96-gqa7"),
        pytest.param((1, 130, 3, 3, 6), {**SMALL, "window": 0}, id="own-token-only"),
        pytest.param((1, 100, 2, 1, 16), {**SMALL, "top_k": 50}, id="more-picks-than-cells"),
        pytest.param((1, 100, 2, 1, 16), {**SMALL, "query_block": 8, "top_k": 1}, id="block-is-cell"),
        pytest.param((1, 90, 2, 1, 16), {"cell_size": 5, "query_block": 15, "sigma": 1.5, "lam": 0.3}, id="odd-cells"),
        pytest.param((2, 150, 4, 2, 16), {**SMALL, "retain": 1, "recent": 1}, id="smallest-pool"),
        pytest.param((2, 150, 4, 1, 6), {**SMALL, "retain": 4, "recent": 2, "window": 30}, id="fs-l"),
        pytest.param((1, 150, 4, 2, 16), {**SMALL, "retain": 1, "recent": 99}, id="everything-is-recent"),
        pytest.param((1, 200, 2, 1, 16), {**SMALL, "retain": 3, "recent": 2, "lam": 0.0}, id="content-only"),
    ],
)
@pytest.mark.parametrize("keys", ["random", "repeated-cells", "constant", "zero", "huge", "tiny"])
def test_matches_definition(shape, kwargs, keys):
    inputs = random_inputs(*shape, key_scale={"zero": 0.0, "huge": 1e4, "tiny": 1e-6}.get(keys, 1.0))
    k, size = inputs["k"], kwargs["cell_size"]
    if keys == "repeated-cells":
        k.copy_(k[:, torch.arange(k.shape[1]) % (2 * size)])
    if keys == "constant":
        k.copy_(k[:, :1].expand_as(k).round(decimals=3).float())
    ranking = {name: x for name, x in kwargs.items() if name != "window"}
    window, d_out = kwargs.get("window", 512), torch.randn_like(inputs["q"])
    want = defined(inputs, d_out, window=window, **ranking)
    assert torch.equal(select_cells(inputs["q"], k, **ranking), want.pop("selected"))

    angles = torch.from_numpy(rope_angles(shape[1], shape[4], 10000.0))[:, 0]
    tables = {"rope_cos": angles.cos(), "rope_sin": angles.sin()}  # float64, unlike `rope_tables`
    got = out_and_grads(lambda **x: attend(x, window=window, **tables, **ranking), inputs, d_out)
    for name in want:
        # logits of huge keys lose digits, and gradients may be zero but for the rounding of terms as large as the keys
        size = max(1.0, k.abs().max())
        assert_close(name, got[name], want[name], rtol=RTOL[torch.float64], atol=1e-14 * size)


# Identities


@pytest.mark.parametrize("retain", [None, 4])
def test_zero_alpha_and_wide_window_is_dense_attention(retain):
    inputs = random_inputs(2, 150, 4, 2, 16)
    inputs["alpha"].zero_()
    got = attend(inputs, window=150, retain=retain, **SMALL)
    q, k = (apply_rope(inputs[name], *rope_of(150, 16).values()) for name in "qk")
    q, k, v = (x.transpose(1, 2) for x in (q, k, inputs["v"]))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert_close("out", got, want, rtol=1e-12)


def test_pool_that_holds_everything_is_fs():
    inputs = random_inputs(1, 200, 4, 2, 16)
    assert torch.equal(attend(inputs, **SMALL), attend(inputs, retain=25, recent=1, **SMALL))
    assert torch.equal(attend(inputs, **SMALL), attend(inputs, retain=1, recent=25, **SMALL))


def test_reading_every_cell_is_attention_to_all_earlier_blocks():
    inputs = random_inputs(1, 128, 2, 1, 16)
    inputs |= {"alpha": torch.ones(2).double(), "gain": torch.ones(16).double()}
    got = attend(inputs, window=0, cell_size=8, query_block=32, top_k=16) - inputs["v"]  # window 0 is v itself
    u = sliding_window_attention(
        inputs["q"][:, 127:], inputs["k"][:, :96], inputs["v"][:, :96], window=None, query_offset=95
    )
    assert_close("last row", got[:, 127:], u / u.square().mean(-1, keepdim=True).sqrt(), rtol=1e-6)


@pytest.mark.parametrize("retain", [None, 2])
def test_later_tokens_change_nothing_before(retain):
    """Suffix at every cell and block border, and one token beside them, forward and backward."""
    inputs = random_inputs(1, 136, 2, 1, 16, torch.float32)
    kwargs = {**SMALL, "window": 20, "retain": retain, "recent": 2}
    for border in {x for c in range(8, 136, 8) for x in (c, c + 1)}:
        weight = torch.randn(1, 136, 2, 16) * (torch.arange(136) < border)[:, None, None]
        changed = dict(inputs)
        for name in "qkv":
            changed[name] = torch.cat([inputs[name][:, :border], 5 * torch.randn_like(inputs[name][:, border:])], 1)
        first, second = (out_and_grads(lambda **x: attend(x, **kwargs), x, weight) for x in (inputs, changed))
        for name in first:
            a, b = (x[name] if x[name].dim() == 1 else x[name][:, :border] for x in (first, second))
            assert torch.equal(a, b), f"{name} before {border}"
        assert all((first[f"d{name}"][:, border:] == 0).all() for name in "qkv")


@pytest.mark.parametrize("retain", [None, 3])
def test_selection_ends_before_the_query_block(retain):
    inputs = random_inputs(2, 300, 4, 2, 16)
    selected = select_cells(inputs["q"], inputs["k"], retain=retain, recent=2, **SMALL)
    block = torch.arange(300) // 32 * 32
    assert ((selected + 1) * 8 <= block[:, None, None]).all()
    count = (block // 8).clamp(max=3)
    assert torch.equal((selected >= 0).sum(-1), count[:, None].expand(2, 300, 4))
    real = selected.where(selected >= 0, 1000)  # padding comes last
    assert (real.diff(dim=-1) > 0)[selected[..., 1:] >= 0].all() and torch.equal(real, real.sort(dim=-1).values)


def test_no_cell_no_branch():
    """Before the first block ends the layer is the window alone, and alpha and gain get gradient exactly 0."""
    inputs = random_inputs(1, 32, 2, 1, 16)
    got = out_and_grads(lambda **x: attend(x, **SMALL), inputs, torch.randn(1, 32, 2, 16).double())
    assert (got["dalpha"] == 0).all() and (got["dgain"] == 0).all()
    inputs["alpha"].zero_()
    assert torch.equal(got["out"], attend(inputs, **SMALL))


@pytest.mark.parametrize("retain", [None, 2])
def test_gradcheck(retain):
    inputs = random_inputs(1, 13, 4, 2, 2)
    kwargs = {"window": 3, "cell_size": 2, "query_block": 4, "top_k": 2, "retain": retain, "recent": 1}
    function = lambda *x: attend(dict(zip(inputs, x, strict=True)), **kwargs)  # noqa: E731 - gradcheck is positional
    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs.values()])


def test_sigma_and_lam_get_no_gradient():
    inputs = random_inputs(1, 70, 2, 1, 8)
    sigma, lam = torch.full((2,), 4.0, requires_grad=True), torch.ones(2, requires_grad=True)
    inputs["q"].requires_grad_()
    attend(inputs, sigma=sigma, lam=lam, **SMALL).sum().backward()
    assert sigma.grad is None and lam.grad is None
    assert torch.equal(attend(inputs, sigma=sigma, lam=lam, **SMALL), attend(inputs, **SMALL))


@pytest.mark.parametrize("retain", [None, 3])
def test_bf16_is_computed_in_fp32(retain):
    inputs, kwargs = random_inputs(1, 200, 4, 2, 32, torch.bfloat16), {**SMALL, "window": 50, "retain": retain}
    d_out = torch.randn(1, 200, 4, 32).bfloat16()
    low = out_and_grads(lambda **x: attend(x, **kwargs), inputs, d_out)
    high = out_and_grads(
        lambda **x: attend(x, **kwargs), {name: x.float() for name, x in inputs.items()}, d_out.float()
    )
    for name in high:
        assert low[name].dtype == torch.bfloat16
        assert_close(name, low[name], high[name], rtol=RTOL[torch.bfloat16])
    assert torch.equal(low["out"], high["out"].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("retain", [None, 64])
def test_long_sequence_stays_small(retain):
    """16,384 tokens: the attention weights of both heads alone would take 2 GiB."""
    inputs = random_inputs(1, 16384, 2, 1, 64, torch.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grads = out_and_grads(lambda **x: attend(x, retain=retain), inputs, torch.ones_like(inputs["q"]))
    assert all(x.isfinite().all() for x in grads.values())
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 1.0


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "cuda"}, "auto, reference, triton.*'cuda'"),
        ({"backend": "triton"}, "needs CUDA tensors"),
        ({"q": torch.zeros(1, 40, 5, 8)}, "5 query heads are not a multiple of 2"),
        ({"k": torch.zeros(1, 39, 2, 8), "v": torch.zeros(1, 39, 2, 8)}, "q has 40 tokens but k has 39"),
        ({"v": torch.zeros(1, 40, 1, 8)}, "k and v must have the same shape"),
        ({name: torch.zeros(1, 40, 2, 7) for name in "qkv"}, "even.*7"),
        ({"query_block": 100}, "query_block 100 is not a multiple of cell_size 32"),
        ({"cell_size": 0}, "cell_size must be at least 1, got 0"),
        ({"rope_cos": torch.zeros(40, 8)}, r"cos must be \[40, 4\].*got \[40, 8\]"),
        ({"rope_sin": torch.zeros(39, 4)}, r"sin must be \[40, 4\].*got \[39, 4\]"),
        ({"window": -1}, "window.*-1"),
        ({"retain": 0}, "retain must be at least 1, got 0"),
        ({"recent": 0}, "recent must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"sigma": torch.ones(2)}, r"sigma must be a number or \[4\]"),
        ({"alpha": torch.ones(2)}, r"alpha must be \[4\]"),
        ({"gain": torch.ones(4)}, r"gain \[8\]"),
    ],
)
def test_errors(change, message):
    arguments = {**random_inputs(1, 40, 4, 2, 8), **rope_of(40, 8), **change}
    with pytest.raises(ValueError, match=message):
        freesolo_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "select_cells: backend=.triton. needs CUDA"),
        ({"k": torch.zeros(1, 39, 2, 8)}, "q has 40 tokens but k has 39"),
        ({"query_block": 100}, "query_block 100 is not a multiple of cell_size 32"),
    ],
)
def test_select_errors(change, message):
    inputs = random_inputs(1, 40, 4, 2, 8)
    with pytest.raises(ValueError, match=message):
        select_cells(**{"q": inputs["q"], "k": inputs["k"], **change})
