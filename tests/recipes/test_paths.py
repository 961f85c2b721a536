"""Every path of a recipe: a leading ~ is the home directory, for prep, train and all that reads the run afterwards."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from recipes.load import RecipeError, load_recipe
from recipes.schema import MixtureConfig, Recipe, SourceConfig, StreamConfig

TINY = Path(__file__).parents[1] / "launch" / "tiny.yaml"
SETTINGS = [
    "run_dir=~/run",
    "model.init_from=~/run0",
    "data.shards=~/shards",
    "data.tokenizer=~/tok/tokenizer.json",
    "data.cache=~/cache",
    "data.sources=[{path: ~/books}, {path: '~/web/*.jsonl', name: ~web}, {path: s3://~/x}]",
    "data.streams=[{shards: ~/a, proportion: 1}, {shards: 'gs://b/~', proportion: 1}]",
    "data.mixture=[{source: ~/books, proportion: 1}, {source: ~web, proportion: 1}]",
]


@pytest.fixture
def home(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))
    return str(tmp_path)


def test_home_is_expanded_in_every_path_and_nowhere_else(home):
    recipe = load_recipe(TINY, SETTINGS)
    data = recipe.data
    assert (recipe.run_dir, recipe.model.init_from) == (f"{home}/run", f"{home}/run0")
    assert (data.shards, data.cache) == (f"{home}/shards", f"{home}/cache")
    assert data.tokenizer == f"{home}/tok/tokenizer.json"
    assert [source.path for source in data.sources] == [f"{home}/books", f"{home}/web/*.jsonl", "s3://~/x"]
    assert [stream.shards for stream in data.streams] == [f"{home}/a", "gs://b/~"]
    # a part of the mixture still finds its source: by the path where it has no name
    assert [part.source for part in data.mixture] == [f"{home}/books", "~web"]


def test_no_path_is_forgotten():
    """Whoever adds a key of text decides here whether it is a path."""
    paths = {"run_dir", "init_from", "shards", "tokenizer", "cache", "path"}
    words = {"kind", "backend", "format", "text_field", "split", "name", "source", "language_field", "bad_documents"}
    words |= {"packing", "precision", "device", "gate_penalty_per"}
    found, todo = set(), [Recipe, SourceConfig, StreamConfig, MixtureConfig]
    while todo:
        for one in fields(todo.pop()):
            if is_dataclass(one.type):
                todo.append(one.type)
            elif one.type in (str, str | None):
                found.add(one.name)
    assert found >= paths
    assert not found - paths - words, "a path: add it to recipes/paths.py and here; a word: only here"


def test_base_and_recipe_below_the_home_directory(home, tmp_path):
    (tmp_path / "base.yaml").write_text(f"base: {TINY}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text("base: ~/base.yaml\nrun_dir: ~/mine\n")
    assert load_recipe("~/sub/mine.yaml", ["data.shards=x"]).run_dir == f"{home}/mine"


@pytest.mark.parametrize("setting", SETTINGS[:5])
def test_home_of_nobody_is_refused(setting):
    key, _, value = setting.partition("=")
    with pytest.raises(RecipeError, match=rf"{key} is ~nobody-at-all/.*, but no such home directory is known") as error:
        load_recipe(TINY, [*SETTINGS, f"{key}={value.replace('~', '~nobody-at-all')}"])
    assert "\n" not in str(error.value)
    assert load_recipe(TINY, ["data.shards=x", "run_dir=./~x"]).run_dir == "./~x"


def test_prep_and_train_mean_the_same_folder(home, tmp_path, monkeypatch):
    from data_prep.cache import open_shards
    from data_prep.prep import prepare
    from launch.run_directory import RunDirectory

    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for number in range(30):
        (tmp_path / "books" / f"{number}.txt").write_text(f"document {number} " * 9)
    recipe = load_recipe(TINY, ["run_dir=~/run", "data.shards=~/shards", "data.sources=[{path: ~/books}]"])
    made = prepare(recipe.data, seq_length=80, vocab_size=320).folder
    assert made == tmp_path / "shards" == open_shards(recipe.data.shards, "x").path == open_shards("~/shards", "x").path
    RunDirectory(recipe.run_dir, rank=1).close()
    assert (tmp_path / "run" / "logs").is_dir() and not (tmp_path / "~").exists()
