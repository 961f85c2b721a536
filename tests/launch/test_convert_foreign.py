"""Folders of other people's making: what they mean is computed, or they are refused by name, at import already."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from data_prep.tokenizer import load_tokenizer, open_tokenizer
from launch.conversion import export_model, import_model
from launch.generate import greedy
from megatron_ext.hugging_face.config import model_section, read_config
from megatron_ext.weights import INDEX, SINGLE
from recipes.errors import UserError
from recipes.files import LFS_POINTER
from tests.launch.hugging_face_models import FAMILIES, our_logits, some_tokens, their_logits, write_model
from tests.numerics import assert_close

NAME = "qwen2-tied"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tied Qwen2 of 300 rows and 96 positions."""
    return write_model(tmp_path_factory.mktemp("model") / NAME, FAMILIES[NAME])


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Path:
    """Its import."""
    return import_model(model, tmp_path_factory.mktemp("run") / "run", "dense", [])


@pytest.fixture
def source(model, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(model, tmp_path / "source"))


def change(path: Path, **values) -> None:
    """Set keys of a JSON file, which may not be there yet; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (content | values).items() if value is not None}))


def refused(source: Path, match: str, kind: str = "dense") -> None:
    """The import is refused, and leaves nothing behind."""
    out = source.parent / "out"
    with pytest.raises(UserError, match=match):
        import_model(source, out, kind, [])
    assert not out.exists() and not list(out.parent.glob(".*.partial"))


# config.json


def test_rotation_of_a_part_of_the_head_is_refused(source):
    config = read_config(source)
    for wrong in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(UserError, match=r"partial_rotary_factor is 0.5; only 1 can be imported"):
            model_section(config | wrong, source / "config.json", "dense")
    for right in (1.0, None):
        model_section(config | {"partial_rotary_factor": right}, source / "config.json", "dense")


def test_quantized_weights_are_refused(source):
    config = read_config(source) | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match="its weights are quantized"):
        model_section(config, source / "config.json", "dense")


@pytest.mark.parametrize("key", ["sliding_window", "max_window_layers"])
def test_window_that_transformers_would_complete_is_refused(source, key):
    config = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}
    config = read_config(source) | config
    assert model_section(config, source / "config.json", "swa").attention.window == 7
    del config[key]
    with pytest.raises(UserError, match=f"does not give {key}"):
        model_section(config, source / "config.json", "swa")


# weights


def test_tied_model_stored_as_its_output_layer(source, model):
    state = load_file(source / SINGLE)
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    save_file(state, source / SINGLE, metadata={"format": "pt"})
    made = import_model(source, source.parent / "run", "dense", [])
    assert_close("logits", our_logits(made, some_tokens()), their_logits(model, some_tokens()), rtol=1e-5)
    state["surprise"] = state.pop("lm_head.weight")
    save_file(state, source / SINGLE, metadata={"format": "pt"})
    refused(source, "lacks model.embed_tokens.weight")


@pytest.mark.parametrize(
    "places", [None, [], {"a": 3}, *({"a": file} for file in ("", "../model.safetensors", "/x", "..", "x\0"))]
)
def test_index_that_leads_elsewhere(source, places):
    (source / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(source, f"{INDEX} (has no weight_map|names .* which does not lie beside it)")


# files that are empty, or stand in for others


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", SINGLE, "merges.txt"]
)
def test_empty_files_and_pointers_are_named(source, name):
    for content, match in ((b"", "is empty"), (LFS_POINTER + b"v1\n", "is a Git LFS pointer")):
        (source / name).write_bytes(content)
        refused(source, f"{source / name} {match}")


def test_generation_config_that_is_none(source):
    (source / "generation_config.json").write_text("[1]")
    refused(source, r"generation_config\.json is not a JSON object")


# tokenizers


def test_tokenizer_of_transformers_5_on_all_ways(source):
    """Import, generate, prep and export read the ids of its tokenizer.json; the export loads in version 4 too."""
    config = source / "tokenizer_config.json"
    change(config, tokenizer_class="TokenizersBackend", backend="tokenizers", extra_special_tokens=["<|endoftext|>"])
    made = import_model(source, source.parent / "run", "dense", [])
    prompt = "every word is made"
    want = Tokenizer.from_file(str(source / "tokenizer.json")).encode(prompt).ids
    assert open_tokenizer(made / "tokenizer").encode(prompt) == want
    assert load_tokenizer(made / "tokenizer").encode([prompt])[0].tolist()[:-1] == want
    (text,) = greedy(made, [prompt], 3)
    assert text.startswith(prompt)
    out = export_model(made, source.parent / "back")
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.encode(prompt) == want and set(loaded(prompt)) == {"input_ids", "attention_mask"}
    assert loaded.additional_special_tokens == ["<|endoftext|>"] and loaded.eos_token == "<|endoftext|>"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == loaded.eos_token_id


def test_bare_tokenizer_file_is_exported_with_a_config(source):
    (source / "tokenizer_config.json").unlink()
    (source / "special_tokens_map.json").unlink(missing_ok=True)
    made = import_model(source, source.parent / "run", "l2a", [])
    loaded = AutoTokenizer.from_pretrained(export_model(made, source.parent / "back"), trust_remote_code=True)
    assert loaded.eos_token == "<|endoftext|>" and set(loaded("every")) == {"input_ids", "attention_mask"}


def test_tokenizer_that_cannot_be_loaded_is_refused_at_import(source):
    (source / "tokenizer.json").write_text('{"model": {"type": "Riddle"}}')
    refused(source, "the tokenizer .*tokenizer cannot be loaded")


def test_tokens_beyond_the_rows_are_refused(source, run):
    """At import; and by generate and export, if the tokenizer was changed later."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    missing = 301 - len(tokenizer)
    tokenizer.add_tokens([f"<new {number}>" for number in range(missing)])
    tokenizer.save_pretrained(source)
    match = rf"has 301 entries, the last is '<new {missing - 1}>', but the model has 300 rows"
    refused(source, match)
    changed = Path(shutil.copytree(run, source.parent / "changed"))
    tokenizer.save_pretrained(changed / "tokenizer")
    with pytest.raises(UserError, match=match):
        greedy(changed, [f"<new {missing - 1}>"], 1)
    with pytest.raises(UserError, match=match):
        export_model(changed, source.parent / "back")


# prompts


def test_long_prompt_is_refused_and_not_cut(run):
    tokenizer = open_tokenizer(run / "tokenizer")
    prompt = tokenizer.decode([100] * 90)
    length = len(tokenizer.encode(prompt))
    assert length > 80
    greedy(run, [prompt], 97 - length)
    with pytest.raises(
        UserError, match=rf"has {length} tokens, and {98 - length} more make a sequence of 97, but .* 96"
    ):
        greedy(run, ["every", prompt], 98 - length)
    greedy(run, [prompt], 98 - length, ["model.seq_length=97"])


def test_prompts_that_are_no_text(run):
    for prompt, match in (("\udcff", r"prompt '\\udcff' is not UTF-8 text"), ("", "a prompt is empty")):
        with pytest.raises(UserError, match=match):
            greedy(run, ["every", prompt], 1)
