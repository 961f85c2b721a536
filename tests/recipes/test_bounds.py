"""Every key of the schema has the bounds that make sense, and what lies outside is refused by its name."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from recipes.bounds import PATTERNS, complaints, intervals
from recipes.load import RecipeError, check_model, load_recipe, override_model
from recipes.reference import SECTIONS
from recipes.schema import DataConfig, MixtureConfig, ModelConfig, Recipe, SourceConfig, StreamConfig, TrainConfig
from tests.recipes.test_load import SMALL, write


def small() -> Recipe:
    """A recipe of which every list of sections has one."""
    return Recipe(
        run_dir="runs/x",
        model=ModelConfig(num_layers=1, hidden_size=8, num_heads=2, ffn_size=8, vocab_size=9, seq_length=128),
        data=DataConfig(
            shards="x",
            sources=[SourceConfig(path="a")],
            mixture=[MixtureConfig(proportion=1.0)],
            streams=[StreamConfig(shards="b", proportion=1.0)],
        ),
        train=TrainConfig(steps=1, tokens_per_step=128, lr=1.0, min_lr=0.0),
    )


def numbers() -> dict[str, type]:
    """Dotted key of every number in the schema, and int or float."""
    found = {}
    for section, config in SECTIONS.items():
        for field in fields(config):
            kinds = {field.type, *get_args(field.type)} & {int, float}
            if kinds and not str(field.type).startswith("list"):
                found[f"{'' if section == '(top)' else section + '.'}{field.name}"] = kinds.pop()
    return found


def with_value(key: str, value: object) -> Recipe:
    recipe = section = small()
    *path, last = key.split(".")
    for name in path:
        section = getattr(section, name.removesuffix("[]"))
        section = section[0] if name.endswith("[]") else section
    setattr(section, last, value)
    return recipe


def found(key: str, value: object) -> list[tuple[str, str]]:
    return [(one.key.replace("[0]", "[]"), one.reason) for one in complaints(with_value(key, value))]


def test_every_number_has_an_interval_and_nothing_else_has():
    assert set(intervals()) == set(numbers())
    assert not list(complaints(small()))


@pytest.mark.parametrize("key", numbers())
def test_border(key):
    """What lies on an open border or beyond any is refused, what lies on a closed one is taken."""
    interval, kind = intervals()[key], numbers()[key]
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    step = 1 if kind is int else 1e-9
    for border, closed, outward in ((low, interval[0] == "[", -step), (high, interval[-1] == "]", step)):
        if border not in (float("-inf"), float("inf")):
            assert bool(found(key, kind(border))) != closed
            ((named, reason),) = found(key, kind(border + outward * max(1, abs(border))))
            assert named == key and reason.startswith("must ")
    if kind is float:
        for value in (float("nan"), float("inf"), float("-inf")):
            assert found(key, value) == [(key, "must be a finite number")]
    else:
        ((named, _),) = found(key, 10**400)
        assert named == key


@pytest.mark.parametrize(
    "override",
    [
        "train.beta2=1.5", "train.beta1=1", "train.adam_eps=-1", "train.adam_eps=0", "model.attention.rope_base=0",
        "model.attention.rope_base=-5", "model.norm_eps=-1", "model.init_std=-1", "train.clip=.nan", "train.lr=.inf",
        "train.freeze=['[']", "train.train_only=['(a']", "seed=-1", "parallel.timeout_seconds=.inf", "data.shards=''",
        "run_dir=''", "data.cache=''", 'data.tokenizer="a\\0b"', "data.prep_workers=-1", "data.cache_gib=-1",
    ],
)  # fmt: skip
def test_one_sentence_names_the_key(tmp_path, override):
    with pytest.raises(RecipeError, match=rf"^{override.split('=')[0]} = ") as error:
        load_recipe(write(tmp_path, SMALL), [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        (
            "data.sources=[{path: a}, {path: b, min_chars: 9, max_chars: 8}]",
            r"data.sources\[1\].max_chars = 8: is below",
        ),
        ("data.mixture=[{proportion: 1, min_tokens: 9, max_tokens: 9}]", r"data.mixture\[0\].max_tokens = 9: is not"),
        ("data.mixture=[{proportion: 0}]", r"data.mixture\[0\].proportion = 0.0: must be above 0"),
        ("data.streams=[{shards: a, proportion: -1}]", r"data.streams\[0\].proportion = -1.0: must be above 0"),
    ],
)
def test_lists_of_sections(tmp_path, override, match):
    with pytest.raises(RecipeError, match=match):
        load_recipe(write(tmp_path, SMALL), [override])


def test_patterns_are_those_of_the_schema():
    assert {
        f"train.{field.name}" for field in fields(TrainConfig) if "regular expressions" in _comment(field.name)
    } == {*PATTERNS}


def _comment(name: str) -> str:
    source = (Path(__file__).parents[2] / "recipes" / "schema.py").read_text()
    return next(line for line in source.splitlines() if line.strip().startswith(f"{name}:"))


def test_bytes_that_are_no_text(tmp_path):
    with pytest.raises(RecipeError, match="run_dir"):
        load_recipe(write(tmp_path, SMALL), ["run_dir=\udcff"])
    assert found("run_dir", "\udcff") == [("run_dir", "is not UTF-8 text")]


# words that YAML takes for numbers or truth values

WORDS = ["007", "no", "on", "1e-3", "1_000", "0x10", "1:30", "2026-11-30", "3.10", ".inf", "=", "true", "12 # a"]


@pytest.mark.parametrize("word", WORDS)
def test_keys_of_text_keep_what_is_written(tmp_path, word):
    """In files, on the command line, in lists and in sections of lists."""
    text = word.split(" #")[0]
    path = tmp_path / "recipe.yaml"
    write(tmp_path, SMALL)
    path.write_text(path.read_text().replace("run_dir: runs/small", f"run_dir: {word}"))
    lists = [f"train.freeze=[{text}, a]", f"data.sources=[{{path: {text}, suffixes: [{text}]}}]"]
    for recipe in (load_recipe(path), load_recipe(path, [f"data.shards={word}", f"data.tokenizer={text}", *lists])):
        assert recipe.run_dir == text
    assert (recipe.data.shards, recipe.data.tokenizer, recipe.train.freeze) == (text, text, [text, "a"])
    assert recipe.data.sources == [SourceConfig(path=text, suffixes=[text])]


def test_other_keys_are_read_as_yaml_has_it(tmp_path):
    path = write(tmp_path, SMALL)
    overrides = [
        "train.steps=1_0",
        "data.shuffle=no",
        "train.lr=1e-3",
        "data.tokenizer=null",
        "data.cache=~",
        "seed=0x10",
    ]
    recipe = load_recipe(path, [*overrides, "run_dir='007'", 'data.shards="no"'])
    assert (recipe.train.steps, recipe.data.shuffle, recipe.train.lr, recipe.seed) == (10, False, 1e-3, 16)
    assert (recipe.data.tokenizer, recipe.data.cache, recipe.run_dir, recipe.data.shards) == (None, None, "007", "no")


def test_anchors_and_merged_sections(tmp_path):
    path = tmp_path / "recipe.yaml"
    write(tmp_path, SMALL)
    path.write_text(path.read_text() + "checkpoint: &more {keep: 3}\n")
    assert load_recipe(path).checkpoint.keep == 3
    text = path.read_text().replace("data:\n", "data:\n  <<: {cache: 007, num_workers: 1}\n")
    path.write_text(text)
    assert (load_recipe(path).data.cache, load_recipe(path).data.num_workers) == ("007", 1)


def test_a_trained_models_section_is_held_to_the_same():
    with pytest.raises(RecipeError, match="model.attention.rope_base = 0.0: must be at least 1"):
        check_model(override_model(small().model, ["model.attention.rope_base=0"]))


def test_bounds_need_no_torch():
    program = "import sys, recipes.load; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0
