"""Every recipe that ships loads without any setting, and those of the FreeSolo paper have its sizes and schedules."""

import re
from pathlib import Path

import pytest
import torch

from megatron_ext.engine import freeze_parameters
from megatron_ext.model import build_model, head_dim
from recipes.load import accumulation_steps, load_recipe
from recipes.schema import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHIPPED = sorted(path.name for path in RECIPES.glob("*.yaml"))

# model size -> (parameters, width, head_dim)
SIZES = {"340m": (341e6, 1024, 64), "740m": (743e6, 1536, 96)}

# recipe -> (kind, steps, warm-up steps, lr, min_lr)
PAPER = {
    "transformer_340m": ("dense", 28_000, 1000, 3e-4, 3e-5),
    "swa_340m": ("swa", 28_000, 1000, 3e-4, 3e-5),
    "freesolo_340m": ("freesolo", 28_000, 1000, 3e-4, 3e-5),
    "freesolo_740m": ("freesolo", 60_000, 2000, 4e-4, 4e-5),
    "freesolo_l_340m": ("freesolo_l", 1500, 150, 4e-4, 4e-5),
    "freesolo_l_740m": ("freesolo_l", 3000, 300, 4e-4, 4e-5),
}


@pytest.fixture(autouse=True)
def no_data_root(monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)


def shipped(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


@pytest.mark.parametrize("file", SHIPPED)
def test_loads(file):
    load_recipe(RECIPES / file)


def test_every_paper_recipe_is_there():
    assert {f"{name}.yaml" for name in PAPER} <= set(SHIPPED)


@pytest.mark.parametrize("file", SHIPPED)
def test_says_what_it_is_for(file):
    first = (RECIPES / file).read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 30


def test_data_root_moves_the_shards(monkeypatch):
    assert shipped("freesolo_340m").data.shards == "data/pretrain_4k"
    monkeypatch.setenv("DATA_ROOT", "elsewhere")
    assert shipped("freesolo_340m").data.shards == "elsewhere/pretrain_4k"


@pytest.mark.parametrize("name", PAPER)
def test_parameter_count(alone, name):
    with torch.device("meta"):
        model = build_model(shipped(name).model)
    parameters = {id(p): p for p in model.parameters()}
    want = SIZES[name.rsplit("_", 1)[1]][0]
    assert sum(p.numel() for p in parameters.values()) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize("name", PAPER)
def test_shape_of_the_paper(name):
    model = shipped(name).model
    _, width, head = SIZES[name.rsplit("_", 1)[1]]
    assert (model.num_layers, model.hidden_size, model.num_heads, head_dim(model)) == (24, width, 16, head)
    assert model.num_kv_heads in (None, 16)
    assert (model.vocab_size, model.seq_length, model.tie_embeddings) == (32_000, 4096, True)
    assert (model.qkv_bias, model.qk_norm) == (False, False)


@pytest.mark.parametrize("name", PAPER)
def test_attention_of_the_paper(name):
    kind, attention = PAPER[name][0], shipped(name).model.attention
    assert (attention.kind, attention.rope_base, attention.document_mask) == (kind, 10_000, False)
    if kind != "dense":
        assert attention.window == 512
    if kind.startswith("freesolo"):
        assert (attention.cell_size, attention.query_block, attention.top_k) == (32, 128, 4)
        assert (attention.sigma, attention.lam, attention.eps) == (4, 1, 1e-8)
    if kind == "freesolo_l":
        assert (attention.retain, attention.recent) == (64, 8)


@pytest.mark.parametrize("name", PAPER)
def test_schedule_of_the_paper(name):
    _, steps, warmup, lr, min_lr = PAPER[name]
    train = shipped(name).train
    assert (train.steps, train.warmup_steps, train.lr, train.min_lr) == (steps, warmup, lr, min_lr)
    assert (train.tokens_per_step, train.weight_decay, train.clip) == (524_288, 0.1, 1.0)


@pytest.mark.parametrize("size", SIZES)
def test_pool_continues_the_pretrained_run(size):
    """FS-L starts from where the FS recipe of the same size writes."""
    assert shipped(f"freesolo_l_{size}").model.init_from == shipped(f"freesolo_{size}").run_dir


def test_runs_do_not_share_a_folder():
    folders = [load_recipe(RECIPES / file).run_dir for file in SHIPPED]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_batch_divides_over_a_few_nodes(name, ranks):
    recipe = shipped(name)
    rounds = accumulation_steps(recipe, ranks)
    assert rounds * ranks * recipe.train.micro_batch * recipe.model.seq_length == 524_288


# recipe of the L2A paper -> parameters of the base model as its makers count them; L2A adds a second attention
QWEN = {
    "qwen2.5_1.5b": (1_543_714_304, 12 * 128, 2 * 128),
    "qwen2.5_7b": (7_615_616_512, 28 * 128, 4 * 128),
    "qwen3_8b": (8_190_735_360, 32 * 128, 8 * 128),
}


@pytest.mark.parametrize("name", QWEN)
def test_qwen_recipes_have_the_size_of_the_models(name, alone):
    dense, l2a = shipped(f"clp_{name}_128k").model, shipped(f"l2a_{name}_128k").model
    parameters, q, kv = QWEN[name]
    with torch.device("meta"):
        assert sum(x.numel() for x in build_model(dense).parameters()) == parameters
    width, norms = dense.hidden_size, 2 * 128 if dense.qk_norm else 0
    second = 2 * width * q + 2 * width * kv + (q + 2 * kv if dense.qkv_bias else 0) + norms + 2 * width  # norm, router
    with torch.device("meta"):
        assert sum(x.numel() for x in build_model(l2a).parameters()) == parameters + dense.num_layers * second
    for recipe in (shipped(f"clp_{name}_128k"), shipped(f"l2a_{name}_128k")):
        train = recipe.train
        assert (train.lr, train.clip, train.recompute) == (5e-5, 1.0, True)
        assert train.tokens_per_step == (4 if "1.5b" in name else 6) * 2**20
        assert recipe.model.attention.rope_base == 5e6 and recipe.model.seq_length == 131_072
        assert recipe.train.warmup_steps == round(0.05 * recipe.train.steps)
        billions = 16.7 if "1.5b" in name else 25.0
        assert recipe.train.steps * recipe.train.tokens_per_step == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", [f"{kind}_{size}_128k" for kind in ("clp", "l2a") for size in QWEN])
def test_qwen_recipes_train_attention_norms_and_gates(name, alone):
    """The MLP and the embeddings, and nothing else, stand still."""
    recipe = shipped(name)
    with torch.device("meta"):
        model = build_model(recipe.model)
    frozen = set(freeze_parameters(model, recipe.train.freeze, recipe.train.train_only))
    names = {name for name, _ in model.named_parameters()}
    assert frozen == {name for name in names if re.search(r"\.mlp\.|^embedding\.|^output_layer\.", name)}
    assert len(frozen) == 2 * recipe.model.num_layers + (1 if recipe.model.tie_embeddings else 2)


@pytest.mark.parametrize("size", QWEN)
def test_l2a_recipes_have_the_papers_gates(size):
    recipe = shipped(f"l2a_{size}_128k")
    attention, train = recipe.model.attention, recipe.train
    assert (attention.kind, attention.window) == ("l2a", 4095)
    assert (attention.gate_temperature, attention.gate_threshold, attention.leak_probability) == (0.1, 0.5, 0.1)
    assert (train.gate_penalty, train.gate_penalty_per) == (1e-8, "sequence")
    assert (train.gate_penalty_start, train.gate_penalty_ramp) == (None, None)  # after the warm-up, to the last step
