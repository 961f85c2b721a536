"""Sizes that the Triton kernels do not take are refused by the recipe's check, where the kernels would run."""

import pytest

from kernels.limits import CELL_SIZES, MAX_HEAD_DIM, MAX_TOP_K
from recipes.kinds import ATTENTION_KINDS, KINDS
from recipes.load import RecipeError, check_kernels, load_recipe
from recipes.schema import AttentionConfig, ModelConfig
from tests.recipes.test_load import SMALL, write

CELL_KINDS = [name for name in ATTENTION_KINDS if KINDS[name].reads_cells]


def model(kind: str, width: int = 64, **attention) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=width * 2, num_heads=2, ffn_size=8, vocab_size=9, seq_length=4096,
        attention=AttentionConfig(kind=kind, **attention),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_wide_heads(kind, backend):
    check_kernels(model(kind, MAX_HEAD_DIM, backend=backend), on_gpu=True)
    wide = model(kind, MAX_HEAD_DIM + 2, backend=backend)
    if kind == "dense" and backend == "auto":
        check_kernels(wide, on_gpu=True)  # torch's own attention
        wide.attention.document_mask = True
    with pytest.raises(RecipeError, match=r"model.head_dim = 130: the Triton kernels take at most 128; .*=reference"):
        check_kernels(wide, on_gpu=True)


def test_wide_heads_of_a_shared_dense_sequence():
    with pytest.raises(RecipeError, match="model.head_dim = 130"):
        check_kernels(model("dense", 130), on_gpu=True, context=2)


@pytest.mark.parametrize("kind", CELL_KINDS)
def test_cells(kind):
    for size in CELL_SIZES:
        check_kernels(model(kind, cell_size=size, top_k=MAX_TOP_K), on_gpu=True)
    with pytest.raises(
        RecipeError, match="model.attention.cell_size = 8: the Triton kernels take one of 16, 32, 64, 128"
    ):
        check_kernels(model(kind, cell_size=8), on_gpu=True)
    with pytest.raises(RecipeError, match="model.attention.top_k = 65: the Triton kernels take at most 64"):
        check_kernels(model(kind, top_k=MAX_TOP_K + 1), on_gpu=True)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_reference_has_no_limits(kind):
    sizes = {"cell_size": 8, "top_k": 65}
    check_kernels(model(kind, 256, **sizes), on_gpu=False)
    check_kernels(model(kind, 256, backend="reference", **sizes), on_gpu=True)


def test_recipe_of_a_gpu_or_of_the_kernels_is_refused_at_once(tmp_path):
    path = write(tmp_path, SMALL)
    for wrong in ("train.device=cuda", "model.attention.backend=triton"):
        with pytest.raises(RecipeError, match="model.head_dim = 256"):
            load_recipe(path, ["model.head_dim=256", wrong])
    load_recipe(path, ["model.head_dim=256"])
    load_recipe(path, ["model.head_dim=256", "train.device=cpu"])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_training_asks_again_when_it_knows_the_device(tmp_path, monkeypatch, device):
    import torch

    from launch import train

    monkeypatch.setattr(train, "pick_device", lambda wanted: torch.device(device))
    recipe = load_recipe(write(tmp_path, SMALL), ["model.head_dim=256"])
    if device == "cpu":
        return train.check_start(recipe)
    with pytest.raises(RecipeError, match="model.head_dim = 256"):
        train.check_start(recipe)
