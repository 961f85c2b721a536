"""Every attention kind is the stock megatron-core layer with one slot changed, built with the recipe's constants."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.attention import FreeSoloAttention, SharedAttention, SparseQueryAttention, WindowAttention
from megatron_ext.l2a import L2ALayer
from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.specs import RecomputedL2ALayer, RecomputedLayer, layer_spec
from recipes.kinds import ATTENTION_KINDS, L2A_KINDS
from recipes.schema import AttentionConfig, ModelConfig

ONE_LOOK = tuple(kind for kind in ATTENTION_KINDS if kind not in L2A_KINDS)
pytestmark = pytest.mark.usefixtures("alone")
MODEL = ModelConfig(
    num_layers=1, hidden_size=32, num_heads=4, ffn_size=48, vocab_size=64, seq_length=40,
    attention=AttentionConfig(
        window=9, cell_size=4, query_block=8, top_k=3, sigma=2.5, lam=0.3, retain=5, recent=2, eps=1e-6, alpha_init=0.7
    ),
)  # fmt: skip


def build(kind: str, **changes) -> LanguageModel:
    return build_model(replace(MODEL, attention=replace(MODEL.attention, kind=kind), **changes))


def core(model: LanguageModel):
    return model.decoder.layers[0].self_attention.core_attention


def parameters(model: LanguageModel) -> dict[str, list[int]]:
    """Shapes of the first layer's attention."""
    return {name: list(p.shape) for name, p in model.decoder.layers[0].self_attention.named_parameters()}


def logits(model: LanguageModel, config: ModelConfig = MODEL) -> torch.Tensor:
    tokens = torch.randint(64, (2, 40))
    return model(tokens, slice_context(config, torch.zeros(2, 40, dtype=torch.int64), start=0, length=40))


@pytest.mark.parametrize("recompute", [False, True])
def test_closed_layers_have_one_look(recompute):
    attention = replace(MODEL.attention, kind="l2a", closed_layers=[0, 2])
    model = build_model(replace(MODEL, num_layers=4, attention=attention), recompute=recompute)
    assert [isinstance(layer, L2ALayer) for layer in model.decoder.layers] == [False, True, False, True]
    assert [layer.layer_number for layer in model.decoder.layers] == [1, 2, 3, 4]
    assert {core_of.window for core_of in (layer.self_attention.core_attention for layer in model.decoder.layers)} == {
        9
    }
    usual = build_model(replace(MODEL, num_layers=4, attention=replace(attention, closed_layers=[])))
    assert type(model.decoder.final_layernorm) is type(usual.decoder.final_layernorm)


# kind -> module of the layer's attention, module of its global attention, class of its gate
MODULES = {
    "dense": ("WindowAttention", None, None),
    "swa": ("WindowAttention", None, None),
    "freesolo": ("FreeSoloAttention", None, None),
    "freesolo_l": ("FreeSoloAttention", None, None),
    "l2a": ("WindowAttention", "SparseQueryAttention", "Router"),
    "l2a_shared": ("SharedAttention", None, "Router"),
    "l2a_freesolo": ("WindowAttention", "FreeSoloAttention", "Router"),
    "context_free": ("WindowAttention", "SparseQueryAttention", "ContextFreeGate"),
}


def test_every_kind_is_built_of_its_modules():
    found = {}
    for kind in ATTENTION_KINDS:
        slots = layer_spec(kind).submodules
        first = slots.self_attention.submodules.core_attention.module.__name__
        second, gate = getattr(slots, "global_attention", None), getattr(slots, "gate", None)
        second = second and second.submodules.core_attention.module.__name__
        found[kind] = (first, second, gate and gate.module.__name__)
    assert found == MODULES


@pytest.mark.parametrize(
    ("kind", "cls", "constants"),
    [
        ("dense", WindowAttention, {"window": None}),
        ("swa", WindowAttention, {"window": 9}),
        ("freesolo", FreeSoloAttention, {"window": 9, "retain": None}),
        ("freesolo_l", FreeSoloAttention, {"window": 9, "retain": 5}),
        ("l2a", WindowAttention, {"window": 9}),
        ("l2a_shared", SharedAttention, {"window": 9}),
        ("l2a_freesolo", WindowAttention, {"window": 9}),
        ("context_free", WindowAttention, {"window": 9}),
    ],
)
def test_builds_a_layer(kind, cls, constants):
    model = build(kind)
    attention = core(model)
    assert type(attention) is cls
    for name, value in constants.items():
        assert getattr(attention, name) == value
    out = logits(model)
    assert out.shape == (2, 40, 64) and out.isfinite().all()


def test_constants_reach_freesolo():
    attention = core(build("freesolo_l"))
    found = (attention.cell_size, attention.query_block, attention.top_k, attention.recent, attention.eps)
    assert found == (4, 8, 3, 2, 1e-6)
    assert attention.sigma.tolist() == [2.5] * 4
    assert attention.lam.tolist() == pytest.approx([0.3] * 4)


def test_defaults_are_the_schemas():
    params = layer_spec("freesolo").submodules.self_attention.submodules.core_attention.params
    assert (params["window"], params["top_k"], params["retain"]) == (512, 4, None)


def test_unknown_kind():
    with pytest.raises(ValueError, match="'flash' is not one of dense, swa, freesolo, freesolo_l"):
        layer_spec("flash")


@pytest.mark.parametrize("kind", ["freesolo", "freesolo_l", "l2a_freesolo"])
def test_document_mask_is_refused_where_nothing_restarts(kind):
    with pytest.raises(ValueError, match=f"{kind} cannot restart .* document_mask: false or use dense or swa or l2a"):
        layer_spec(kind, AttentionConfig(document_mask=True))


@pytest.mark.parametrize("kind", ["dense", "swa", "l2a", "l2a_shared", "context_free"])
def test_document_mask_is_taken(kind):
    layer_spec(kind, AttentionConfig(document_mask=True))


def comparable(spec: ModuleSpec) -> ModuleSpec:
    """The layer with its MLP taken apart where that is a partial (megatron-core 0.19), which equals no other one."""
    mlp = spec.submodules.mlp
    if isinstance(mlp, partial):
        mlp = (mlp.func, mlp.args, mlp.keywords)
    return replace(spec, submodules=replace(spec.submodules, mlp=mlp))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", ONE_LOOK)
def test_only_the_core_attention_and_the_norm_of_heads_differ_from_stock(kind, qk_norm):
    stock = comparable(get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm))
    ours = comparable(layer_spec(kind, qk_norm=qk_norm))
    assert ours != stock
    attention = ours.submodules.self_attention
    theirs = stock.submodules.self_attention.submodules
    put_back = replace(
        attention.submodules,
        core_attention=theirs.core_attention,
        q_layernorm=theirs.q_layernorm,
        k_layernorm=theirs.k_layernorm,
    )
    attention = replace(attention, submodules=put_back)
    assert replace(ours, submodules=replace(ours.submodules, self_attention=attention)) == stock


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_recomputation_changes_the_layer_class_only(kind):
    plain, recomputed = comparable(layer_spec(kind)), comparable(layer_spec(kind, recompute=True))
    want = (L2ALayer, RecomputedL2ALayer) if kind in L2A_KINDS else (TransformerLayer, RecomputedLayer)
    assert (plain.module, recomputed.module) == want
    assert replace(recomputed, module=plain.module) == plain


# L2A's second look


def second_look(kind: str, **changes) -> dict[str, list[int]]:
    """Parameters of the layer that the stock one lacks."""
    names = {name: list(p.shape) for name, p in build(kind, **changes).decoder.layers[0].named_parameters()}
    stock = {name for name, _ in build("swa", **changes).decoder.layers[0].named_parameters()}
    assert stock <= names.keys()
    return {name: shape for name, shape in names.items() if name not in stock}


def test_parameters_of_the_second_look():
    """These names are those of checkpoints and of the conversion from Hugging Face."""
    norm, router = {"global_layernorm.weight": [32]}, {"router.weight": [1, 32]}
    attention = {f"global_attention.{name}": shape for name, shape in parameters(build("swa")).items()}
    readout = {"global_attention.core_attention.alpha": [4], "global_attention.core_attention.gain": [8]}
    assert second_look("l2a") == norm | router | attention
    assert second_look("l2a_shared") == norm | router
    assert second_look("context_free") == norm | attention
    assert second_look("l2a_freesolo") == norm | router | attention | readout


def test_second_attention_has_bias_and_norms_of_its_own():
    names = second_look("l2a", qkv_bias=True, qk_norm=True)
    assert names["global_attention.linear_qkv.bias"] == [96]
    assert names["global_attention.q_layernorm.weight"] == names["global_attention.k_layernorm.weight"] == [8]


def test_constants_reach_the_gate():
    attention = replace(MODEL.attention, gate_temperature=0.3, gate_threshold=0.7, leak_probability=0.2)
    layer = build_model(replace(MODEL, attention=replace(attention, kind="l2a"))).decoder.layers[0]
    assert (layer.router.temperature, layer.router.threshold, layer.leak_probability) == (0.3, 0.7, 0.2)
    assert layer.router.weight.eq(0).all()
    assert type(layer.global_attention.core_attention) is SparseQueryAttention
    free = replace(attention, kind="context_free", open_probability=0.6)
    assert build_model(replace(MODEL, attention=free)).decoder.layers[0].router.open_probability == 0.6


def test_gate_defaults_are_the_papers():
    layer = layer_spec("l2a")
    assert layer.params == {"leak_probability": 0.1}
    assert layer.submodules.gate.params == {"temperature": 0.1, "threshold": 0.5}


def test_alpha_and_gain_start_where_the_recipe_says():
    attention = core(build("freesolo"))
    assert attention.alpha.tolist() == pytest.approx([0.7] * 4)
    assert attention.gain.tolist() == [1.0] * 8
    assert {name for name, _ in attention.named_parameters()} == {"alpha", "gain"}


def test_constants_travel_with_the_weights_and_keep_fp32():
    """bf16 would make 0.300781 of a lambda of 0.3."""
    model = build("freesolo")
    state = model.state_dict()
    prefix = "decoder.layers.0.self_attention.core_attention."
    assert {f"{prefix}{name}" for name in ("alpha", "gain", "sigma", "lam")} <= state.keys()
    state[f"{prefix}lam"] = torch.tensor([0.1, 0.2, 0.3, 0.7])
    model.load_state_dict({name: value for name, value in state.items() if value is not None}, strict=False)
    attention = core(model.bfloat16())
    assert (attention.alpha.dtype, attention.gain.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(attention.lam, torch.tensor([0.1, 0.2, 0.3, 0.7]))
    assert torch.equal(attention.sigma, torch.full((4,), 2.5))
    assert torch.equal(model.state_dict()[f"{prefix}lam"], attention.lam)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_qk_norm(kind):
    names = {"q_layernorm.weight": [8], "k_layernorm.weight": [8]}
    assert parameters(build(kind, qk_norm=True)) == parameters(build(kind)) | names


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_qkv_bias(kind):
    """q, k and v only: no bias on the output and none in the MLP."""
    biased = build(kind, qkv_bias=True)
    assert parameters(biased) == parameters(build(kind)) | {"linear_qkv.bias": [96]}
    expected = ["self_attention"] if kind in (*ONE_LOOK, "l2a_shared") else ["self_attention", "global_attention"]
    assert [name for name, _ in biased.named_parameters() if name.endswith("bias")] == [
        f"decoder.layers.0.{attention}.linear_qkv.bias" for attention in expected
    ]


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_heads_need_not_fill_the_width(kind):
    config = replace(MODEL, head_dim=12, attention=replace(MODEL.attention, kind=kind))
    model = build_model(config)
    shapes = parameters(model)
    assert (shapes["linear_qkv.weight"], shapes["linear_proj.weight"]) == ([3 * 48, 32], [32, 48])
    assert logits(model, config).shape == (2, 40, 64)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_fewer_kv_heads(kind, num_kv_heads):
    model = build(kind, num_kv_heads=num_kv_heads)
    assert parameters(model)["linear_qkv.weight"] == [8 * (4 + 2 * num_kv_heads), 32]
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_parameter(tied):
    model = build("swa", tie_embeddings=tied)
    matrices = [name for name, p in model.named_parameters() if list(p.shape) == [64, 32]]
    assert matrices == ["embedding.word_embeddings.weight"] + ([] if tied else ["output_layer.weight"])
    assert model.output_weight() is dict(model.named_parameters())[matrices[-1]]
