"""Changes to a trained model on the command line: what does nothing is refused, and at once."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from launch.overrides import changed_model, check_changes, split_shards
from megatron_ext.specs import layer_spec
from recipes.kinds import ATTENTION_KINDS, COMMON_KEYS, KINDS
from recipes.load import RecipeError
from recipes.schema import AttentionConfig, ModelConfig
from tests.distributed import ROOT

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, ffn_size=48, vocab_size=64, seq_length=256)
# built into a layer, but as the weights are, or for training only
FIXED = {"sigma", "lam", "alpha_init", "leak_probability"}


def trained(kind: str) -> ModelConfig:
    return replace(MODEL, attention=AttentionConfig(kind=kind))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_keys_are_those_that_the_layers_are_built_with(kind):
    own = AttentionConfig(kind=kind)
    built = set()
    for field in fields(AttentionConfig):
        value = getattr(own, field.name)
        if field.name not in COMMON_KEYS and isinstance(value, int | float):
            other = replace(own, **{field.name: value + 1})
            specs = {repr(layer_spec(kind, one)) for one in (own, other)}  # megatron-core 0.19's equal nothing
            built |= {field.name} if len(specs) == 2 else set()
    if kind == "freesolo":
        built.remove("recent")  # it retains every cell
    own = set(KINDS[kind].changeable_keys) - set(COMMON_KEYS)
    assert built - FIXED == own


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("dense", "model.attention.gate_threshold=0.7", "attention kind dense does not use it"),
        ("swa", "model.attention.top_k=2", "attention kind swa does not use it"),
        ("context_free", "model.attention.leak_probability=0.7", r"what can be: model.attention.{.*open_probability}"),
        ("l2a", "model.attention.leak_probability=0.5", "trained l2a model does not depend on it"),
        ("l2a", "model.attention.closed_layers=[0]", "its weights fix it"),
        ("l2a", "model.hidden_size=64", "its weights fix it"),
        ("l2a", "model.seq_length=64", "cannot be set"),
        ("l2a", "model.attention.gate_threshold=7", r"gate_threshold = 7.0: must lie in \[0, 1\]"),
        ("l2a", "model.attention.gate_treshold=0.7", "Did you mean: 'gate_threshold'"),
        ("l2a", "train.lr=1", "only keys of the model section"),
    ],
)
def test_what_is_refused(kind, override, message):
    with pytest.raises(RecipeError, match=message):
        changed_model(trained(kind), [override])


def test_what_is_taken():
    changes = ["model.attention.gate_threshold=0.7", "model.seq_length=64", "model.attention.window=9"]
    changed = changed_model(trained("l2a"), changes, length=True)
    assert (changed.attention.gate_threshold, changed.seq_length, changed.attention.window) == (0.7, 64, 9)
    assert (
        changed_model(trained("dense"), ["model.attention.kind=swa", "model.attention.window=5"]).attention.window == 5
    )
    assert split_shards(["data.shards=x", *changes]) == ("x", changes)


def test_a_folder_without_a_recipe(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}/recipe.yaml does not exist; name a run directory"):
        check_changes(tmp_path, [])


COMMANDS = {
    "eval": ["eval", "RUN"],
    "generate": ["generate", "RUN", "--prompt", "x"],
    "export": ["convert", "export", "--from", "RUN", "--out", "x"],
    "prune": ["convert", "prune", "--stats", "RUN/checkpoints/step_0", "--out", "x"],
}


def test_the_commands_refuse_before_they_import_torch(tmp_path: Path):
    (tmp_path / "checkpoints" / "step_0").mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text(
        "model: {attention: {kind: l2a}, "
        + ", ".join(f"{key}: {getattr(MODEL, key)}" for key in ("num_layers", "hidden_size", "num_heads", "ffn_size"))
        + ", vocab_size: 64, seq_length: 256}\n"
    )
    program = """
import sys
from typer.testing import CliRunner
from launch.cli import app
for command in sys.argv[2:]:
    done = CliRunner().invoke(app, [*command.replace("RUN", sys.argv[1]).split("|"), "model.attention.top_k=2"])
    print(type(done.exception).__name__, "does not use" in str(done.exception), "torch" in sys.modules)
"""
    commands = ["|".join(command) for command in COMMANDS.values()]
    line = [sys.executable, "-c", program, str(tmp_path), *commands]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["RecipeError True False"] * len(COMMANDS)
