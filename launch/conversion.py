"""What `longpitch convert` does: Hugging Face models in and out, and smaller models out of trained ones.

A conversion fills a new folder beside its target and renames it at the end: what exists is whole, and nothing is ever
written over.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from launch.overrides import changed_model
from launch.run_directory import find_tokenizer, model_of
from launch.tokenizers import open_fitting_tokenizer
from launch.train import model_facts
from megatron_ext import checkpoint
from megatron_ext.hugging_face.config import model_section, read_config
from megatron_ext.hugging_face.exporter import export_weights, write_surroundings
from megatron_ext.hugging_face.importer import Importer
from megatron_ext.hugging_face.tokenizer import copy_tokenizer
from megatron_ext.model import weight_shapes
from megatron_ext.parallel.layout import init_layout, leave_layout
from megatron_ext.weights import SHARD_BYTES, ShardWriter, StoredWeights, new_folder
from recipes.kinds import ATTENTION_KINDS
from recipes.load import RecipeError, check_model, override_model, resolved
from recipes.schema import ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# what an import may set; everything else is as the weights are
SETTABLE = ("vocab_size", "seq_length", "init_std", "attention")


def import_model(source: Path, out: Path, kind: str, overrides: list[str], *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a Hugging Face model as a run directory that holds weights only.

    Args:
        source: folder with config.json, safetensors and tokenizer files.
        out: run directory to make: recipe.yaml, tokenizer/, checkpoints/step_0.
        kind: the attention of the new model.
        overrides: `model.key=value`, of the keys in SETTABLE.
        shard_bytes: weights are written in files of at most so many bytes.

    Raises:
        UserError: the source is incomplete or asks for what our layers do not compute, or `out` exists.
    """
    if kind not in ATTENTION_KINDS:
        raise RecipeError(f"--attention {kind} is not one of {', '.join(ATTENTION_KINDS)}")
    model = _imported_section(source, kind, overrides)
    weights = StoredWeights(source)
    with new_folder(out) as folder, one_process():
        importer = Importer(weights, model, weight_shapes(model))
        copy_tokenizer(source, folder / "tokenizer")
        open_fitting_tokenizer(folder / "tokenizer", model)
        write_recipe(folder, out.absolute(), model, f"weights and tokenizer of {source}")
        facts = {"model": model_facts(model), "source": str(source)}
        step = folder / "checkpoints" / "step_0"
        checkpoint.save_weights(step, show_progress(importer, "import"), facts, shard_bytes=shard_bytes)
    return out


def _imported_section(source: Path, kind: str, overrides: list[str]) -> ModelConfig:
    path = source / "config.json"
    found = model_section(read_config(source), path, kind)
    model = override_model(found, overrides)
    for field in fields(ModelConfig):
        if field.name not in SETTABLE and getattr(model, field.name) != getattr(found, field.name):
            raise RecipeError(
                f"model.{field.name}={getattr(model, field.name)}: the weights fix it to "
                f"{getattr(found, field.name)}; an import can set {', '.join(SETTABLE)}"
            )
    if model.vocab_size < found.vocab_size:
        raise RecipeError(f"model.vocab_size={model.vocab_size}: {path} has {found.vocab_size} rows, none can be left")
    if model.vocab_size > found.token_rows:
        model.vocab_tokens = found.token_rows
    check_model(model)
    return model


def export_model(
    run: Path,
    out: Path,
    *,
    dtype: str = "stored",
    max_positions: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    overrides: list[str] | None = None,
) -> Path:
    """Write the newest checkpoint of a run (or the one that `run` names) as a Hugging Face folder.

    Args:
        dtype: fp32, bf16, or "stored" for what the checkpoint holds (fp32 after ZeRO 1-3).
        max_positions: tokens, for config.json; None takes the recipe's seq_length.
        shard_bytes: weights are split into files of at most so many bytes.
        overrides: `model.seq_length` and `model.attention.key=value`, such as another gate_threshold.

    Raises:
        UserError: transformers has nothing that computes this model, the checkpoint does not fit its recipe, or `out`
            exists.
    """
    if dtype not in ("stored", *DTYPES):
        raise RecipeError(f"--dtype {dtype} is not one of stored, {', '.join(DTYPES)}")
    step = checkpoint.find(run)
    home = step.parent.parent
    model, tokenizer = changed_model(model_of(home), overrides or [], length=True), find_tokenizer(home)
    opened = open_fitting_tokenizer(tokenizer, model)
    weights = checkpoint.stored_weights(step)
    with new_folder(out) as folder, one_process():
        shapes = weight_shapes(model)
        wanted = DTYPES.get(dtype)
        layout = checkpoint.read_facts(step)["layout"]
        if wanted is None and not layout.get("weights_only") and layout["zero_stage"] > 0:
            wanted = torch.float32  # what ZeRO trained is stored so, and what was frozen beside it may not be
        kept = wanted or weights[next(iter(shapes))].dtype
        positions = max_positions or model.seq_length
        named = str(kept).removeprefix("torch.")
        write_surroundings(folder, model, tokenizer, opened, dtype=named, max_positions=positions)
        writer = ShardWriter(folder, shard_bytes=shard_bytes)
        export_weights(
            weights, model, shapes, writer, dtype=wanted, progress=lambda names: show_progress(names, "export")
        )
    return out


def write_recipe(folder: Path, final: Path, model: ModelConfig, origin: str, **data: str) -> None:
    """A recipe that names this model: `generate` reads it, and a training recipe takes it as its base.

    Args:
        folder: where it is written. final: what that folder will be called.
        origin: where the weights come from, in words.
        data: keys of the data section beside the tokenizer.
    """
    section = resolved(replace(model, init_from=str(final)))
    recipe = OmegaConf.create({"model": section, "data": {"tokenizer": str(final / "tokenizer"), **data}})
    head = f"# The model made by `longpitch convert`: {origin}.\n# Use it as `base:` of a training recipe.\n"
    (folder / "recipe.yaml").write_text(head + OmegaConf.to_yaml(recipe))


@contextmanager
def one_process(device: str = "cpu") -> Iterator[None]:
    """megatron-core builds no layer, not even without memory, outside its groups."""
    init_layout(tensor=1, context=1, device=device, timeout_seconds=60.0)
    try:
        yield
    finally:
        leave_layout()


def show_progress(items: Iterable, what: str) -> Iterable:
    """`items`, with a line that says how many are done and how long the rest takes, if it takes seconds."""
    return tqdm(items, desc=what, delay=2.0)
