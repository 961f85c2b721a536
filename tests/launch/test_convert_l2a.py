"""L2A models in and out: the exported modeling file computes what our layers do, with a cache and without."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from launch.conversion import export_model, import_model, one_process
from launch.generate import greedy, load_model, next_token_logits
from launch.run_directory import find_tokenizer, model_of
from megatron_ext import checkpoint
from megatron_ext.hugging_face.names import START_VALUES
from megatron_ext.weights import StoredWeights
from recipes.load import read_model
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

WINDOW = 7
CASES = [("qwen2-tied", "l2a"), ("qwen3-wide-heads", "l2a"), ("qwen2.5-untied", "l2a_shared"),
         ("llama", "context_free"), ("qwen3-narrow-heads-tied", "l2a_freesolo")]  # fmt: skip


def case_name(case: tuple[str, str]) -> str:
    return "-".join(case)


@pytest.fixture(scope="module", params=CASES, ids=case_name)
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """A run with an L2A model of which some gates are open, and its export."""
    name, kind = request.param
    home = tmp_path_factory.mktemp("l2a")
    source = write_model(home / "source", FAMILIES[name])
    run = stir_gates(import_model(source, home / "run", kind, attention_of(kind, window=WINDOW)))
    return run, export(run, home / "exported")


def export(run: Path, out: Path) -> Path:
    return export_model(run, out, dtype="stored", max_positions=None, shard_bytes=1 << 30)


def load(folder: Path, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True, **changes).eval()


@torch.no_grad()
def open_shares(model, tokens: torch.Tensor) -> list[float]:
    """Share of open gates in each layer of an exported model."""
    shares, positions = [], torch.arange(tokens.shape[1]).expand_as(tokens)
    hooks = [
        layer.global_layernorm.register_forward_hook(
            lambda _m, _i, z, layer=layer: shares.append(layer.is_open(z, positions).double().mean().item())
        )
        for layer in model.model.layers
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return shares


def test_logits(pair):
    run, folder = pair
    tokens = some_tokens()
    assert all(0.1 < share < 0.9 for share in open_shares(load(folder), tokens))
    assert_close("logits", their_logits(folder, tokens), our_logits(run, tokens), rtol=1e-5)


def test_a_fresh_import_is_the_base_model_inside_the_window(tmp_path):
    """Zero gates are open, and the second look adds what a copy of the first attention sees: nothing may be lost."""
    source = write_model(tmp_path / "source", FAMILIES["qwen2-tied"])
    run = import_model(source, tmp_path / "run", "l2a", ["model.attention.window=7"])
    stored = checkpoint.stored_weights(checkpoint.find(run))
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        assert not stored[prefix + "router.weight"].any()
        assert torch.equal(stored[prefix + "global_layernorm.weight"], stored[prefix + "input_layernorm.weight"])
        for part in ("linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight"):
            first = stored[f"{prefix}self_attention.{part}"]
            assert first.any() and torch.equal(stored[f"{prefix}global_attention.{part}"], first)
    folder = export(run, tmp_path / "out")
    assert open_shares(load(folder), some_tokens()) == [1.0, 1.0]
    assert_close("logits", their_logits(folder, some_tokens()), our_logits(run, some_tokens()), rtol=1e-5)


@torch.no_grad()
def test_cache_changes_nothing(pair):
    """Tokens one by one, and in uneven pieces, against all at once, over many windows."""
    model, tokens = load(pair[1]), some_tokens()
    want = model(tokens, use_cache=False).logits
    for pieces in ([1] * 48, [5, 1, 20, 1, 1, 20], [47, 1]):
        cache, got = DynamicCache(config=model.config), []
        for part in tokens.split(pieces, dim=1):
            got.append(model(part, past_key_values=cache).logits)
        assert_close(f"pieces {pieces[:3]}", torch.cat(got, dim=1), want, rtol=1e-5)
    kept = [layer.keys.shape[-2] for layer in cache.layers]
    assert kept == [WINDOW, 48] * 2  # the window's part does not grow


@torch.no_grad()
def test_cache_of_a_window_of_nothing(tmp_path):
    """Each token sees itself alone; the cache keeps one token where it could keep none."""
    source = write_model(tmp_path / "source", FAMILIES["qwen2-tied"])
    run = stir_gates(import_model(source, tmp_path / "run", "l2a", ["model.attention.window=0"]))
    model, tokens = load(export(run, tmp_path / "out")), some_tokens()
    cache = DynamicCache(config=model.config)
    got = [model(part, past_key_values=cache).logits for part in tokens.split([20, 1, 27], dim=1)]
    assert_close("pieces", torch.cat(got, dim=1), our_logits(run, tokens), rtol=1e-5)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [1, 48] * 2


def continued(model, tokens: torch.Tensor, **options) -> torch.Tensor:
    """`tokens` and 20 more by transformers' generate; all are real unless a mask says otherwise."""
    options = {"attention_mask": torch.ones_like(tokens), "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(tokens, max_new_tokens=20, do_sample=False, **options)


def test_generate(pair):
    """transformers' generate with cache, without, our own greedy continuation and one whole forward agree."""
    run, folder = pair
    model, tokens = load(folder), some_tokens(30, 1)
    cached = continued(model, tokens)
    assert torch.equal(cached, continued(model, tokens, use_cache=False))
    config, mine = model_of(run), tokens[0].tolist()
    with one_process():
        own = load_model(config, checkpoint.find(run))
        for _ in range(20):
            mine.append(int(next_token_logits(own, config, mine).argmax()))
    assert cached[0].tolist() == mine
    assert our_logits(run, torch.tensor([mine]))[0, 29:-1].argmax(dim=-1).tolist() == mine[30:]
    beams = continued(model, tokens, num_beams=3)
    assert torch.equal(beams, continued(model, tokens, num_beams=3, use_cache=False))


def test_padding_is_not_there(pair):
    """Prompts of two lengths in one batch, padded on the left, go on as each does alone."""
    model = load(pair[1])
    long, short = some_tokens(30, 1), some_tokens(19, 1)
    padded = torch.cat((long, torch.cat((torch.full((1, 11), 299), short), dim=1)))
    mask = torch.ones_like(padded)
    mask[1, :11] = 0
    both = continued(model, padded, attention_mask=mask)
    assert torch.equal(both[0], continued(model, long)[0])
    assert torch.equal(both[1, 11:], continued(model, short)[0])
    with torch.no_grad():
        rows = model(padded, attention_mask=mask).logits
        assert rows.isfinite().all()
        assert_close("row", rows[1:, 11:], model(short).logits, rtol=1e-5)


@torch.no_grad()
def test_layers_may_lie_elsewhere(pair):
    """As accelerate has it for a device_map: a module's weights are there in its own forward, and in no other."""
    model, tokens = load(pair[1]), some_tokens()
    want = model(tokens).logits

    def bring(module: torch.nn.Module, own: dict):
        module.register_forward_pre_hook(lambda module, _inputs: module._parameters.update(own))
        module.register_forward_hook(lambda module, _inputs, _output: module._parameters.update(away))
        away = {name: torch.nn.Parameter(weight.to("meta")) for name, weight in own.items()}
        module._parameters.update(away)

    for module in list(model.modules()):
        own = {name: weight for name, weight in module._parameters.items() if weight is not None}
        if own:
            bring(module, own)
    assert torch.equal(model(tokens).logits, want)
    sequence = sys.modules[type(model).__module__].Sequence(torch.arange(5)[None], tokens[:1] > 0, 0, model.config)
    assert sequence.to("cpu") is sequence
    moved = vars(sequence.to("meta"))
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_threshold_can_be_moved(pair, tmp_path):
    """0 opens every gate; above 1 closes them, which leaves the window alone; on both sides alike.

    Gates that open by chance have a probability in its place.
    """
    run, folder = pair
    tokens = some_tokens()
    recipe = (run / "recipe.yaml").read_text()
    free = model_of(run).attention.kind == "context_free"
    key, own, values = ("open_probability", 0.4, (1.0, 0.0)) if free else ("gate_threshold", 0.5, (0.0, 1.5))
    for value, share in zip(values, (1.0, 0.0), strict=True):
        (run / "recipe.yaml").write_text(recipe.replace(f"{key}: {own}", f"{key}: {value}"))
        want = our_logits(run, tokens)
        (run / "recipe.yaml").write_text(recipe)
        model = load(folder, **{key: value})
        assert open_shares(model, tokens) == [share] * 2
        with torch.no_grad():
            assert_close(f"{key} {value}", model(tokens).logits, want, rtol=1e-5)


def test_config_and_round_trips(pair, tmp_path):
    run, folder = pair
    config = json.loads((folder / "config.json").read_text())
    model = model_of(run)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == model.attention.rope_base
    assert config["max_position_embeddings"] == model.seq_length
    again = import_model(folder, tmp_path / "again", model.attention.kind, [])
    assert read_model(again / "recipe.yaml").attention == model.attention
    ours, theirs = (checkpoint.stored_weights(checkpoint.find(one)) for one in (again, run))
    start_values = {name for name in ours if name.endswith(START_VALUES)}  # which the first import left to the recipe
    assert set(ours) - start_values == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ValueError, match=f"import it with --attention {model.attention.kind}"):
        import_model(folder, tmp_path / "dense", "dense", [])
    # through transformers' own save and load
    load(folder).save_pretrained(tmp_path / "saved")
    saved, exported = StoredWeights(tmp_path / "saved"), StoredWeights(folder)
    assert set(saved) == set(exported) and all(torch.equal(saved[name], exported[name]) for name in exported)
    assert AutoConfig.from_pretrained(tmp_path / "saved", trust_remote_code=True).local_window == WINDOW


def test_our_generate_says_what_the_whole_forward_says(pair):
    """`longpitch generate` as text, against the most likely token after every prefix of what it wrote."""
    run, prompt = pair[0], "every word is made of letters"
    tokenizer = AutoTokenizer.from_pretrained(str(find_tokenizer(run)))
    tokens = start = tokenizer.encode(prompt, add_special_tokens=False)
    for _ in range(6):
        logits = our_logits(run, torch.tensor([tokens]))[0, -1]
        tokens = [*tokens, int(logits.argmax())]
    whole = our_logits(run, torch.tensor([tokens]))[0].argmax(dim=-1).tolist()
    assert whole[len(start) - 1 : -1] == tokens[len(start) :]
    assert tokenizer.eos_token_id not in tokens
    assert greedy(run, [prompt], 6) == [tokenizer.decode(tokens)]
