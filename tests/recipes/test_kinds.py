"""The table of attention kinds: which keys each uses, that the others are refused, and what a query reads."""

import pytest

from recipes.kinds import ATTENTION_KINDS, COMMON_KEYS, KINDS
from recipes.load import RecipeError, load_recipe, override_model, resolved, save_recipe
from recipes.schema import AttentionConfig, ModelConfig

CELLS = {"window", "cell_size", "top_k", "eps", "sigma", "lam", "alpha_init"}
POOL = CELLS | {"retain", "recent"}
GATE = {"window", "gate_temperature", "gate_threshold", "leak_probability", "closed_layers"}
KEYS = {
    "dense": set(),
    "swa": {"window"},
    "freesolo": CELLS,
    "freesolo_l": POOL,
    "l2a": GATE,
    "l2a_shared": GATE,
    "l2a_freesolo": GATE | POOL,
    "context_free": {"window", "open_probability", "leak_probability", "closed_layers"},
}
RECIPE = """
run_dir: runs/x
model:
  {num_layers: 2, hidden_size: 64, num_heads: 4, ffn_size: 96, vocab_size: 320, seq_length: 1024, attention: ATTENTION}
data: {shards: data/x}
train: {steps: 10, tokens_per_step: 2048, lr: 1.0e-3, min_lr: 1.0e-4}
"""


def written(tmp_path, name: str, attention: str):
    path = tmp_path / name
    path.write_text(RECIPE.replace("ATTENTION", attention))
    return path


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_each_kind_uses_its_keys_and_refuses_all_others(kind, tmp_path):
    keys = set(AttentionConfig.__dataclass_fields__)
    assert KINDS[kind].keys == KEYS[kind] | set(COMMON_KEYS)
    for key in sorted(keys - KINDS[kind].keys):
        value = getattr(AttentionConfig(), key)
        path = written(tmp_path, f"{key}.yaml", f"{{kind: {kind}, {key}: {value}}}")
        with pytest.raises(RecipeError, match=f"model.attention.{key}: attention kind {kind} does not use it"):
            load_recipe(path)
    path = written(tmp_path, "all.yaml", str({"kind": kind} | {k: getattr(AttentionConfig(), k) for k in KEYS[kind]}))
    load_recipe(path)


def test_keys_of_a_base_of_another_kind_fall_back_to_their_defaults(tmp_path):
    """A later layer that names the kind does away with the base's keys; one that only adds a key does not."""
    base = written(tmp_path, "base.yaml", "{kind: l2a, window: 99, gate_threshold: 0.7, rope_base: 5000}")
    dense = load_recipe(base, ["model.attention.kind=dense"]).model.attention
    assert dense == AttentionConfig(kind="dense", rope_base=5000.0)
    swa = load_recipe(base, ["model.attention.kind=swa"]).model.attention
    assert swa == AttentionConfig(kind="swa", rope_base=5000.0, window=99)
    with pytest.raises(RecipeError, match="model.attention.window: attention kind dense"):
        load_recipe(base, ["model.attention.kind=dense", "model.attention.window=7"])
    with pytest.raises(RecipeError, match="model.attention.retain: attention kind l2a .*: freesolo_l, l2a_freesolo"):
        load_recipe(base, ["model.attention.retain=7"])


def test_a_resolved_recipe_loads_again(tmp_path):
    recipe = load_recipe(written(tmp_path, "base.yaml", "{kind: swa, window: 99}"))
    save_recipe(recipe, tmp_path / "resolved.yaml")
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    assert set(resolved(recipe)["model"]["attention"]) == KINDS["swa"].keys


def test_an_override_of_a_model_names_a_key_that_its_kind_uses():
    model = ModelConfig(2, 64, 4, ffn_size=96, vocab_size=320, seq_length=1024, attention=AttentionConfig(kind="dense"))
    with pytest.raises(RecipeError, match="model.attention.window: attention kind dense does not use it"):
        override_model(model, ["model.attention.window=7"])
    changed = override_model(model, ["model.attention.kind=swa", "model.attention.window=7"])
    assert (changed.attention.kind, changed.attention.window) == ("swa", 7)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("dense", 512), ("swa", 101), ("freesolo", 229), ("freesolo_l", 229), ("l2a", 229), ("l2a_shared", 229),
     ("l2a_freesolo", 133), ("context_free", 203.4)],
)  # fmt: skip
def test_a_query_reads_so_many_tokens(kind, tokens):
    """1,024 tokens, window 100 and itself, 4 cells of 32, a quarter of the gates open; context_free opens a fifth."""
    attention = AttentionConfig(kind=kind, window=100)
    model = ModelConfig(2, 64, 4, ffn_size=96, vocab_size=320, seq_length=1024, attention=attention)
    assert KINDS[kind].attended(model, open_fraction=0.25) == pytest.approx(tokens)
