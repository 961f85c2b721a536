"""Held-out loss of a trained model, and how often its gates open, at the threshold it has or at another."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.guard import check_manifest, read_manifest
from data_prep.heldout import EvalReader
from launch.conversion import one_process, show_progress
from launch.overrides import changed_model, split_shards
from launch.run_directory import find_shards, model_of
from megatron_ext import checkpoint
from megatron_ext.model import LanguageModel, build_model, slice_context
from megatron_ext.parallel.layout import pick_device
from recipes.errors import UserError
from recipes.load import check_kernels
from recipes.schema import ModelConfig


@dataclass(frozen=True)
class Measured:
    """What a pass over held-out sequences finds."""

    loss: float  # nats per token
    tokens: int
    open_fraction: dict[int, float]  # layer (from 0) -> share of tokens whose gate is open, of the layers with a gate


def evaluate(run: Path, *, sequences: int, device: str = "auto", overrides: list[str] | None = None) -> Measured:
    """Measure the newest checkpoint of `run` (or the one it names) on the held-out shards of its recipe.

    Args:
        sequences: held-out sequences, at most.
        device: auto, cpu or cuda.
        overrides: `model.attention.key=value`, such as another gate_threshold, and `data.shards=FOLDER`, for an import.

    Raises:
        UserError: no complete checkpoint, no held-out shards, or overrides that do not fit the weights.
    """
    step = checkpoint.find(run)
    home = step.parent.parent
    named, changes = split_shards(overrides)
    model = changed_model(model_of(home), changes)
    _, reader = open_heldout(step, model, named, sequences)
    with one_process(device):
        return measure(load_for_measuring(model, step, device), model, reader)


def open_heldout(step: Path, model: ModelConfig, named: str | None, sequences: int) -> tuple[Path, EvalReader]:
    """The shards of a checkpoint's run, or those that are `named`, and a reader of up to so many held-out sequences.

    Raises:
        UserError: there are none, or another tokenizer made them.
    """
    home = step.parent.parent
    shards, own = find_shards(home, named), home / "tokenizer"
    check_manifest(
        shards,
        seq_length=read_manifest(shards)["seq_length"],
        vocab_size=model.token_rows,
        tokenizer=str(own) if own.is_dir() else None,
        expected_tokenizer=checkpoint.read_facts(step)["tokenizer"],
    )
    if "heldout" not in read_manifest(shards)["splits"]:
        raise UserError(
            f"{shards} has no held-out split to measure on; give data.shards=FOLDER of shards that were prepared with "
            "data.heldout_fraction above 0"
        )
    return shards, EvalReader(shards, micro_batch=1, max_sequences=sequences)


def load_for_measuring(model: ModelConfig, step: Path, device: str) -> LanguageModel:
    """The whole model on one device: bf16 on a GPU, fp32 on a CPU."""
    chosen = pick_device(device)
    check_kernels(model, on_gpu=chosen.type == "cuda")
    dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    built = build_model(model, dtype=dtype, fused=chosen.type == "cuda")
    checkpoint.load_weights(built, step, model)
    return built.eval().to(chosen, dtype)  # megatron-core builds norms in fp32


@torch.no_grad()
def measure(built: LanguageModel, model: ModelConfig, reader: EvalReader) -> Measured:
    """One pass over all sequences of `reader`."""
    device = next(built.parameters()).device
    opened: dict[int, torch.Tensor] = {}
    loss, weight = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
    for batch in show_progress(reader, "measure"):
        tokens, labels, weights, starts = (
            x.to(device) for x in (batch.tokens, batch.labels, batch.weights, batch.doc_starts)
        )
        context = slice_context(model, starts, start=0, length=tokens.shape[1], measure=True)
        loss += built(tokens, context, labels, weights).double()
        weight += weights.double().sum()
        for number, figure in context.measured.get("open_fraction", {}).items():
            opened[number - 1] = opened.get(number - 1, 0) + figure
    shares = {layer: (figure[0] / figure[1]).item() for layer, figure in sorted(opened.items())}
    return Measured((loss / weight).item(), reader.num_sequences * reader.seq_length, shares)
