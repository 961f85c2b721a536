"""A recipe from somebody else reads no environment variable but those that the one who runs it allows."""

import pytest

from launch.run_directory import find_shards
from recipes.load import RecipeError, load_recipe, override_model, read_model, read_value

SECRET = "tok3n"
NAMED = r"MY_SECRET\} is none of the environment variables that a recipe may read \(DATA_ROOT, MODEL_ROOT\)"
MODEL = """
run_dir: runs/x
model: {num_layers: 1, hidden_size: 8, num_heads: 1, ffn_size: 8, vocab_size: 8, seq_length: 128}
train: {steps: 1, tokens_per_step: 128, lr: 1.0, min_lr: 0.0}
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """One that is nobody's business, and none that allows it."""
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.delenv("LONGPITCH_ENV", raising=False)
    monkeypatch.setenv("DATA_ROOT", "/data")


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe with further lines."""

    def write(lines: str, name: str = "recipe.yaml"):
        (tmp_path / name).write_text(MODEL + lines)
        return tmp_path / name

    return write


# every way to write it: with a default, put together, hidden behind another key, in a base
WAYS = (
    "data: {shards: 'https://elsewhere/${oc.env:MY_SECRET}'}",
    "data: {shards: '${oc.env:MY_SECRET,x}'}",
    "data: {shards: '${oc.env:MY_${data.cache}}', cache: SECRET}",
    "data: {shards: '${oc.decode:${oc.env:MY_SECRET}}'}",
    "data: {shards: x, tokenizer: '${data.cache}', cache: '${oc.env:MY_SECRET}'}",
    "base: '${oc.env:MY_SECRET}'",
)


@pytest.mark.parametrize("lines", WAYS)
def test_other_variables_are_refused(recipe, lines):
    with pytest.raises(RecipeError, match=NAMED) as refusal:
        load_recipe(recipe(lines))
    assert "\n" not in str(refusal.value) and SECRET not in str(refusal.value)


def test_in_a_base_and_on_the_command_line(recipe):
    recipe("data: {shards: '${oc.env:MY_SECRET}'}", "base.yaml")
    with pytest.raises(RecipeError, match=NAMED):
        load_recipe(recipe("base: base.yaml"))
    with pytest.raises(RecipeError, match=NAMED):
        load_recipe(recipe("data: {shards: x}"), ["data.cache=${oc.env:MY_SECRET}"])
    with pytest.raises(RecipeError, match=NAMED):
        override_model(load_recipe(recipe("data: {shards: x}")).model, ["model.init_from=${oc.env:MY_SECRET}"])


def test_in_a_run_directory(recipe):
    path = recipe("data: {shards: '${oc.env:MY_SECRET}'}")
    for read in (lambda: find_shards(path.parent), lambda: read_value(path, "data.shards")):
        with pytest.raises(RecipeError, match=NAMED):
            read()
    path.write_text(MODEL.replace("seq_length: 128", "seq_length: 128, init_from: '${oc.env:MY_SECRET}'"))
    with pytest.raises(RecipeError, match=NAMED):
        read_model(path)
    path.write_text("data: [unclosed")
    with pytest.raises(RecipeError, match="not a readable YAML file"):
        find_shards(path.parent)


def test_what_is_allowed(recipe, monkeypatch):
    path = recipe("data: {shards: '${oc.env:DATA_ROOT}/a', tokenizer: '${oc.env:MODEL_ROOT,models}', cache: x}")
    monkeypatch.delenv("MODEL_ROOT", raising=False)
    data = load_recipe(path).data
    assert (data.shards, data.tokenizer) == ("/data/a", "models")
    monkeypatch.setenv("LONGPITCH_ENV", "OTHER,MY_SECRET")
    assert load_recipe(path, ["data.shards=${oc.env:MY_SECRET}"]).data.shards == SECRET
    assert load_recipe(path, ["data.shards=${oc.env:OTHER,null}x"]).data.shards
