"""The L2A layer: values and gradients of the vectors, and what holds when gates are all open, all closed or leak."""

import itertools
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.attention import FreeSoloAttention, WindowAttention
from megatron_ext.checkpoint import CheckpointError, load_weights
from megatron_ext.l2a import L2ALayer
from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.router import Gates
from megatron_ext.sequence_context import SequenceContext
from recipes.kinds import L2A_KINDS
from recipes.schema import AttentionConfig, ModelConfig
from tests.numerics import assert_close, load_vector

pytestmark = pytest.mark.usefixtures("alone")
VECTORS = ("l2a_layer", "l2a_layer_headdim", "l2a_layer_leak")
MODEL = ModelConfig(
    num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=64, seq_length=60, qkv_bias=True,
    init_std=0.3,
    attention=AttentionConfig(
        kind="l2a", window=7, cell_size=4, query_block=8, top_k=3, retain=5, recent=2, leak_probability=0.0
    ),
)  # fmt: skip


# the vectors


def merged_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """megatron-core's rows: for each kv head its query heads, its key head, its value head."""
    parts = [x.unflatten(0, (kv_heads, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(merged: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> dict[str, torch.Tensor]:
    """The way back."""
    by_group = merged.unflatten(0, (kv_heads, -1))
    sizes = (heads // kv_heads * head_dim, head_dim, head_dim)
    parts = by_group.split(sizes, dim=1)
    return {name: part.flatten(0, 1) for name, part in zip("qkv", parts, strict=True)}


def vector_layer(name: str) -> tuple[L2ALayer, dict, dict]:
    """The layer of a vector in fp64, with its MLP turned to zero, and the vector."""
    found, params = load_vector(name)
    found = {key: x.double() if x.is_floating_point() else x for key, x in found.items()}
    config = ModelConfig(
        num_layers=1, hidden_size=found["in_x"].shape[1], num_heads=params["Hq"], num_kv_heads=params["Hk"],
        head_dim=params["d"], ffn_size=8, vocab_size=8, seq_length=found["in_x"].shape[0],
        qkv_bias="in_qb" in found, norm_eps=params["eps"],
        attention=AttentionConfig(
            kind="l2a", window=params["window"], rope_base=params["base"], gate_temperature=params["temp"],
            gate_threshold=params["threshold"], leak_probability=float(params["leak"]),
        ),
    )  # fmt: skip
    model = build_model(config).double()
    layer = model.decoder.layers[0]
    with torch.no_grad():
        layer.mlp.linear_fc2.weight.zero_()
        layer.input_layernorm.weight.copy_(found["in_ln"])
        layer.global_layernorm.weight.copy_(found["in_ln_g"])
        layer.router.weight.copy_(found["in_router"][None])
        for attention, suffix in ((layer.self_attention, ""), (layer.global_attention, "_g")):
            parts = (found[f"in_{x}{suffix}"] for x in "qkv")
            attention.linear_qkv.weight.copy_(merged_qkv(*parts, params["Hk"]))
            attention.linear_proj.weight.copy_(found[f"in_o{suffix}"])
            if config.qkv_bias:
                biases = (found[f"in_{x}b{suffix}"] for x in "qkv")
                attention.linear_qkv.bias.copy_(merged_qkv(*biases, params["Hk"]))
    context = slice_context(
        config, torch.zeros(1, config.seq_length, dtype=torch.int64), start=0, length=config.seq_length
    )
    return layer.train(), found, params | {"context": context}


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name):
    layer, found, params = vector_layer(name)
    context = params["context"]
    context.penalty_scale = params["reg_coeff"]
    decided = []
    layer.router.register_forward_hook(lambda _module, _inputs, gates: decided.append(gates))
    x = found["in_x"][:, None].requires_grad_()
    y, _ = layer(hidden_states=x, attention_mask=None, packed_seq_params=context)
    y.backward(found["dy"][:, None])
    assert torch.equal(decided[0].is_open[:, 0], found["gate"])
    assert context.penalties[1].item() == pytest.approx(found["reg"].item(), rel=1e-6)
    assert_close("y", y[:, 0], found["y"], rtol=1e-6)
    got = {"x": x.grad[:, 0], "ln": layer.input_layernorm.weight.grad, "ln_g": layer.global_layernorm.weight.grad}
    got["router"] = layer.router.weight.grad[0]
    for attention, suffix in ((layer.self_attention, ""), (layer.global_attention, "_g")):
        got[f"o{suffix}"] = attention.linear_proj.weight.grad
        shape = (params["Hq"], params["Hk"], params["d"])
        weights = split_qkv(attention.linear_qkv.weight.grad, *shape)
        got |= {f"{part}{suffix}": grad for part, grad in weights.items()}
        if "in_qb" in found:
            biases = split_qkv(attention.linear_qkv.bias.grad, *shape)
            got |= {f"{part}b{suffix}": grad for part, grad in biases.items()}
    wanted = {key.removeprefix("grad_"): x for key, x in found.items() if key.startswith("grad_")}
    assert got.keys() == wanted.keys()
    for key, want in wanted.items():
        assert_close(key, got[key], want, rtol=1e-5, atol=1e-7)


# identities


def build(kind: str = "l2a", **attention) -> LanguageModel:
    """A model of one layer in fp64, its router away from zero."""
    torch.manual_seed(1)
    config = replace(MODEL, attention=replace(MODEL.attention, kind=kind, **attention))
    model = build_model(config).double().train()
    layer = model.decoder.layers[0]
    if kind != "context_free":
        layer.router.weight.data.normal_()
    for norm in (layer.input_layernorm, layer.global_layernorm, layer.pre_mlp_layernorm):
        norm.weight.data.add_(torch.rand(32, dtype=torch.float64))
    return model


def context_of(model: LanguageModel, **draws) -> SequenceContext:
    config = replace(MODEL, attention=replace(MODEL.attention, window=7))
    return slice_context(config, torch.zeros(2, 60, dtype=torch.int64), start=0, length=60, **draws)


def set_gates(model: LanguageModel, is_open: torch.Tensor) -> None:
    """Let the router say open where `is_open` [T, B] is true, whatever it has learned."""

    def decide(_module, _inputs, gates: Gates) -> Gates:
        value = is_open.to(gates.value) + (gates.value - gates.value.detach())
        return Gates(is_open, value, gates.probability)

    model.decoder.layers[0].router.register_forward_hook(decide)


def run_layer(layer, x: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    return layer(hidden_states=x, attention_mask=None, packed_seq_params=context)[0]


def every_query(layer: L2ALayer, attention, z: torch.Tensor, context: SequenceContext) -> torch.Tensor:
    """What the second look gives every query: dense attention, or FreeSolo's readout as FreeSolo less its window."""
    core = attention.core_attention
    common = {"backend": "reference", "pg_collection": layer.pg_collection}
    cores = {"look": (1, WindowAttention(layer.config, 1, window=None, **common))}
    if isinstance(core, FreeSoloAttention):
        cores = {"both": (1, core), "local": (-1, WindowAttention(layer.config, 1, window=core.window, **common))}
    try:
        looked = torch.zeros_like(z)
        for sign, attention.core_attention in cores.values():
            looked = looked + sign * attention(z, attention_mask=None, packed_seq_params=context)[0]
    finally:
        attention.core_attention = core
    return looked


def by_hand(layer: L2ALayer, x: torch.Tensor, context: SequenceContext, is_open: torch.Tensor) -> torch.Tensor:
    """The layer's equations with the stock modules and the second look of every query."""
    h = x + layer.self_attention(layer.input_layernorm(x), attention_mask=None, packed_seq_params=context)[0]
    z = layer.global_layernorm(h)
    looked = every_query(layer, getattr(layer, "global_attention", layer.self_attention), z, context)
    gate = layer.router(z, context, 1).value  # 0 and 1, with the gradient of p
    y = h + gate[..., None] * looked.masked_fill(~is_open[..., None], 0)
    return y + layer.mlp(layer.pre_mlp_layernorm(y))[0]


@pytest.mark.parametrize("kind", L2A_KINDS)
@pytest.mark.parametrize("window", [0, 7, 100])
@pytest.mark.parametrize("gates", ["open", "closed", "mixed"])
def test_layer_is_the_sum_of_its_parts(kind, window, gates):
    """All open: local plus global attention. All closed: the local branch alone. Window 0: each token sees itself."""
    model = build(kind, window=window)
    layer, context = model.decoder.layers[0], context_of(model)
    x = torch.randn(60, 2, 32, dtype=torch.float64, requires_grad=True)
    share = {"open": 1.0, "closed": 0.0, "mixed": 0.4}[gates]
    is_open = torch.rand(60, 2) < share
    set_gates(model, is_open)
    got, want = run_layer(layer, x, context), by_hand(layer, x, context, is_open)
    assert_close("layer", got, want, rtol=1e-12)
    names, weights = zip(*layer.named_parameters(), strict=True)
    d_out = torch.randn_like(x)
    gradients = (torch.autograd.grad(y, (x, *weights), d_out) for y in (got, want))
    for name, *pair in zip(("x", *names), *gradients, strict=True):
        assert_close(name, *pair, rtol=1e-10, atol=1e-14)


class _NoHostSync(TorchDispatchMode):
    """Refuses what would make a host wait for its GPU: a number read from a tensor, or a shape that depends on one."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "aten.equal", "aten.bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not any(name in str(func) for name in self.REFUSED), func
        chosen = args[1] if "aten.index." in str(func) or "aten.index_put" in str(func) else ()
        assert not any(x is not None and x.dtype == torch.bool for x in chosen), func
        assert "repeat_interleave.Tensor" not in str(func) or kwargs.get("output_size") is not None, func
        return func(*args, **kwargs)


# what copies between a GPU and its host, of which a CPU's tensors tell the dispatcher nothing
READS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
WRITES = ("tensor", "as_tensor")


@contextmanager
def no_host_sync():
    """`_NoHostSync`, and none of the calls above, and no `x.to("cpu")`."""

    def refuse(*_args, **_options):
        raise AssertionError("a copy between a GPU and its host")

    def move(x, *args, **options):
        assert "cpu" not in (*args, *options.values()), "a copy to the host"
        return to(x, *args, **options)

    to = torch.Tensor.to
    with ExitStack() as stack:
        for owner, names in ((torch.Tensor, READS), (torch, WRITES)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, refuse))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", move))
        stack.enter_context(_NoHostSync())
        yield


SYNCS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to-cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "if": lambda x: 1 if x.any() else 0,
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "range": lambda x: range(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: x.repeat_interleave(x),
    "tensor": lambda x: x + torch.tensor([1, 2], device=x.device),
}


@pytest.mark.parametrize("what", SYNCS)
def test_host_syncs_are_noticed(what):
    x = torch.arange(1, 3)
    with pytest.raises(AssertionError), no_host_sync():
        SYNCS[what](x)


@pytest.mark.parametrize(
    ("kind", "documents"),
    [*itertools.product(("l2a", "l2a_shared", "context_free"), (False, True)), ("l2a_freesolo", False)],
)
def test_no_host_sync(kind, documents, monkeypatch):
    """Forward and backward of the layer, measured and leaking or not; the kernels below have a test on the GPU."""

    def operator(q, k, v, *_rest, **_options):
        return q * k.sum() * v.sum()

    def rows(q_rows, positions, k, v, **_options):
        return q_rows * k.sum() * v.sum(), q_rows[..., 0]

    def cells(q, k_cells, v_cells, _index, **_options):
        return q * k_cells.sum() * v_cells.sum(), k_cells.new_ones(*k_cells.shape[:2], 8)

    monkeypatch.setattr("megatron_ext.attention.read_cells", cells)
    monkeypatch.setattr("megatron_ext.parallel.queries.sparse_query_attention", operator)
    monkeypatch.setattr("megatron_ext.parallel.queries.sparse_query_rows", rows)
    monkeypatch.setattr("megatron_ext.attention.sliding_window_attention", operator)
    model = build(kind, leak_probability=0.5, document_mask=documents)
    layer = model.decoder.layers[0]
    for step in range(4):
        context = context_of(model, step=step, measure=True)
        context.penalty_scale = 0.1
        if documents:
            context.first_key = torch.zeros(2, 60, dtype=torch.int64)
        x = torch.randn(60, 2, 32, dtype=torch.float64, requires_grad=True)
        with no_host_sync():
            run_layer(layer, x, context).sum().backward()
        assert x.grad.any()


def test_closed_layer_is_the_sliding_window_layer():
    model, plain = build(), build_model(replace(MODEL, attention=replace(MODEL.attention, kind="swa"))).double()
    layer, stock = model.decoder.layers[0], plain.decoder.layers[0]
    set_gates(model, torch.zeros(60, 2, dtype=torch.bool))
    stock.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(60, 2, 32, dtype=torch.float64)
    assert torch.equal(run_layer(layer, x, context_of(model)), run_layer(stock, x, context_of(model)))


def global_gradients(leak: float, is_open: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the second look's parameters."""
    model = build(leak_probability=leak)
    set_gates(model, is_open)
    torch.manual_seed(2)
    x = torch.randn(60, 2, 32, dtype=torch.float64)
    run_layer(model.decoder.layers[0], x, context_of(model)).square().sum().backward()
    names = ("global_attention.linear_qkv.weight", "global_attention.linear_proj.weight", "router.weight")
    layer = dict(model.decoder.layers[0].named_parameters())
    return {name: layer[name].grad for name in names}


def test_closed_gates_learn_from_leaks_only():
    """Closed, the second look passes no gradient at all; a leak gives one to the router, and to nothing else."""
    closed = torch.zeros(60, 2, dtype=torch.bool)
    without, leaked = global_gradients(0.0, closed), global_gradients(1.0, closed)
    assert all((gradient == 0).all() for gradient in without.values())
    assert (leaked["router.weight"] != 0).all()
    assert all((gradient == 0).all() for name, gradient in leaked.items() if name != "router.weight")


def test_leak_changes_no_output_and_only_the_gradient_of_the_router():
    mixed = torch.rand(60, 2) < 0.5
    without, leaked = global_gradients(0.0, mixed), global_gradients(1.0, mixed)
    assert not torch.allclose(without["router.weight"], leaked["router.weight"], rtol=1e-3)
    for name in ("global_attention.linear_qkv.weight", "global_attention.linear_proj.weight"):
        assert_close(name, leaked[name], without[name], rtol=1e-12)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_nothing_leaks_outside_training(mode):
    model = build(leak_probability=1.0)
    layer = model.decoder.layers[0]
    seen = []
    layer.global_attention.core_attention.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[3]))
    x = torch.randn(60, 2, 32, dtype=torch.float64)
    run_layer(layer, x, context_of(model))
    with torch.no_grad() if mode == "no_grad" else nullcontext():
        run_layer(layer.eval() if mode == "eval" else layer, x, context_of(model))
    assert seen[0].mask is None and seen[1].mask is not None


def test_threshold_moves_the_gates():
    """A trained model may be asked to look back more or less often."""
    shares = []
    for threshold in (0.1, 0.5, 0.9):
        model = build(gate_threshold=threshold, gate_temperature=2.0)
        context = context_of(model)
        context.measure = True
        torch.manual_seed(3)
        run_layer(model.decoder.layers[0], torch.randn(60, 2, 32, dtype=torch.float64), context)
        total, count = context.measured["open_fraction"][1].tolist()
        shares.append(total / count)
    assert 1 >= shares[0] > shares[1] > shares[2] >= 0


@pytest.mark.parametrize("kind", L2A_KINDS)
def test_penalty_is_a_part_of_the_loss(kind):
    """The layer's gradient is that of loss + scale * sum of p^2."""
    model = build(kind)
    layer, x = model.decoder.layers[0], torch.randn(60, 2, 32, dtype=torch.float64)
    found = []
    for scale in (0.0, 0.3):
        context = context_of(model)
        context.penalty_scale = scale
        model.zero_grad()
        kept = []
        hook = layer.router.register_forward_hook(lambda _module, _inputs, gates, kept=kept: kept.append(gates))
        loss = run_layer(layer, x, context).square().sum()
        if scale == 0 and kind != "context_free":
            loss = loss + 0.3 * kept[0].probability.square().sum()
        hook.remove()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None})
    by_sum, by_layer = found
    for name, want in by_sum.items():
        assert_close(name, by_layer[name], want, rtol=1e-10, atol=1e-14)
    assert (1 in context.penalties) == (kind != "context_free")


def load_from(source, source_config, model, config, path):
    """`load_weights` from another model in memory."""
    facts = {"model": asdict(source_config), "layout": {}}
    with (
        mock.patch("megatron_ext.checkpoint.stored_weights", lambda _path: source.state_dict()),
        mock.patch("megatron_ext.checkpoint.read_facts", lambda _path: facts),
    ):
        load_weights(model, path, config)


def other(**changes):
    attention = {key: changes.pop(key) for key in ("kind", "closed_layers") if key in changes}
    return replace(MODEL, **changes, attention=replace(MODEL.attention, **attention))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        pytest.param(other(num_layers=3), "num_layers is 3", id="more-layers"),
        pytest.param(other(num_heads=MODEL.num_heads * 2, head_dim=4), "model.num_heads", id="cut-otherwise"),
        pytest.param(other(norm_eps=1e-3), "norm_eps is 0.001", id="another-norm"),
        pytest.param(other(closed_layers=[0]), "it has no decoder.layers.0.global_", id="pruned"),
        pytest.param(other(kind="l2a_shared"), "it has no decoder.layers.0.global_attention", id="shared"),
        pytest.param(other(kind="context_free"), "it has no decoder.layers.0.router.weight", id="no-router"),
    ],
)
def test_weights_of_another_model_are_refused(theirs, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_from(build_model(theirs), theirs, build_model(MODEL), MODEL, tmp_path)


def test_weights_without_a_place_are_refused(tmp_path):
    for ours in (other(kind="dense"), other(closed_layers=[0]), other(kind="l2a_shared")):
        with pytest.raises(CheckpointError, match="no place"):
            load_from(build_model(MODEL), MODEL, build_model(ours), ours, tmp_path)


def test_starts_from_a_dense_model(tmp_path):
    """LN_g starts as a copy of LN, the global attention as a copy of the local one, every gate open."""
    dense = build_model(replace(MODEL, attention=replace(MODEL.attention, kind="dense")))
    model = build_model(MODEL)
    load_from(dense, replace(MODEL, attention=replace(MODEL.attention, kind="dense")), model, MODEL, tmp_path)
    layer, source = model.decoder.layers[0], dense.decoder.layers[0]
    for name, value in source.self_attention.named_parameters():
        assert torch.equal(dict(layer.self_attention.named_parameters())[name], value)
        assert torch.equal(dict(layer.global_attention.named_parameters())[name], value)
    assert torch.equal(layer.global_layernorm.weight, source.input_layernorm.weight)
    assert (layer.router.weight == 0).all()
