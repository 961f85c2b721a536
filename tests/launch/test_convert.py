"""Hugging Face models in and out: the same logits on both sides, nothing lost, nothing written over."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import generate
from launch.conversion import export_model, import_model
from launch.generate import greedy
from launch.run_directory import model_of
from megatron_ext import checkpoint
from megatron_ext.weights import INDEX, SINGLE, StoredWeights
from recipes.load import RecipeError, load_recipe
from tests.distributed import ROOT
from tests.launch.hugging_face_models import FAMILIES, our_logits, some_tokens, their_logits, write_model
from tests.numerics import assert_close


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A folder for every family; one of them in many small files."""
    home = tmp_path_factory.mktemp("hugging_face")
    small = {"qwen2.5-untied": "20KB"}
    return {name: write_model(home / name, config, shard=small.get(name, "5GB")) for name, config in FAMILIES.items()}


def export(run: Path, out: Path, *, dtype: str = "stored", shard_bytes: int = 1 << 30) -> Path:
    return export_model(run, out, dtype=dtype, max_positions=None, shard_bytes=shard_bytes)


def assert_same_weights(got: Path, want: Path) -> None:
    got, want = StoredWeights(got), StoredWeights(want)
    assert set(got) == set(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(models, tmp_path, name):
    source, tokens = models[name], some_tokens()
    run = import_model(source, tmp_path / "run", "dense", [])
    back = export(run, tmp_path / "back", shard_bytes=40_000)
    assert (back / INDEX).exists()
    assert len({path.stat().st_mode for path in back.iterdir()}) == 1  # whoever may read one file may read all
    want = their_logits(source, tokens)
    assert_close("ours", our_logits(run, tokens), want, rtol=1e-5)
    assert_close("back", their_logits(back, tokens), want, rtol=1e-5)
    assert_same_weights(back, source)
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    for key in ("rope_theta", "max_position_embeddings", "architectures", "vocab_size", "tie_word_embeddings"):
        assert ours[key] == theirs[key]
    assert ours["rope_parameters"] == {"rope_type": "default", "rope_theta": theirs["rope_theta"]}


def test_sharded_source_has_many_files(models):
    assert len(list(models["qwen2.5-untied"].glob("*.safetensors"))) > 3


def test_window_means_the_same_on_both_sides(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "swa", ["model.attention.window=11"])
    tokens = some_tokens()
    back = export(run, tmp_path / "back")
    want = our_logits(run, tokens)
    assert_close("windowed", their_logits(back, tokens), want, rtol=1e-5)
    dense = their_logits(models["qwen2-tied"], tokens)
    assert_close("inside the window", want[:, :12], dense[:, :12], rtol=1e-5)
    assert (want[:, 12] - dense[:, 12]).abs().max() > 1e-2
    again = import_model(back, tmp_path / "again", "swa", [])
    assert model_of(again).attention.window == 11
    with pytest.raises(ValueError, match="--attention swa"):
        import_model(back, tmp_path / "dense", "dense", [])


def test_padded_vocabulary(models, tmp_path):
    """Rows beyond the checkpoint's are zero, change no logit, cannot be sampled, and stay behind at export."""
    source, tokens = models["qwen2.5-untied"], some_tokens()
    run = import_model(source, tmp_path / "run", "dense", ["model.vocab_size=512"])
    stored = checkpoint.stored_weights(checkpoint.find(run))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert stored[name].shape[0] == 512 and not stored[name][300:].any()
    logits = our_logits(run, tokens)
    assert logits.shape[-1] == 300
    assert_close("logits", logits, their_logits(source, tokens), rtol=1e-5)
    assert_same_weights(export(run, tmp_path / "back"), source)


def test_other_dtypes(models, tmp_path):
    """bf16 weights come back bit for bit, and can be asked for."""
    half = tmp_path / "half"
    shutil.copytree(models["qwen3-wide-heads"], half)
    save_file({name: x.bfloat16() for name, x in load_file(half / SINGLE).items()}, half / SINGLE)
    run = import_model(half, tmp_path / "run", "dense", [])
    assert_same_weights(export(run, tmp_path / "back"), half)
    whole = import_model(models["qwen3-wide-heads"], tmp_path / "whole", "dense", [])
    assert_same_weights(export(whole, tmp_path / "bf16", dtype="bf16"), half)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_generate_reads_an_import(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    (text,) = greedy(run, ["every word"], 4)
    assert text.startswith("every word") and len(text) > len("every word")


def test_generate_begins_as_the_documents_did(models, tmp_path, monkeypatch):
    """By the manifest of the shards; without shards by the recipe, then by the tokenizer itself."""
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    recipe, config = run / "recipe.yaml", run / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "z"}))
    seen: list[list[int]] = []

    def logits(_model, _config, tokens: list[int]) -> torch.Tensor:
        seen.append(list(tokens))
        return torch.eye(300)[tokens[-1]]

    monkeypatch.setattr(generate, "next_token_logits", logits)
    (plain,) = greedy(run, ["every word"], 1)
    imported = recipe.read_text()
    recipe.write_text(imported + "  add_bos: true\n")
    assert greedy(run, ["every word"], 1) == [plain]
    (tmp_path / "manifest.json").write_text('{"bos_id": 7, "splits": {}}')
    recipe.write_text(imported + f"  shards: {tmp_path}\n")
    assert greedy(run, ["every word"], 1) == [plain]
    (tmp_path / "manifest.json").unlink()
    assert greedy(run, ["every word"], 1) == [plain]
    bare, by_recipe, by_shards, gone = seen
    assert by_recipe == [AutoTokenizer.from_pretrained(run / "tokenizer").bos_token_id, *bare]
    assert by_shards == [7, *bare] and gone == bare


def test_exported_tokenizer_returns_what_the_model_takes(models, tmp_path):
    """Also that of shards which an older prep wrote."""
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    path = run / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert config.pop("model_input_names") == ["input_ids", "attention_mask"]
    path.write_text(json.dumps(config))
    assert "token_type_ids" in AutoTokenizer.from_pretrained(path.parent)("word")
    folder = export(run, tmp_path / "out")
    asked = AutoTokenizer.from_pretrained(folder)("every word", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generate(**asked, max_new_tokens=2, do_sample=False).shape[1] > asked["input_ids"].shape[1]


def test_import_is_the_base_of_a_training_recipe(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "l2a", [])
    recipe = tmp_path / "train.yaml"
    recipe.write_text(
        "base: run/recipe.yaml\nrun_dir: runs/x\nmodel: {seq_length: 64, attention: {rope_base: 5.0e6}}\n"
        "data: {shards: shards}\ntrain: {steps: 2, tokens_per_step: 128, lr: 1.0e-4, min_lr: 0.0}\n"
    )
    loaded = load_recipe(recipe)
    assert loaded.model.init_from == str(run) and loaded.data.tokenizer == str(run / "tokenizer")
    assert (loaded.model.num_layers, loaded.model.qkv_bias, loaded.model.attention.kind) == (2, True, "l2a")
    assert loaded.model.attention.rope_base == 5e6


def test_a_run_cannot_go_on_from_weights_only(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    facts = checkpoint.read_facts(checkpoint.find(run))
    with pytest.raises(ValueError, match="name it as model.init_from"):
        checkpoint.needs_universal(facts, None, 0)  # type: ignore[arg-type] - refused before any layout matters


def test_generation_config_travels(models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models["qwen2-tied"], source)
    named = {"bos_token_id": 7, "eos_token_id": [3, 4], "temperature": 0.7, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(named))
    back = export(import_model(source, tmp_path / "run", "dense", []), tmp_path / "back")
    assert json.loads((back / "generation_config.json").read_text()) == named
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, [3, 4])


def edited(models, tmp_path, name="qwen2-tied", *, config=None, tensors=None) -> Path:
    """A copy of a model with its config or its tensors changed by a function."""
    folder = tmp_path / "edited"
    shutil.copytree(models[name], folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        state = load_file(folder / SINGLE)
        tensors(state)
        save_file(state, folder / SINGLE)
    return folder


def refused(source: Path, out: Path, match: str, *overrides: str, kind: str = "dense") -> None:
    with pytest.raises(ValueError, match=match):
        import_model(source, out, kind, list(overrides))
    assert not out.exists() and not list(out.parent.glob(".*.partial"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rope_theta": None}, "does not give rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "positions are scaled .yarn."),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "which one is right"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"num_key_value_heads": None}, "does not give num_key_value_heads"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}, "only some"),
        ({"num_hidden_layers": 3}, r"lacks model.layers.2"),
        ({"num_hidden_layers": 1}, r"holds model.layers.1.+ and \d+ more, which this model has no place for"),
        ({"intermediate_size": 65}, r"gate_proj.weight is \[64, 48\] instead of \[65, 48\]"),
    ],
)
def test_configs_that_are_refused(models, tmp_path, change, match):
    refused(edited(models, tmp_path, config=change), tmp_path / "out", match)


def test_rope_base_of_transformers_5(models, tmp_path):
    change = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    run = import_model(edited(models, tmp_path, config=change), tmp_path / "run", "dense", [])
    assert model_of(run).attention.rope_base == 777.0


def test_tensors_that_are_refused(models, tmp_path):
    folder = edited(models, tmp_path, tensors=lambda state: state.pop("model.layers.1.self_attn.k_proj.bias"))
    refused(folder, tmp_path / "out", r"lacks model.layers.1.self_attn.k_proj.bias")
    shutil.rmtree(folder)
    folder = edited(models, tmp_path, tensors=lambda state: state.update(surprise=torch.ones(2)))
    refused(folder, tmp_path / "out", "holds surprise")
    shutil.rmtree(folder)
    folder = edited(models, tmp_path, tensors=lambda state: state.update({"lm_head.weight": torch.ones(300, 48)}))
    refused(folder, tmp_path / "out", "lm_head.weight differs from model.embed_tokens.weight")
    shutil.rmtree(folder)
    folder = edited(
        models, tmp_path, tensors=lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"] * 1})
    )
    import_model(folder, tmp_path / "out", "dense", [])


def test_damaged_folders_are_refused(models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models["qwen2.5-untied"], source)
    lost = sorted(source.glob("*.safetensors"))[1]
    lost.rename(tmp_path / "aside")
    refused(source, tmp_path / "out", f"{lost.name} cannot be read")
    shutil.copyfile(sorted(source.glob("*.safetensors"))[0], lost)
    refused(source, tmp_path / "out", "disagree about")
    (source / INDEX).write_text("{")
    refused(source, tmp_path / "out", f"{INDEX} cannot be read")
    (source / INDEX).unlink()
    refused(source, tmp_path / "out", f"holds neither {SINGLE} nor {INDEX}")
    refused(tmp_path / "nowhere", tmp_path / "out", "config.json does not exist")


def test_tokenizer_must_be_there(models, tmp_path):
    source = edited(models, tmp_path)
    (source / "tokenizer.json").unlink()
    refused(source, tmp_path / "out", "holds no tokenizer")


def test_wrong_use(models, tmp_path):
    source, out = models["qwen2-tied"], tmp_path / "out"
    for override, match in (
        ("model.num_layers=1", "the weights fix it to 2"),
        ("model.vocab_size=299", "has 300 rows"),
        ("train.lr=1", "only keys of the model section"),
        ("model.windo=3", "windo"),
    ):
        with pytest.raises(RecipeError, match=match):
            import_model(source, out, "dense", [override])
    with pytest.raises(RecipeError, match="--attention moba is not one of"):
        import_model(source, out, "moba", [])
    assert not out.exists()


def test_nothing_is_written_over(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    with pytest.raises(ValueError, match="exists already"):
        import_model(models["qwen2-tied"], run, "dense", [])
    with pytest.raises(ValueError, match="exists already"):
        export(run, run)
    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")


def test_no_export_of_what_transformers_cannot_compute(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "freesolo", ["model.seq_length=128"])
    with pytest.raises(ValueError, match="kind is freesolo; transformers has no such attention"):
        export(run, tmp_path / "out")
    run = import_model(models["llama"], tmp_path / "llama", "swa", [])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no sliding window"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_recipe_that_is_not_of_the_weights(models, tmp_path):
    run = import_model(models["qwen2-tied"], tmp_path / "run", "dense", [])
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("qkv_bias: true", "qkv_bias: false"))
    with pytest.raises(ValueError, match="holds decoder.layers.0.self_attention.linear_qkv.bias"):
        export(run, tmp_path / "out")
    recipe.write_text(recipe.read_text().replace("num_layers: 2", "num_layers: 3"))
    with pytest.raises(ValueError, match="lacks decoder.layers.2"):
        export(run, tmp_path / "out")


MEMORY = """
import sys
from pathlib import Path
from launch.conversion import export_model, import_model

def resident(which):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(which))

source, out, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
import_model(source, out / "run", kind, [], shard_bytes=32 << 20)
imported = resident("VmHWM") - before
export_model(out / "run", out / "back", dtype="stored", max_positions=None, shard_bytes=32 << 20)
print(imported, resident("VmHWM") - before)
"""


def test_conversion_never_holds_the_model(models, tmp_path):
    """340 MB in one file, shards of 32 MB: neither way needs half of the model, libraries included."""
    kind = "dense"
    wide = {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 2432}
    source = edited(models, tmp_path, "qwen2.5-untied", config=wide | {"num_hidden_layers": 10})
    state = big_state(layers=10, hidden=896, kv=128, ffn=2432, vocab=300)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(state, source / SINGLE)
    size = (source / SINGLE).stat().st_size
    assert size > 300e6
    command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    peaks = [int(number) for number in done.stdout.split()[-2:]]
    print([round(peak / size, 2) for peak in peaks])
    assert max(peaks) < size / 2


def big_state(*, layers: int, hidden: int, kv: int, ffn: int, vocab: int) -> dict[str, torch.Tensor]:
    """Tensors of an untied Qwen2 model, all zero."""
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for n in range(layers):
        rows = {"q": hidden, "k": kv, "v": kv}
        shapes |= {f"model.layers.{n}.self_attn.{p}_proj.weight": (r, hidden) for p, r in rows.items()}
        shapes |= {f"model.layers.{n}.self_attn.{p}_proj.bias": (r,) for p, r in rows.items()}
        shapes[f"model.layers.{n}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"model.layers.{n}.mlp.{p}_proj.weight": (ffn, hidden) for p in ("gate", "up")}
        shapes[f"model.layers.{n}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes |= {f"model.layers.{n}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
