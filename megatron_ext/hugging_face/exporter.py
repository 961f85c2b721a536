"""A checkpoint of ours as a Hugging Face folder: config.json, safetensors, tokenizer files; one tensor at a time."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ext.hugging_face import names
from megatron_ext.hugging_face.config import MODELING, export_config
from megatron_ext.hugging_face.tokenizer import (
    complete_config,
    copy_tokenizer,
    special_tokens,
    write_generation_config,
)
from megatron_ext.weights import ShardWriter, WeightsError, some
from recipes.kinds import KINDS
from recipes.schema import ModelConfig


def export_weights(
    weights: Mapping[str, torch.Tensor],
    model: ModelConfig,
    shapes: Mapping[str, torch.Size],
    writer: ShardWriter,
    *,
    dtype: torch.dtype | None,
    progress: Callable[[Iterable], Iterable] = iter,
) -> None:
    """Write `weights`, whose names and shapes must be `shapes`, under Hugging Face's names, without padding rows.

    Args:
        dtype: what to convert to; None keeps each tensor's own.
        progress: wraps the list of names, to show how far it is.

    Raises:
        WeightsError: weights that are missing, left over, or of another shape, by name.
    """
    _check(weights, shapes, model)
    heads = names.heads_of(model)
    for name in progress([name for name in shapes if not name.endswith(names.CONSTANTS)]):
        tensor = weights[name] if name in weights else _start_value(name, shapes[name], model)
        if tensor.shape != shapes[name]:
            raise WeightsError(f"{name} is {list(tensor.shape)} instead of {list(shapes[name])}; check the recipe")
        if name in names.VOCABULARY:
            tensor = tensor[: model.token_rows]
        for part, piece in names.split(name, tensor, heads).items():
            writer.add(part, _own_memory(piece.to(dtype or piece.dtype)))
    writer.close()


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that keeps nothing but itself alive."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _start_value(name: str, shape: torch.Size, model: ModelConfig) -> torch.Tensor:
    """What FreeSolo's alpha or gain starts as, for an import that was never trained."""
    return torch.full(shape, model.attention.alpha_init if name.endswith(".alpha") else 1.0)


def _check(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], model: ModelConfig) -> None:
    missing = [name for name in shapes if name not in weights]
    missing = [name for name in missing if not name.endswith((*names.START_VALUES, *names.CONSTANTS))]
    left = [name for name in weights if name not in shapes]
    if missing:
        raise WeightsError(f"the checkpoint lacks {some(missing)}; is its recipe.yaml that of these weights?")
    if left:
        raise WeightsError(f"the checkpoint holds {some(left)}, which its recipe's model has no place for")
    for name in shapes:
        if name.endswith(names.CONSTANTS) and name in weights:
            constant = getattr(model.attention, name.rpartition(".")[2])
            if (weights[name] != constant).any():
                raise WeightsError(f"{name} is {weights[name][0].item()}, and {constant} in the recipe; set it back")


def write_surroundings(
    folder: Path, model: ModelConfig, source: Path, tokenizer: Any, *, dtype: str, max_positions: int
) -> None:
    """config.json, generation_config.json and tokenizer files beside the weights; for L2A the modeling file too.

    Args:
        source: folder of the tokenizer's files. tokenizer: what was opened there.
        dtype, max_positions: see `export_config`.
    """
    copy_tokenizer(source, folder)
    complete_config(folder, tokenizer)
    tokens = special_tokens(folder, tokenizer)
    config = export_config(model, dtype=dtype, max_positions=max_positions, token_ids=tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_generation_config(folder, tokens)
    if KINDS[model.attention.kind].export == "modeling":
        shutil.copyfile(Path(__file__).with_name(f"{MODELING}.py"), folder / f"{MODELING}.py")
