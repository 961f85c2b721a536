"""What an exported L2A model answers with: as transformers' own classes do, or a refusal by name."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.conversion import export_model, import_model
from tests.launch.hugging_face_models import FAMILIES, some_tokens, write_model
from tests.numerics import assert_close


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A Qwen2 model, and its export as an L2A model whose layers never look back: the same function."""
    home = tmp_path_factory.mktemp("outputs")
    source = write_model(home / "source", FAMILIES["qwen2-tied"])
    overrides = ["model.attention.window=95", "model.attention.closed_layers=[0, 1]"]
    return source, export_model(import_model(source, home / "run", "l2a", overrides), home / "exported")


def load(folder: Path, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True, **changes).eval()


@torch.no_grad()
def test_hidden_states(folders):
    tokens = some_tokens(20, 1)
    theirs, ours = (load(folder) for folder in folders)
    want = theirs(tokens, output_hidden_states=True).hidden_states
    assert len(want) == 3
    for found in (
        ours(tokens, output_hidden_states=True),
        ours.model(tokens, output_hidden_states=True),
        load(folders[1], output_hidden_states=True)(tokens),
    ):
        assert len(found.hidden_states) == 3
        for number, (own, other) in enumerate(zip(found.hidden_states, want, strict=True)):
            assert_close(f"hidden state {number}", own, other, rtol=1e-5)
    assert ours(tokens).hidden_states is None and ours(tokens, output_hidden_states=False).hidden_states is None
    many = ours.generate(
        tokens, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None, output_hidden_states=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert [step[-1].shape[1] for step in many.hidden_states or ()] == [20, 1, 1]


@torch.no_grad()
def test_tuples(folders):
    tokens = some_tokens(20, 1)
    theirs, ours = (load(folder) for folder in folders)
    options = {"labels": tokens, "output_hidden_states": True, "use_cache": False}
    for want, found in (
        (theirs(tokens, return_dict=False, **options), ours(tokens, return_dict=False, **options)),
        (theirs(tokens, return_dict=False, **options), load(folders[1], return_dict=False)(tokens, **options)),
        (
            theirs.model(tokens, return_dict=False, use_cache=False),
            ours.model(tokens, return_dict=False, use_cache=False),
        ),
    ):
        assert type(found) is tuple and len(found) == len(want)
        assert_close("first", found[0], want[0], rtol=1e-5)
    logits, cache = ours(tokens, return_dict=False)
    assert logits.shape == (1, 20, 300) and cache.get_seq_length() == 20
    assert load(folders[1], return_dict=False)(tokens, return_dict=True).logits.shape == (1, 20, 300)


@torch.no_grad()
def test_attention_weights_are_refused(folders):
    ours, tokens = load(folders[1]), some_tokens(20, 1)
    with pytest.raises(ValueError, match="output_attentions: an L2A model keeps no attention weights"):
        ours(tokens, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        ours.generate(tokens, max_new_tokens=1, output_attentions=True, return_dict_in_generate=True, pad_token_id=0)
    with pytest.raises(ValueError, match="output_attentions"):
        load(folders[1], output_attentions=True)(tokens)
    assert ours(tokens, output_attentions=False).attentions is None
