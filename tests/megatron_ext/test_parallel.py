"""Loss and every gradient are the same under context parallelism, tensor parallelism and recomputation as alone."""

import pytest

from megatron_ext.router import leak_draw
from recipes.kinds import L2A_KINDS
from tests.distributed import run_ranks
from tests.megatron_ext import parity_program
from tests.megatron_ext.parity_program import DRAWS, MODEL, SEQUENCES, TIMEOUT, config

LAYOUTS = [f"tp{tensor} cp{context}" for tensor, context in parity_program.LAYOUTS[4]]


@pytest.fixture(scope="module")
def found() -> dict:
    """All results of one launch on 4 ranks."""
    return run_ranks("tests.megatron_ext.parity_program", 4)


@pytest.fixture(scope="module")
def found_by_eight() -> dict:
    """All results of one launch on 8 ranks."""
    return run_ranks("tests.megatron_ext.parity_program", 8, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("case", SEQUENCES)
def test_eight_ranks_equal_one(found_by_eight, case):
    assert found_by_eight[f"{case} tp2 cp4"] < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SEQUENCES)
def test_equals_one_rank(found, case, layout):
    assert found[f"{case} {layout}"] < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_has_the_time_out_of_the_recipe(found, layout):
    """To the second: the ranks of a group give up as early as the whole world does."""
    assert found[f"{layout} timeouts"] == [TIMEOUT] * 4


def test_gathered_keys_are_freed(found):
    assert found["gathered is freed"]


@pytest.mark.parametrize("kind", ["swa", "freesolo", "freesolo_l", "l2a"])
def test_recomputation_gives_the_same_bits(found, kind):
    assert found[f"{kind} recompute equal"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_measured_figures_do_not_depend_on_the_layout(found, layout):
    got, want = found[f"freesolo_l {layout} measured"]
    assert got["retained_fraction"] == pytest.approx(want["retained_fraction"], rel=1e-12)
    assert all(0 < value < 1 for value in want["retained_fraction"].values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [name for name, shape in SEQUENCES.items() if shape[0] in L2A_KINDS])
def test_gates_are_measured_alike(found, case, layout):
    got, want = found[f"{case} {layout} measured"]
    for figure in want:
        assert got[figure] == pytest.approx(want[figure], rel=1e-12)
    assert all(0.1 < share < 0.9 for share in want["open_fraction"].values())
    assert ("router_norm" in want) == ("context_free" not in case)


def test_one_layer_leaks_and_one_does_not():
    assert [leak_draw(MODEL.attention.leak_probability, layer=layer, **DRAWS) for layer in (1, 2)] == [True, False]


def test_keys_travel_unexpanded(found):
    """Forward: k and v of the kv heads, once; backward: their gradients. Queries: positions, and rows both ways."""
    batch, layers, heads, kv_heads, head_dim = 2, 2, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim
    slice_length = 112  # 200 in two slices of whole blocks of 16
    keys = 2 * batch * slice_length * kv_heads * head_dim * 8
    rows = batch * slice_length // 2 * heads * head_dim * 8
    positions = batch * slice_length // 2 * 8
    assert found["dense tp1 cp2 bytes"] == {"keys": layers * 2 * keys, "queries": layers * (4 * rows + positions)}


def test_window_traffic_does_not_grow_with_the_sequence(found):
    """Forward and backward bring the window's keys and values from each other rank, in fp64, for 2 layers."""
    model, batch = config(*SEQUENCES["swa"]), 2
    halo = model.attention.window * 2 * batch * MODEL.num_kv_heads * MODEL.head_dim * 8
    assert found["swa tp1 cp2 bytes"] == {"window": 2 * 2 * halo}
    assert found["swa_window_0 tp1 cp4 bytes"] == {}


def test_pool_traffic_is_bounded(found):
    """FS-L ranks offer retain + recent cells whatever the length of the slice; FS ranks offer every cell."""
    attention = MODEL.attention
    cells = attention.retain + attention.recent
    one_way = cells * attention.cell_size * 2 * 2 * MODEL.num_kv_heads * MODEL.head_dim * 8
    index = cells * 2 * MODEL.num_kv_heads * 8
    assert found["freesolo_l tp1 cp2 bytes"]["cells"] == 2 * (2 * one_way + index)
    assert found["freesolo tp1 cp2 bytes"]["cells"] > 2 * found["freesolo_l tp1 cp2 bytes"]["cells"]
