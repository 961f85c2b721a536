"""Pruning: gates are counted on held-out text, and what is left out had nothing to say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from launch.cli import app
from launch.conversion import export_model, import_model
from launch.evaluate import evaluate
from launch.generate import greedy
from launch.prune import prune
from launch.run_directory import model_of
from megatron_ext import checkpoint
from megatron_ext.weights import SINGLE
from recipes.load import RecipeError
from tests.launch.hugging_face_models import (
    FAMILIES,
    attention_of,
    our_logits,
    some_tokens,
    stir_gates,
    their_logits,
    write_model,
)
from tests.numerics import assert_close

SHUT = ["model.attention.gate_threshold=0.6"]  # layer 0 has p = 0.5 everywhere


CASES = [("qwen2-tied", "l2a"), ("qwen3-wide-heads", "l2a_shared"), ("qwen2-tied", "l2a_freesolo")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[1])
def run(request, tmp_path_factory, shards) -> Path:
    """An L2A run whose layer 0 never decides and whose layer 1 opens some gates, with the shards to measure it on."""
    name, kind = request.param
    home = tmp_path_factory.mktemp("prune")
    source = write_model(home / "source", FAMILIES[name])
    made = stir_gates(import_model(source, home / "run", kind, attention_of(kind, window=7)))
    file = checkpoint.find(made) / checkpoint.WEIGHTS / SINGLE
    state = load_file(file)
    state["decoder.layers.0.router.weight"].zero_()
    save_file(state, file)
    with open(made / "recipe.yaml", "a") as recipe:
        recipe.write(f"  shards: {shards}\n")
    return made


def test_prunes_the_layer_that_is_closed(run, tmp_path):
    out, tokens = tmp_path / "pruned", some_tokens()
    found = prune(run, out, min_closed=0.95, sequences=4, device="cpu", overrides=SHUT)
    assert found.closed_layers == [0] and found.open_fraction[0] == 0 and 0.1 < found.open_fraction[1] < 0.9
    assert found.tokens == 4 * 80 and found.loss_after == pytest.approx(found.loss_before, rel=1e-6)

    model = model_of(out)
    assert model.attention.closed_layers == [0] and model.attention.gate_threshold == 0.6
    head = (model.head_dim or model.hidden_size // model.num_heads) * model.num_kv_heads
    assert (found.bytes_before, found.bytes_after) == (2 * 2 * head * 2, 2 * head * 2)
    assert found.window_bytes == 2 * 2 * head * 2 * 7

    names = set(checkpoint.stored_weights(checkpoint.find(out)))
    whole = set(checkpoint.stored_weights(checkpoint.find(run)))
    lost = {name for name in whole if name.startswith(("decoder.layers.0.global_", "decoder.layers.0.router"))}
    assert lost and names == whole - lost

    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("gate_threshold: 0.5", "gate_threshold: 0.6"))
    want = our_logits(run, tokens)
    (run / "recipe.yaml").write_text(recipe)
    assert_close("pruned", our_logits(out, tokens), want, rtol=1e-6)
    assert greedy(out, ["every word"], 2) == greedy(run, ["every word"], 2, SHUT)


@torch.no_grad()
def test_pruned_model_exports(run, tmp_path):
    prune(run, tmp_path / "pruned", min_closed=0.95, sequences=2, device="cpu", overrides=SHUT)
    folder, tokens = export_model(tmp_path / "pruned", tmp_path / "out"), some_tokens()
    assert json.loads((folder / "config.json").read_text())["closed_layers"] == [0]
    want = our_logits(tmp_path / "pruned", tokens)
    assert_close("exported", their_logits(folder, tokens), want, rtol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    cache = model(tokens[:, :30]).past_key_values
    assert [layer.keys.shape[-2] for layer in cache.layers] == [7, 7, 30]
    assert_close("cached", model(tokens[:, 30:], past_key_values=cache).logits, want[:, 30:], rtol=1e-5)
    again = import_model(folder, tmp_path / "again", model_of(run).attention.kind, [])
    assert_close("imported again", our_logits(again, tokens), want, rtol=1e-6)


def test_held_out_loss_at_a_threshold(run, tmp_path):
    """0 opens every gate, 1 none of these: what is left then is the model whose layers are all pruned."""

    def at(threshold: float):
        moved = [f"model.attention.gate_threshold={threshold}"]
        return evaluate(run, sequences=4, device="cpu", overrides=moved)

    own, shut = evaluate(run, sequences=4, device="cpu"), at(0.6)
    assert own == at(0.5) and own.tokens == 4 * 80
    found = prune(run, tmp_path / "pruned", min_closed=1e-9, sequences=4, device="cpu", overrides=SHUT)
    assert (shut.loss, shut.open_fraction) == (found.loss_before, found.open_fraction)
    every, never = at(0.0), at(1.0)
    assert set(every.open_fraction.values()) == {1.0} and set(never.open_fraction.values()) == {0.0}
    assert never.loss == pytest.approx(found.loss_after, rel=1e-6)
    assert len({round(one.loss, 5) for one in (every, own, shut, never)}) == 4
    done = CliRunner().invoke(app, ["eval", str(run), "--sequences", "4", "--device", "cpu", *SHUT])
    assert done.exit_code == 0, done.output
    assert "layer   0: gate open for   0.00%" in done.output and f"320 held-out tokens: {shut.loss:.4f}" in done.output


def test_share_decides(run, tmp_path):
    """With a lower share the other layer goes too, its few open gates with it."""
    found = prune(run, tmp_path / "all", min_closed=1e-9, sequences=4, device="cpu", overrides=SHUT)
    assert found.closed_layers == [0, 1] and found.bytes_after == 0
    assert found.loss_after != pytest.approx(found.loss_before, rel=1e-4)
    with pytest.raises(ValueError, match="has no layer that looks back"):
        prune(tmp_path / "all", tmp_path / "more", min_closed=0.5, sequences=1, device="cpu")


def test_what_is_refused(run, tmp_path, shards):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"the most closed is layer \d with \d+.\d%"):
        prune(run, out, min_closed=0.999, sequences=2, device="cpu")
    with pytest.raises(RecipeError, match="--min-closed 1.5"):
        prune(run, out, min_closed=1.5, sequences=2)
    source = write_model(tmp_path / "source", FAMILIES["qwen2-tied"])
    dense = import_model(source, tmp_path / "dense", "dense", [])
    with pytest.raises(ValueError, match="is a model of kind dense"):
        prune(dense, out, min_closed=0.95, sequences=2)
    drawn = import_model(source, tmp_path / "drawn", "context_free", [])
    with pytest.raises(ValueError, match="is a model of kind context_free; its gates open by chance"):
        prune(drawn, out, min_closed=0.95, sequences=2)
    bare = import_model(source, tmp_path / "bare", "l2a", [])
    with pytest.raises(ValueError, match="names no data.shards"):
        prune(bare, out, min_closed=0.95, sequences=2)
    measured = evaluate(bare, sequences=2, device="cpu", overrides=[f"data.shards={shards}"])
    assert measured.tokens == 2 * 80
    assert not out.exists() and not list(tmp_path.glob(".*.partial"))


def test_command_line(run, tmp_path):
    """import, prune and export as a person types them."""
    call = CliRunner().invoke
    pruned = ["convert", "prune", "--stats", str(run), "--out", str(tmp_path / "pruned"), "--device", "cpu"]
    done = call(app, [*pruned, "--sequences", "2", *SHUT])
    assert done.exit_code == 0, done.output
    assert "layer   0: gate open for   0.00%   pruned" in done.output and "bytes per token (50% less)" in done.output
    done = call(app, ["convert", "export", "--from", str(tmp_path / "pruned"), "--out", str(tmp_path / "hf")])
    assert done.exit_code == 0, done.output
    back = ["convert", "import", "--from", str(tmp_path / "hf"), "--out", str(tmp_path / "back")]
    done = call(app, [*back, "--attention", model_of(run).attention.kind])
    assert done.exit_code == 0 and str(tmp_path / "back") in done.output.replace("\n", "")
    assert "its window is 7 tokens" in done.output
