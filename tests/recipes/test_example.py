"""The example of .github/CONTRIBUTING.md: a new kind is a row, and what asks the table knows it."""

import pytest

from launch.overrides import changed_model
from megatron_ext.specs import layer_spec
from recipes import kinds
from recipes.kinds import KINDS, WINDOW, AttentionKind
from recipes.load import RecipeError, check_model, override_model
from recipes.schema import AttentionConfig, ModelConfig


@pytest.fixture
def nope(monkeypatch) -> ModelConfig:
    """The page's row, and a model of that kind."""
    monkeypatch.setitem(KINDS, "nope", AttentionKind((WINDOW,), document_mask=True))
    monkeypatch.setattr("recipes.load.ATTENTION_KINDS", tuple(kinds.KINDS))
    return ModelConfig(
        2, 64, 4, ffn_size=96, vocab_size=320, seq_length=1024, attention=AttentionConfig(kind="nope", window=100)
    )


def test_the_recipe_check_knows_a_new_row(nope):
    check_model(nope)
    assert override_model(nope, ["model.attention.window=7"]).attention.window == 7
    with pytest.raises(RecipeError, match="attention kind nope does not use it"):
        override_model(nope, ["model.attention.top_k=7"])


def test_so_do_changes_after_training_the_count_of_tokens_and_the_layers(nope):
    assert changed_model(nope, ["model.attention.window=9"]).attention.window == 9
    assert KINDS["nope"].attended(nope, 1.0) == 101
    core = layer_spec("nope", nope.attention).submodules.self_attention.submodules.core_attention
    assert (core.module.__name__, core.params["window"]) == ("WindowAttention", 100)
