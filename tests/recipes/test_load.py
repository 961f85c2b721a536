"""Recipes merge in order, refuse what cannot run with the key and the way out in the message, and round-trip."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes.load import RecipeError, accumulation_steps, load_recipe, save_recipe
from recipes.schema import SourceConfig

SMALL = {
    "run_dir": "runs/small",
    "model": {
        "num_layers": 1, "hidden_size": 48, "num_heads": 6, "ffn_size": 64, "vocab_size": 96, "seq_length": 256,
        "attention": {"kind": "swa", "window": 20},
    },
    "data": {"shards": "shards"},
    "train": {"steps": 10, "tokens_per_step": 1536, "lr": 1.0e-3, "min_lr": 1.0e-4, "warmup_steps": 2},
}  # fmt: skip


def write(folder: Path, content: object, name: str = "recipe.yaml") -> Path:
    """A file of that content: a string as it is, anything else as YAML."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.fixture
def small(tmp_path) -> Path:
    """A recipe that loads."""
    return write(tmp_path, SMALL)


def refusal(path: Path, *overrides: str) -> str:
    """The message that the recipe is refused with."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, list(overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def without(key: str) -> dict:
    """SMALL without one dotted key."""
    recipe = yaml.safe_load(yaml.safe_dump(SMALL))
    *sections, last = key.split(".")
    section = recipe
    for name in sections:
        section = section[name]
    del section[last]
    return recipe


# merging


def test_values_and_defaults(small):
    recipe = load_recipe(small)
    assert (recipe.model.hidden_size, recipe.model.attention.kind, recipe.model.attention.window) == (48, "swa", 20)
    assert (recipe.seed, recipe.model.attention.top_k, recipe.model.num_kv_heads) == (1234, 4, None)
    assert isinstance(recipe.train.lr, float)


def test_nested_bases_merge_key_by_key_from_the_outermost(tmp_path):
    write(tmp_path, SMALL, "deep/outer.yaml")
    write(
        tmp_path,
        {"base": "outer.yaml", "seed": 5, "model": {"num_layers": 2, "attention": {"window": 30, "rope_base": 7}}},
        "deep/middle.yaml",
    )
    inner = write(tmp_path, {"base": "deep/middle.yaml", "model": {"attention": {"window": 40}}}, "inner.yaml")
    recipe = load_recipe(inner)
    attention = recipe.model.attention
    assert (attention.kind, attention.window, attention.rope_base) == ("swa", 40, 7)
    assert (recipe.seed, recipe.model.num_layers, recipe.model.hidden_size) == (5, 2, 48)


@pytest.mark.parametrize("bases", [{"a.yaml": "a.yaml"}, {"a.yaml": "b.yaml", "b.yaml": "a.yaml"}])
def test_circular_base(tmp_path, bases):
    for name, base in bases.items():
        write(tmp_path, SMALL | {"base": base}, name)
    assert "circle" in refusal(tmp_path / "a.yaml")


def test_circular_base_of_another_spelling(tmp_path):
    write(tmp_path, SMALL | {"base": "../here/a.yaml"}, "here/a.yaml")
    assert "circle" in refusal(tmp_path / "here" / "a.yaml")


@pytest.mark.parametrize("base", [3, ["a.yaml"]])
def test_base_that_is_no_path(tmp_path, base):
    assert "base" in refusal(write(tmp_path, SMALL | {"base": base}))


def test_missing_base_names_the_file_that_is_missing(tmp_path):
    path = write(tmp_path, SMALL | {"base": "base/nowhere.yaml"})
    assert f"{path}: its base {tmp_path / 'base' / 'nowhere.yaml'} does not exist" in refusal(path)


def test_missing_recipe(tmp_path):
    assert "absent.yaml: no such recipe" in refusal(tmp_path / "absent.yaml")


def test_overrides_win_and_the_last_one_most(small):
    overrides = ["train.lr=2e-3", "model.attention.window=7", "train.lr=5e-3", "train.freeze=[embedding, mlp]"]
    recipe = load_recipe(small, [*overrides, "model.num_kv_heads=3", "run_dir=a=b"])
    assert (recipe.train.lr, recipe.model.attention.window, recipe.model.num_kv_heads) == (5e-3, 7, 3)
    assert recipe.train.freeze == ["embedding", "mlp"]
    assert recipe.run_dir == "a=b"
    assert load_recipe(small).train.lr == 1e-3


def test_sources_are_typed(small):
    recipe = load_recipe(small, ["data.sources=[{path: a, exclude: [b]}, {path: c, format: jsonl}]"])
    assert recipe.data.sources == [SourceConfig(path="a", exclude=["b"]), SourceConfig(path="c", format="jsonl")]


# refusals of the schema


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.lrr", "lr"),
        ("model.hiden_size", "hidden_size"),
        ("model.attention.windw", "window"),
        ("modle.num_layers", "model"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(small, key, nearest):
    message = refusal(small, f"{key}=1")
    assert "Did you mean" in message and f"'{nearest}'" in message


def test_unknown_key_in_the_file(tmp_path):
    message = refusal(write(tmp_path, SMALL | {"cheese": 1}))
    assert "cheese" in message and "recipe.yaml" in message


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=many",
        "train.steps=1.5",
        "train.lr=fast",
        "train.lr=null",
        "model.qk_norm=maybe",
        "train.freeze=3",
        "model.num_kv_heads=two",
    ],
)
def test_wrong_type_names_the_key(small, override):
    assert override.split("=")[0] + ":" in refusal(small, override)


@pytest.mark.parametrize(
    "key",
    [
        "run_dir", "model.num_layers", "model.hidden_size", "model.num_heads", "model.ffn_size", "model.vocab_size",
        "model.seq_length", "data.shards", "train.steps", "train.tokens_per_step", "train.lr", "train.min_lr",
    ],
)  # fmt: skip
def test_missing_mandatory_key_is_named(tmp_path, key):
    message = refusal(write(tmp_path, without(key)))
    assert f"no value for {key}; set" in message


def test_missing_keys_are_named_together(tmp_path):
    path = write(tmp_path, {"train": {"steps": 1, "lr": 1.0, "min_lr": 0.0}, "data": SMALL["data"]})
    keys = "model.ffn_size, model.hidden_size, model.num_heads, model.num_layers, model.seq_length, model.vocab_size"
    assert f"{path}: no value for {keys}, run_dir, train.tokens_per_step; set" in refusal(path)


def test_missing_path_of_a_source_is_named(small):
    assert "no value for data.sources[0].path; set" in refusal(small, "data.sources=[{format: text}]")


def test_unset_environment_variable_is_named(small, monkeypatch):
    monkeypatch.delenv("DATA_ROOT", raising=False)
    message = refusal(small, "data.shards=${oc.env:DATA_ROOT}")
    assert "data.shards: Environment variable 'DATA_ROOT' not found" in message


# refusals of the file and of the override


@pytest.mark.parametrize("override", ["train.lr", "=3", "--train.lr=3", ""])
def test_override_without_key_and_value(small, override):
    message = refusal(small, override)
    assert repr(override) in message and "key=value" in message


def test_unreadable_override(small):
    assert "train.freeze=[" in refusal(small, "train.freeze=[")


@pytest.mark.parametrize("text", ["- a\n- b\n", "3\n", "[]\n"], ids=["list", "number", "empty-list"])
def test_yaml_that_is_not_a_mapping(tmp_path, text):
    assert "recipe.yaml" in refusal(write(tmp_path, text))


@pytest.mark.parametrize("text", ["model: {", "a: b: c\n", "run_dir: a\nrun_dir: b\n"], ids=["open", "colons", "twice"])
def test_unreadable_yaml(tmp_path, text):
    message = refusal(write(tmp_path, text))
    assert "recipe.yaml: not a readable YAML file" in message


def test_file_that_is_no_text(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a readable YAML file" in refusal(path)
    assert "not a readable YAML file" in refusal(tmp_path)


# refusals of the checks


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param(["model.attention.kind=flash"], ["model.attention.kind = flash", "freesolo_l"], id="kind"),
        pytest.param(["train.precision=fp8"], ["train.precision = fp8", "bf16"], id="precision"),
        pytest.param(["train.device=tpu"], ["train.device = tpu", "cuda"], id="device"),
        pytest.param(["data.bad_documents=fix"], ["data.bad_documents = fix", "skip"], id="bad-documents"),
        pytest.param(["parallel.zero_stage=4"], ["parallel.zero_stage = 4", "0, 1, 2, 3"], id="zero-stage"),
        pytest.param(["model.attention.window=-1"], ["model.attention.window = -1"], id="window"),
        pytest.param(["data.heldout_fraction=1"], ["data.heldout_fraction = 1.0", "[0, 1)"], id="heldout"),
        pytest.param(["data.heldout_fraction=-0.1"], ["data.heldout_fraction = -0.1"], id="heldout-negative"),
        pytest.param(["model.vocab_tokens=0"], ["model.vocab_tokens = 0", "at least 1"], id="no-tokens"),
        pytest.param(["model.vocab_tokens=999999"], ["model.vocab_tokens = 999999"], id="more-tokens-than-rows"),
        pytest.param(["model.attention.closed_layers=[0]"], ["closed_layers: attention kind swa"], id="closed-dense"),
        pytest.param(
            ["model.attention.kind=l2a", "model.attention.closed_layers=[0, 0]"], ["each once"], id="closed-twice"
        ),
        pytest.param(
            ["model.attention.kind=l2a", "model.attention.closed_layers=[99]"], ["must name layers"], id="closed-beyond"
        ),
        pytest.param(["model.hidden_size=50"], ["hidden_size = 50", "num_heads 6"], id="width"),
        pytest.param(["model.num_heads=16"], ["model.head_dim = 3", "even"], id="odd-head-dim-of-width"),
        pytest.param(["model.head_dim=7"], ["model.head_dim = 7", "even"], id="odd-head-dim"),
        pytest.param(["model.num_kv_heads=4"], ["num_heads = 6", "num_kv_heads 4"], id="kv-heads"),
        pytest.param(["model.num_kv_heads=0"], ["model.num_kv_heads = 0", "at least 1"], id="no-kv-heads"),
        pytest.param(
            ["model.attention.kind=freesolo", "model.attention.query_block=48"], ["query_block = 48", "cell_size 32"],
            id="query-block",
        ),
        pytest.param(
            ["model.attention.kind=freesolo", "model.attention.query_block=512"], ["seq_length = 256", "512"],
            id="shorter-than-query-block",
        ),
        pytest.param(["parallel.tensor=4"], ["model.num_heads = 6", "parallel.tensor 4"], id="tensor-heads"),
        pytest.param(
            ["parallel.tensor=3", "model.num_kv_heads=2"], ["model.num_kv_heads = 2", "parallel.tensor 3"],
            id="tensor-kv-heads",
        ),
        pytest.param(
            ["parallel.tensor=2", "model.vocab_size=97"], ["model.vocab_size = 97", "parallel.tensor 2"],
            id="tensor-vocabulary",
        ),
        pytest.param(["train.tokens_per_step=1000"], ["tokens_per_step = 1000", "256; take 1024"], id="step-tokens"),
        pytest.param(["train.warmup_steps=10"], ["train.warmup_steps = 10", "train.steps 10"], id="warmup"),
        pytest.param(["train.min_lr=0.01"], ["train.min_lr = 0.01", "train.lr 0.001"], id="min-lr"),
        pytest.param(["train.min_lr=-1e-5"], ["train.min_lr = -1e-05"], id="negative-min-lr"),
        pytest.param(["train.lr=.nan"], ["train.lr = nan", "finite"], id="lr-not-a-number"),
    ],
)  # fmt: skip
def test_impossible_value_is_refused_with_its_numbers(small, overrides, parts):
    message = refusal(small, *overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "override",
    [
        "model.head_dim=0", "model.head_dim=-2", "train.warmup_steps=-1", "train.clip=-1", "train.eval_sequences=-1",
        "train.eval_interval=-1", "train.skip_nonfinite=-1", "checkpoint.interval=-1", "data.num_workers=-1",
        "parallel.timeout_seconds=0", "model.attention.sigma=0", "model.attention.backend=cudnn",
    ],
)  # fmt: skip
def test_impossible_sign_or_name_is_refused(small, override):
    assert override.split("=")[0] in refusal(small, override)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize(
    "key",
    [
        *(f"model.{key}" for key in ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size", "seq_length")),
        *(f"model.attention.{key}" for key in ("cell_size", "query_block", "top_k", "retain", "recent")),
        *("parallel.tensor", "parallel.context"),
        *("data.canonical_nodes", "data.tokenizer_vocab_size"),
        *(f"train.{key}" for key in ("steps", "tokens_per_step", "micro_batch", "loss_chunk", "log_interval")),
        "checkpoint.keep",
    ],
)
def test_counts_are_at_least_one(small, key, value):
    pool = ["model.attention.kind=freesolo_l"]  # the kind that uses all of the attention's counts
    assert f"{key} = {value}: must be at least 1" in refusal(small, *pool, f"{key}={value}")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model.head_dim=10"], id="head_dim * heads != width"),
        pytest.param(["model.hidden_size=50", "model.head_dim=8"], id="width with a head_dim of its own"),
        pytest.param(["model.attention.window=0"], id="window 0"),
        pytest.param(["model.attention.query_block=512"], id="swa has no query block"),
        pytest.param(["model.attention.kind=freesolo", "model.seq_length=128"], id="one query block"),
        pytest.param(["train.warmup_steps=9"], id="warm-up but one"),
        pytest.param(["train.steps=1", "train.warmup_steps=0"], id="one step"),
        pytest.param(["train.min_lr=1e-3"], id="constant rate"),
        pytest.param(["model.num_kv_heads=1"], id="one kv head"),
    ],
)
def test_values_at_the_border_are_taken(small, overrides):
    load_recipe(small, overrides)


def test_accumulation_steps(small):
    recipe = load_recipe(small, ["train.micro_batch=2"])  # 6 sequences a step
    assert accumulation_steps(recipe, 1) == 3
    assert accumulation_steps(recipe, 3) == 1


@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 4), (4, 1), (2, 2), (1, 12)])
def test_accumulation_that_does_not_divide(small, micro_batch, ranks):
    recipe = load_recipe(small, [f"train.micro_batch={micro_batch}"])
    with pytest.raises(RecipeError) as caught:
        accumulation_steps(recipe, ranks)
    for part in ("1536", "6 sequences", f"{ranks} data-parallel ranks", f"micro_batch {micro_batch}", "or take "):
        assert part in str(caught.value)


# what a run leaves behind


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.lr=1e-5", "train.min_lr=3e-7", "model.num_kv_heads=2", "model.head_dim=10"],
        ["train.freeze=['^embedding\\.', mlp]", "data.sources=[{path: 'a: b', exclude: [x]}]", "run_dir='#1 run'"],
        ["run_dir='123'", "data.shards='null'"],
        ["data.tokenizer='1e-3'"],
    ],
    ids=["plain", "numbers", "lists", "strings-like-numbers", "string-like-a-float"],
)
def test_saved_recipe_loads_as_the_same(small, tmp_path, overrides):
    recipe = load_recipe(small, overrides)
    saved = tmp_path / "saved.yaml"
    save_recipe(recipe, saved, torch="2.11", git="abc: dirty")
    assert load_recipe(saved) == recipe
    assert saved.read_text().startswith("# torch: 2.11\n# git: abc: dirty\n")


def test_saved_recipe_does_not_depend_on_the_environment(small, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGPITCH_ROOT", "there")
    monkeypatch.setenv("LONGPITCH_ENV", "LONGPITCH_ROOT")
    recipe = load_recipe(small, ["data.shards=${oc.env:LONGPITCH_ROOT}/shards"])
    assert recipe.data.shards == "there/shards"
    save_recipe(recipe, tmp_path / "saved.yaml")
    monkeypatch.delenv("LONGPITCH_ROOT")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


def test_facts_of_several_lines_are_comments(small, tmp_path):
    recipe = load_recipe(small)
    save_recipe(recipe, tmp_path / "saved.yaml", git="dirty\nseed: 7")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


def test_loading_needs_no_torch():
    """The command line reads recipes before it imports anything heavy."""
    program = "import sys, recipes.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0
