"""Finds the layers of an L2A model that hardly ever look back, and writes the model without their second attention.

The gates are counted on held-out sequences; such a layer keeps its window and its MLP, and no longer needs the keys and
values of the whole past.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_prep.heldout import EvalReader
from launch.conversion import one_process, show_progress, write_recipe
from launch.evaluate import load_for_measuring, measure, open_heldout
from launch.overrides import changed_model, split_shards
from launch.run_directory import find_tokenizer, model_of
from launch.train import model_facts
from megatron_ext import checkpoint
from megatron_ext.hugging_face.tokenizer import copy_tokenizer
from megatron_ext.model import LanguageModel, head_dim, weight_shapes
from megatron_ext.router import Router
from megatron_ext.weights import new_folder
from recipes.errors import UserError
from recipes.kinds import KINDS, kinds_with
from recipes.load import RecipeError
from recipes.schema import ModelConfig

NEVER = 2.0  # a threshold that no probability reaches


@dataclass(frozen=True)
class Pruned:
    """What was measured and left out."""

    open_fraction: dict[int, float]  # layer -> share of tokens whose gate is open, of the layers that have a gate
    closed_layers: list[int]  # of the written model
    tokens: int  # measured on
    loss_before: float  # nats per token on them
    loss_after: float
    bytes_before: int  # keys and values that one more token adds to a cache in bf16
    bytes_after: int
    window_bytes: int  # what the windows of all layers keep besides, however long the text


def prune(
    run: Path, out: Path, *, min_closed: float, sequences: int, device: str = "auto", overrides: list[str] | None = None
) -> Pruned:
    """Write the newest checkpoint of `run` without the second attention of layers that are closed often enough.

    Args:
        run: run directory or one of its checkpoints; the held-out shards of its recipe are measured on.
        out: run directory to make, as an import makes it.
        min_closed: share of tokens, 0 to 1, for which a layer's gate must be closed.
        sequences: held-out sequences to measure on, at most.
        device: auto, cpu or cuda.
        overrides: `model.attention.key=value`, such as another gate_threshold, which the written model keeps; and
            `data.shards=FOLDER`.

    Raises:
        UserError: no learned gates, no held-out shards, no layer to prune, or `out` exists.
    """
    if not 0 < min_closed <= 1:
        raise RecipeError(f"--min-closed {min_closed} must be above 0 and at most 1")
    step = checkpoint.find(run)
    home = step.parent.parent
    named, changes = split_shards(overrides)
    model = changed_model(model_of(home), changes)
    if not KINDS[model.attention.kind].prunable:
        raise UserError(f"{home} is a model of kind {model.attention.kind}; {_why_not(model.attention.kind)}")
    shards, reader = open_heldout(step, model, named, sequences)
    with new_folder(out) as folder, one_process(device):
        language_model = load_for_measuring(model, step, device)
        found = _measure(language_model, model, reader, min_closed)
        smaller = replace(model, attention=replace(model.attention, closed_layers=found.closed_layers))
        copy_tokenizer(find_tokenizer(home), folder / "tokenizer")
        origin = f"{step} without the second look of layers {found.closed_layers}"
        write_recipe(folder, out.absolute(), smaller, origin, shards=str(shards.absolute()))
        weights = checkpoint.stored_weights(step)
        # FreeSolo's start values are not in an import
        names = [name for name in weight_shapes(smaller) if name in weights]
        kept = ((name, weights[name]) for name in show_progress(names, "prune"))
        facts = {"model": model_facts(smaller), "source": str(step), "pruned": vars(found)}
        facts["tokenizer"] = checkpoint.read_facts(step)["tokenizer"]
        checkpoint.save_weights(folder / "checkpoints" / "step_0", kept, facts)
    return found


def _why_not(kind: str) -> str:
    if KINDS[kind].gate is not None:
        return "its gates open by chance, in all layers alike, so counting them tells nothing; l2a learns its gates"
    return f"only {', '.join(kinds_with(lambda one: one.prunable))} have gates that are learned and can be pruned"


def _measure(built: LanguageModel, model: ModelConfig, reader: EvalReader, min_closed: float) -> Pruned:
    before = measure(built, model, reader)
    opened = before.open_fraction
    if not opened:
        raise UserError("the model has no layer that looks back any more; there is nothing left to prune")
    closed = sorted(layer for layer, share in opened.items() if 1 - share >= min_closed)
    if not closed:
        layer = min(opened, key=opened.__getitem__)
        raise UserError(
            f"no layer's gate is closed for {min_closed:.0%} of the tokens: the most closed is layer {layer} with "
            f"{1 - opened[layer]:.1%}; lower --min-closed or raise model.attention.gate_threshold"
        )
    for layer in closed:  # a gate that never opens is the same as no second look
        router = built.decoder.layers[layer].router
        assert isinstance(router, Router)
        router.threshold = NEVER
    after = measure(built, model, reader)
    per_layer = 2 * (model.num_kv_heads or model.num_heads) * head_dim(model) * torch.bfloat16.itemsize
    return Pruned(
        open_fraction=opened,
        closed_layers=sorted({*model.attention.closed_layers, *closed}),
        tokens=before.tokens,
        loss_before=before.loss,
        loss_after=after.loss,
        bytes_before=per_layer * len(opened),
        bytes_after=per_layer * (len(opened) - len(closed)),
        window_bytes=per_layer * model.num_layers * model.attention.window,
    )
