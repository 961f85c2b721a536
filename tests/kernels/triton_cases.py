"""Cases of test_triton_freesolo.py, which runs them under TRITON_INTERPRET=1."""

import pytest
import torch

import kernels.triton_cells
import kernels.triton_freesolo
import kernels.triton_readout
import kernels.triton_rows
from kernels.cells import (
    cell_priority,
    choose_cells,
    number_cells,
    offered_cells,
    read_cells,
    split_cells,
    take_cells,
)
from kernels.freesolo import freesolo_attention, measured_freesolo_attention, select_cells
from kernels.rope import apply_rope, rope_tables
from kernels.sparse_query import sparse_query_attention, sparse_query_rows
from kernels.window import sliding_window_attention
from tests.definitions import sparse_query_by_loops
from tests.numerics import assert_close, load_vector, out_and_grads

RTOL = {torch.float32: 1e-5, torch.float16: 2e-3}
ATOL = 1e-6  # gradients that are zero but for rounding


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch):
    """Split the pairs of a cell among several programs, as long sequences do."""
    for module in (kernels.triton_cells, kernels.triton_readout):
        monkeypatch.setattr(module, "run_length", lambda pairs: 64)


def compare(function, inputs, dtype=torch.float32, **kwargs):
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    d_out = torch.randn_like(inputs["q"])
    got = out_and_grads(lambda **x: function(**x, **kwargs, backend="triton"), inputs, d_out)
    want = out_and_grads(lambda **x: function(**x, **kwargs, backend="reference"), inputs, d_out)
    for name in want:
        assert_close(name, got[name], want[name], rtol=RTOL[dtype], atol=ATOL)


def normal(**shapes):
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("B", "Tq", "Tk", "H", "G", "D", "window", "query_offset", "documents", "dtype"),
    [
        pytest.param(2, 70, 70, 4, 2, 32, 20, 0, False, torch.float32, id="ragged-gqa"),
        pytest.param(1, 37, 100, 2, 1, 24, None, 50, False, torch.float32, id="dense-offset-padded-dim"),
        pytest.param(1, 100, 120, 2, 2, 16, 40, 20, True, torch.float32, id="documents"),
        pytest.param(1, 1, 1, 1, 1, 64, 0, 0, False, torch.float32, id="one-token"),
        pytest.param(1, 150, 150, 2, 1, 16, 0, 0, False, torch.float16, id="only-itself"),
        pytest.param(1, 300, 300, 1, 1, 4, 130, 0, False, torch.float16, id="tiny-dim"),
    ],
)
def test_window(B, Tq, Tk, H, G, D, window, query_offset, documents, dtype):
    first_key = torch.randint(0, Tk, (B, Tq)) if documents else None
    inputs = normal(q=(B, Tq, H, D), k=(B, Tk, G, D), v=(B, Tk, G, D))
    options = {"window": window, "query_offset": query_offset, "first_key": first_key}
    compare(sliding_window_attention, inputs, dtype, **options)


@pytest.mark.parametrize(("D", "rows", "dtype"), [(24, True, torch.float32), (64, False, torch.float16)])
def test_rope(D, rows, dtype):
    positions = torch.randint(0, 2**17, (2, 33) if rows else (33,))
    cos, sin = rope_tables(positions, D, 10000.0)
    q = torch.randn(2, 3, 33, D).transpose(1, 2)  # heads that are not dense in a token
    compare(lambda q, backend: apply_rope(q, cos, sin, backend=backend), {"q": q}, dtype)


@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "kwargs", "dtype"),
    [
        pytest.param(1, 150, 2, 1, 16, {"window": 40, "query_block": 32, "top_k": 3}, torch.float32, id="fs-gqa"),
        pytest.param(
            2, 110, 2, 2, 24, {"window": 40, "query_block": 32, "retain": 2, "recent": 2, "lam": 0.3}, torch.float32,
            id="fs-l-batch-padded-dim",
        ),
        pytest.param(1, 1, 1, 1, 64, {"window": 0, "query_block": 16}, torch.float32, id="one-token"),
        pytest.param(1, 200, 2, 1, 32, {"window": 64, "query_block": 48, "retain": 4, "recent": 3}, torch.float16,
                     id="fs-l-odd-block"),
        pytest.param(1, 97, 1, 1, 16, {"window": 5, "query_block": 16, "top_k": 16, "lam": 0.0}, torch.float32,
                     id="fewer-cells-than-k"),
    ],
)  # fmt: skip
def test_freesolo(B, T, H, G, D, kwargs, dtype):
    inputs = normal(q=(B, T, H, D), k=(B, T, G, D), v=(B, T, G, D), alpha=(H,), gain=(D,))
    cos, sin = rope_tables(torch.arange(T), D, 10000.0)
    kwargs = {"cell_size": 16, "deterministic": bool(T % 2), "rope_cos": cos, "rope_sin": sin, **kwargs}
    compare(freesolo_attention, inputs, dtype, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_operators_describe_themselves(dtype):
    """Schemas and fake implementations agree with what runs: torch.compile keeps one graph by them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    q, k, v = (torch.randn(1, 64, heads, 16, dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
    alpha, gain, sigma, lam = torch.ones(2), torch.ones(16), torch.full((2,), 4.0), torch.ones(2)
    cos, sin = rope_tables(torch.arange(64), 16, 10000.0)
    for keep in (True, False):
        whole = torch.ops.longpitch.freesolo.default
        sizes = [9, 16, 16, 2, -1, 8, False, keep]  # window .. keep
        torch.library.opcheck(whole, (q, k, v, alpha, gain, cos, sin, sigma, lam, 1e-8, sizes), test_utils=checks)
    cells = (split_cells(x.detach(), 16).requires_grad_() for x in (k, v))
    table = (q, *cells, None, sigma, lam, 0, 16, 2, None, 8, False)
    torch.library.opcheck(torch.ops.longpitch.read_cells.default, table, test_utils=checks)
    torch.library.opcheck(torch.ops.longpitch.rotate.default, (q, cos, sin, 1.0), test_utils=checks)
    for active in (None, torch.rand(1, 64) < 0.5):
        rows = (q, k, v, active, None, None, None if active is not None else 9, 0, 0, 0.25, True)
        torch.library.opcheck(torch.ops.longpitch.rows_attention.default, rows, test_utils=checks)


def test_chunks_of_heads(monkeypatch):
    chunks = kernels.triton_readout.head_chunks
    monkeypatch.setattr(kernels.triton_freesolo, "head_chunks", lambda BG, _: chunks(BG, 1, budget=2))
    inputs = normal(q=(1, 60, 6, 16), k=(1, 60, 3, 16), v=(1, 60, 3, 16), alpha=(6,), gain=(16,))
    cos, sin = rope_tables(torch.arange(60), 16, 10000.0)
    compare(freesolo_attention, inputs, window=9, cell_size=16, query_block=16, rope_cos=cos, rope_sin=sin)


@pytest.mark.parametrize("step", [16, 32])
def test_small_steps_of_the_readouts_backward(step, monkeypatch):
    """What GPUs with little shared memory take; pairs lie in tiles of 64 all the same."""
    monkeypatch.setattr(kernels.triton_readout, "backward_step", lambda *_: step)
    inputs = normal(q=(1, 110, 2, 24), k=(1, 110, 1, 24), v=(1, 110, 1, 24), alpha=(2,), gain=(24,))
    cos, sin = rope_tables(torch.arange(110), 24, 10000.0)
    compare(freesolo_attention, inputs, window=9, cell_size=16, query_block=16, rope_cos=cos, rope_sin=sin)


def test_small_tiles_of_keys(monkeypatch):
    monkeypatch.setattr(kernels.triton_rows, "shared_memory", lambda device: 99 * 1024)
    compare(sliding_window_attention, normal(q=(1, 150, 2, 96), k=(1, 150, 1, 96), v=(1, 150, 1, 96)), torch.float16,
            window=70)  # fmt: skip


@pytest.mark.parametrize("name", ["fs_ragged", "fsl_small"])
def test_selection_of_the_vectors(name):
    arrays, params = load_vector(name)
    q, k = (arrays[x][None].float() for x in ("q", "k"))
    kwargs = {"cell_size": params["s"], "query_block": params["B"], "top_k": params["K"]}
    kwargs |= {"retain": params.get("P"), "recent": params.get("W") or 8}
    got = select_cells(q, k, **kwargs, sigma=params["sigma"], lam=params["lam"], backend="triton")
    assert torch.equal(got[0], arrays["selected"].int())


@pytest.mark.parametrize("retain", [None, 3])
def test_ties_prefer_the_smaller_index(retain):
    k = torch.randn(1, 16, 1, 16).repeat(1, 12, 1, 1)  # twelve equal cells
    q = torch.randn(1, 192, 2, 16)
    kwargs = {"cell_size": 16, "query_block": 32, "top_k": 4, "sigma": 0.5, "retain": retain, "recent": 2}
    got = select_cells(q, k, **kwargs, backend="triton")
    assert torch.equal(got, select_cells(q, k, **kwargs, backend="reference"))


@pytest.mark.parametrize("retain", [None, 2])
def test_table_of_offered_cells(retain):
    """A later rank's table: earlier cells that were offered, with NaN under the padding, then its own."""
    T, start, earlier, s = 192, 96, 6, 16
    ranking = {"query_block": 48, "top_k": 2, "sigma": 4.0, "lam": 0.3, "retain": retain, "recent": 2}
    inputs = normal(q=(1, T, 4, 16), k=(1, T, 2, 16), v=(1, T, 2, 16))
    index = number_cells(split_cells(inputs["k"], s))
    priority = cell_priority(split_cells(inputs["k"], s), "triton")
    places = index[..., :earlier]
    if retain is not None:
        places = offered_cells(priority[..., :earlier], places, retain=retain, recent=2)
    places = torch.cat([places, torch.full_like(places[..., :2], -1)], dim=-1)
    table = torch.cat([places, index[..., earlier:]], dim=-1)

    def cells_of(x):
        cells = split_cells(x, s)
        at = table.clamp(min=0)[..., None, None].expand(*table.shape, s, 16)
        return cells.gather(2, at).masked_fill((table < 0)[..., None, None], torch.nan)

    def read(q, k, v, backend):
        return torch.cat(
            [q[:, :start], read_cells(q[:, start:], cells_of(k), cells_of(v), table, query_start=start, **ranking,
                                      backend=backend).u], dim=1,
        )  # fmt: skip

    compare(read, inputs)
    whole = choose_cells(inputs["q"], split_cells(inputs["k"], s), index, **ranking, backend="triton")
    rows = inputs["q"][:, start:]
    part = choose_cells(rows, cells_of(inputs["k"]), table, query_start=start, **ranking, backend="triton")
    assert torch.equal(part, whole[:, start:])


@pytest.mark.parametrize(("T", "start"), [(200, 0), (100, 96), (60, 1440), (10, 0)])
def test_pools_tell_what_share_of_the_cells_they_hold(T, start):
    """The kernel's figure is the reference's: of a whole sequence, and of a later rank whose table lacks cells."""
    ranking = {"query_block": 48, "top_k": 2, "sigma": 4.0, "lam": 0.3, "retain": 3, "recent": 2}
    q, k, v = normal(q=(2, T, 4, 16), k=(2, start + T, 2, 16), v=(2, start + T, 2, 16)).values()
    cells = [split_cells(x, 16) for x in (k, v)]
    index, before = number_cells(cells[0]), start // 16
    offer = offered_cells(cell_priority(cells[0])[..., :before], index[..., :before], retain=3, recent=2)
    places = torch.cat([offer, index[..., before:]], dim=-1)
    table = [take_cells(x, places) for x in cells]
    got, want = (
        read_cells(q, *table, places, query_start=start, **ranking, backend=backend).retained
        for backend in ("triton", "reference")
    )
    assert_close("retained", got, want, rtol=1e-7)
    if start == 0:
        cos, sin = rope_tables(torch.arange(T), 16, 10000.0)
        sizes = {"window": 9, "cell_size": 16, "eps": 1e-8}
        _, whole = measured_freesolo_attention(
            q, k, v, torch.ones(4), torch.ones(16), cos, sin, **sizes, **ranking, backend="triton"
        )
        assert torch.equal(whole, got)


def test_table_of_every_cell():
    """Without an index the table is cells 0 .. N-1, also for queries that start later."""
    start, ranking = 96, {"query_block": 48, "top_k": 3, "sigma": 4.0, "lam": 0.3, "retain": None, "recent": 2}
    inputs = normal(q=(1, 90, 4, 16), k=(1, 192, 2, 16), v=(1, 192, 2, 16))

    def read(q, k, v, backend, numbered=False):
        cells = split_cells(k, 16)
        index = number_cells(cells) if numbered else None
        return read_cells(q, cells, split_cells(v, 16), index, query_start=start, **ranking, backend=backend).u

    compare(read, inputs)
    assert torch.equal(read(**inputs, backend="reference"), read(**inputs, backend="reference", numbered=True))


def attend_freesolo(q, k, v):
    cos, sin = rope_tables(torch.arange(q.shape[1]), q.shape[3], 10000.0)
    sizes = {"window": 40, "cell_size": 16, "query_block": 32, "top_k": 3, "retain": 2, "recent": 2}
    ones = torch.ones(q.shape[2]), torch.ones(q.shape[3])
    return freesolo_attention(q, k, v, *ones, cos, sin, **sizes, backend="triton")


def attend_cells(q, k, v):
    ranking = {"query_block": 32, "top_k": 3, "sigma": 4.0, "lam": 0.3, "retain": 2, "recent": 2}
    return read_cells(q, split_cells(k, 16), split_cells(v, 16), None, **ranking, backend="triton").u


def attend_window(q, k, v):
    return sliding_window_attention(q, k, v, window=20, backend="triton")


def attend_sparse(q, k, v, deterministic=False):
    active = torch.arange(q.shape[1]).expand(q.shape[:2]) % 3 > 0
    return sparse_query_attention(q, k, v, active, backend="triton", deterministic=deterministic)


def attend_sparse_exactly(q, k, v):
    return attend_sparse(q, k, v, deterministic=True)


def attend_rows(q, k, v):
    positions = torch.arange(q.shape[1]).expand(q.shape[:2])
    return sparse_query_rows(q, positions, k, v, backend="triton")[0]


@pytest.mark.parametrize(
    ("attend", "dim", "D", "dtype", "number"),
    [
        pytest.param(attend, dim, 24, torch.float32, number, id=f"{attend.__name__}-{beside}")
        for attend in (attend_freesolo, attend_cells, attend_window, attend_sparse, attend_sparse_exactly, attend_rows)
        for dim, number, beside in ((2, torch.inf, "head"), (0, torch.nan, "sequence"))
        if (attend, dim) != (attend_cells, 0)  # inside of attend_freesolo, and slow here
    ]
    + [pytest.param(attend_window, 2, 96, torch.float16, torch.nan, id="d96")],
)
def test_what_stands_beside_a_head_does_not_reach_it(attend, dim, D, dtype, number):
    """Where the next head, or the next sequence, is not finite: padded lanes and padded keys are zeros, not theirs."""
    inputs = {name: x.to(dtype) for name, x in normal(q=(2, 50, 2, D), k=(2, 50, 2, D), v=(2, 50, 2, D)).items()}
    d_out = torch.randn(2, 50, 2, D).to(dtype)
    want = out_and_grads(attend, inputs, d_out)
    for x in inputs.values():
        x.select(dim, 1).fill_(number)
    for name, got in out_and_grads(attend, inputs, d_out).items():
        assert torch.equal(got.select(dim, 0), want[name].select(dim, 0)), name


def test_sizes_that_the_kernels_refuse():
    q = torch.randn(1, 64, 1, 16)
    with pytest.raises(ValueError, match="16, 32, 64 or 128 tokens, got cell_size 8"):
        select_cells(q, q, cell_size=8, query_block=16, backend="triton")
    with pytest.raises(ValueError, match="bf16, fp16 or fp32"):
        select_cells(q.double(), q.double(), backend="triton")
    with pytest.raises(ValueError, match="top_k up to 64, got 65"):
        select_cells(q, q, top_k=65, backend="triton")
    wide = torch.randn(1, 64, 1, 130)
    cos, sin = rope_tables(torch.arange(64), 130, 10000.0)
    cells = split_cells(wide, 16)
    ranking = {"query_block": 16, "top_k": 2, "sigma": 4.0, "lam": 0.3, "retain": 2, "recent": 2}
    for refused in (
        lambda: sliding_window_attention(wide, wide, wide, window=9, backend="triton"),
        lambda: sparse_query_attention(wide, wide, wide, None, backend="triton"),
        lambda: sparse_query_rows(wide, torch.arange(64)[None], wide, wide, backend="triton"),
        lambda: select_cells(wide, wide, backend="triton"),
        lambda: read_cells(wide, cells, cells, None, **ranking, backend="triton"),
        lambda: freesolo_attention(wide, wide, wide, torch.ones(1), torch.ones(130), cos, sin, backend="triton"),
    ):
        with pytest.raises(ValueError, match="head dim of at most 128, got 130"):
            refused()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D", "share", "documents", "dtype"),
    [
        pytest.param(3, 70, 6, 2, 32, 0.3, False, torch.float32, id="gqa3"),
        pytest.param(1, 1, 2, 1, 64, 1.0, False, torch.float32, id="one-token"),
        pytest.param(2, 50, 4, 2, 24, 0.0, False, torch.float32, id="none"),
        pytest.param(2, 90, 7, 1, 12, 0.5, True, torch.float32, id="documents-gqa7-padded-dim"),
        pytest.param(1, 200, 4, 1, 96, 0.7, False, torch.float16, id="d96"),
        pytest.param(2, 300, 2, 2, 16, None, True, torch.float16, id="all-in-documents"),
        pytest.param(2, 130, 2, 2, 4, 0.9, False, torch.float16, id="tiny-dim"),
    ],
)
def test_sparse_query(B, T, H, G, D, share, documents, deterministic, dtype, monkeypatch):
    # several programs, and in half of the cases head after head: as on a GPU with many tiles
    monkeypatch.setattr(kernels.triton_rows, "num_processors", lambda device: 3)
    monkeypatch.setattr(kernels.triton_rows, "_SPREAD", 2 if deterministic else 512)
    monkeypatch.setattr(kernels.triton_rows, "_SCRATCH", 1 if deterministic else 2**30)
    # more of the queries of one row than of the next
    active = None if share is None else torch.rand(B, T) < torch.linspace(share, share / 2, B)[:, None]
    cu_seqlens = torch.tensor([0, 1, 8, T - 3, T + 5, B * T] if B > 1 else [0, B * T]).int() if documents else None
    inputs = normal(q=(B, T, H, D), k=(B, T, G, D), v=(B, T, G, D))
    options = {"active": active, "cu_seqlens": cu_seqlens}
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    d_out = torch.randn_like(inputs["q"])
    got = out_and_grads(
        lambda **x: sparse_query_attention(**x, **options, backend="triton", deterministic=deterministic), inputs, d_out
    )
    want = out_and_grads(lambda **x: sparse_query_attention(**x, **options, backend="reference"), inputs, d_out)
    for name in want:
        assert_close(name, got[name], want[name], rtol=RTOL[dtype], atol=ATOL)
    if active is not None:
        assert (got["out"][~active] == 0).all()
        assert (got["dq"][~active] == 0).all()


def test_sparse_query_vector():
    x = {key: value[None] for key, value in load_vector("sparse_query_20")[0].items()}
    inputs = {key: x[key] for key in ("q", "k", "v")}
    got = out_and_grads(lambda **y: sparse_query_attention(**y, active=x["active"], backend="triton"), inputs, x["do"])
    for key, want in (("out", "o"), ("dq", "dq"), ("dk", "dk"), ("dv", "dv")):
        assert_close(key, got[key], x[want], rtol=1e-5)


@pytest.mark.parametrize(("shape", "opened"), [((130, 4, 1, 32), []), ((257, 4, 4, 64), [181])], ids=["none", "one"])
def test_sparse_query_definition(shape, opened):
    T, H, G, D = shape
    inputs = normal(q=(T, H, D), k=(T, G, D), v=(T, G, D))
    active, d_out = torch.isin(torch.arange(T), torch.tensor(opened)), torch.randn(T, H, D)
    want = sparse_query_by_loops(**inputs, active=active, d_out=d_out)
    batch = {key: x[None] for key, x in inputs.items()}
    attend = lambda **y: sparse_query_attention(**y, active=active[None], backend="triton")  # noqa: E731 - one use
    got = out_and_grads(attend, batch, d_out[None])
    for key in want:
        assert_close(key, got[key][0], want[key], rtol=1e-5)


@pytest.mark.parametrize("order", ["ascending", "any"])
@pytest.mark.parametrize("key_start", [0, 40])
def test_rows(order, key_start):
    """Rows in any order, with padding, before and beyond the piece; views of a fused projection; lse has gradient."""
    B, N, S, H, G, D = 2, 60, 100, 4, 2, 16
    positions = torch.randint(0, 200, (B, N))
    positions[:, ::9] = 1000
    positions = positions.sort(1).values if order == "ascending" else positions
    positions = positions.masked_fill(positions == 1000, -1)
    starts = (positions - torch.randint(0, 150, (B, N))).clamp_min(0)
    inputs = {"q": torch.randn(B, N, H, D), "kv": torch.randn(S, B, G, 2 * D)}  # Megatron's order
    weight = torch.randn(B, N, H * D + H)

    def call(q, kv, backend):
        k, v = kv.transpose(0, 1).split(D, dim=3)
        options = {"key_start": key_start, "document_start": starts, "backend": backend}
        out, lse = sparse_query_rows(q, positions, k, v, **options)
        assert (lse == -torch.inf).any()
        return torch.cat([out.flatten(2), lse.where(lse > -torch.inf, 0)], 2)

    got, want = (
        out_and_grads(lambda **x: call(**x, backend=backend), inputs, weight)  # noqa: B023 - called at once
        for backend in ("triton", "reference")
    )
    for name in want:
        assert_close(name, got[name], want[name], rtol=1e-5)
