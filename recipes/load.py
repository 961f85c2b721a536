"""Reads a recipe: its `base:` files, itself and the overrides, merged into the typed schema and checked."""

import io
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from kernels.limits import CELL_SIZES, MAX_HEAD_DIM, MAX_TOP_K
from recipes.bounds import complaints
from recipes.errors import UserError
from recipes.kinds import ATTENTION_KINDS, EVERYTHING, KINDS, kinds_with
from recipes.paths import expand_home, expand_paths
from recipes.plain_text import kind_of, quote_text
from recipes.schema import (
    BACKENDS,
    BAD_DOCUMENT_POLICIES,
    DEVICES,
    PACKINGS,
    PENALTY_NORMS,
    PRECISIONS,
    SOURCE_FORMATS,
    AttentionConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)

ENVIRONMENT = ("DATA_ROOT", "MODEL_ROOT")  # variables that any recipe may read
MORE_ENVIRONMENT = "LONGPITCH_ENV"  # names further ones, with commas between them


class RecipeError(UserError):
    """A recipe that cannot be run; the message names the key and the way out. The command line exits with 2."""


def _from_environment(name: str, *default: str | None) -> str | None:
    """`${oc.env:NAME,default}` of a recipe, which may be somebody else's: a URL in it could carry any variable away."""
    allowed = [*ENVIRONMENT, *os.environ.get(MORE_ENVIRONMENT, "").replace(",", " ").split()]
    if name not in allowed:
        raise RecipeError(
            f"${{oc.env:{name}}} is none of the environment variables that a recipe may read ({', '.join(allowed)}); "
            f"write the value out, or allow it by {MORE_ENVIRONMENT}={name} in the environment"
        )
    return oc.env(name, *default)


OmegaConf.register_resolver("oc.env", _from_environment, replace=True)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Load, merge and check a recipe.

    Args:
        path: the YAML file; its optional `base:` names another one, relative to it, that it changes.
        overrides: `key=value` pairs, dotted keys, the last word.

    Raises:
        RecipeError: unreadable file, unknown key (with the nearest known one), wrong type, missing or impossible value.
    """
    try:
        layers = [*_layers(Path(path).expanduser(), []), _parse(overrides or [])]
        merged = _merged(Recipe, *layers)
        _drop_unused_keys(merged, layers)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise RecipeError(f"{path}: no value for {', '.join(missing)}; set each in the recipe, or as key=value")
        recipe = _made(merged)
        expand_paths(recipe)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path}: {_one_sentence(error)}") from error
    except RecipeError:
        raise
    except UserError as error:
        raise RecipeError(f"{path}: {error}") from error
    check_recipe(recipe)
    return recipe


def _merged(schema: Any, *layers: Any) -> Any:
    """The layers merged into a dataclass, whose keys and types then hold; omegaconf declares any container."""
    return OmegaConf.merge(OmegaConf.structured(schema), *layers)


def _made(merged: Any) -> Any:
    """The dataclass that a merge into one describes."""
    return OmegaConf.to_object(merged)


def save_recipe(recipe: Recipe, path: Path, **about_run: object) -> None:
    """Write the resolved recipe with facts about the run (versions, git state) as comments on top."""
    facts = [f"{name}: {value}" for name, value in about_run.items()]
    head = "".join(f"# {line}\n" for fact in facts for line in fact.splitlines())
    path.write_text(head + OmegaConf.to_yaml(OmegaConf.create(resolved(recipe))))


def _layers(path: Path, seen: list[Path]) -> list:
    """The recipe's files from the outermost base to itself."""
    path = path.resolve()
    if path in seen:
        raise RecipeError(f"{path}: base files lead in a circle; remove one 'base:' line")
    try:
        layer = _read(path)
    except FileNotFoundError as error:
        if seen:
            raise RecipeError(
                f"{seen[-1]}: its base {path} does not exist; base is relative to the folder of that recipe"
            ) from error
        raise RecipeError(f"{path}: no such recipe; `ls recipes` shows those that ship with Longpitch") from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a readable YAML file ({_one_line(error)})") from error
    base = layer.pop("base", None)
    if not (base is None or isinstance(base, str)):
        raise RecipeError(f"{path}: base is {base}, which is not the path of a recipe")
    return [*(_layers(path.parent / expand_home(base, "base"), [*seen, path]) if base else []), layer]


def _read(path: Path) -> DictConfig:
    """One YAML file; keys of text keep what is written there."""
    try:
        read = OmegaConf.load(io.StringIO(quote_text(path.read_text(encoding="utf-8"), Recipe)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise RecipeError(f"{path}: not a readable YAML file ({_one_line(error)})") from error
    if not isinstance(read, DictConfig):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, this file holds something else")
    return read


def _drop_unused_keys(merged: DictConfig, layers: list[DictConfig]) -> None:
    """Put keys that the attention's kind does not use back to their defaults.

    Those that a base gives may be of its own kind, which a later layer changed.

    Raises:
        RecipeError: such a key stands beside the `kind` that does not use it, or later.
    """
    kind = KINDS.get(merged.model.attention.kind)
    if kind is None:
        return  # refused by name afterwards
    given = [_attention_keys(layer) for layer in layers]
    chosen = max((number for number, keys in enumerate(given) if "kind" in keys), default=0)
    known = AttentionConfig.__dataclass_fields__.keys()
    for number, keys in enumerate(given):
        for key in sorted((keys & known) - kind.keys):
            if number >= chosen:
                raise RecipeError(
                    f"model.attention.{key}: attention kind {merged.model.attention.kind} does not use it; remove it "
                    f"(kinds that do: {', '.join(kinds_with(lambda one, key=key: key in one.keys))})"
                )
            merged.model.attention[key] = getattr(AttentionConfig(), key)


def _attention_keys(layer: DictConfig) -> set[str]:
    attention = OmegaConf.select(layer, "model.attention")
    return set(attention) if OmegaConf.is_dict(attention) else set()


def resolved(section: Recipe | ModelConfig) -> dict[str, Any]:
    """A recipe, or its model section, as plain values, without the attention's keys that its kind does not use."""
    values = asdict(section)
    attention = (values["model"] if isinstance(section, Recipe) else values)["attention"]
    for key in attention.keys() - KINDS[attention["kind"]].keys:
        del attention[key]
    return values


def _parse(overrides: list[str]):
    for override in overrides:
        if "=" not in override or override.startswith(("=", "-")):
            raise RecipeError(f"override {override!r} is not of the form key=value, for example train.lr=1e-4")
    try:
        return OmegaConf.from_dotlist([_quoted(override) for override in overrides])
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise RecipeError(f"overrides {' '.join(overrides)}: {_one_line(error)}") from error


def _quoted(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{key}={quote_text(value, kind_of(key, Recipe))}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _one_sentence(error: OmegaConfBaseException) -> str:
    """omegaconf's message with the full key in front, without its trailer about internal types."""
    key = getattr(error, "full_key", None)
    message = str(error).split("\n    full_key:")[0].strip().replace("\n", " ")
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message).strip('"')  # a KeyError's quotes
    return f"{key}: {message}" if key else message


def check_recipe(recipe: Recipe) -> None:
    """Raise RecipeError for values that the types allow and the model, the layout or the optimisation does not."""
    for check in (_check_choices, _check_values, _check_model, _check_parallel, _check_train, _check_data):
        check(recipe)
    check_kernels(recipe.model, on_gpu=recipe.train.device == "cuda", context=recipe.parallel.context)


def check_model(model: ModelConfig) -> None:
    """`check_recipe` of a model section that belongs to no training run yet."""
    train = TrainConfig(steps=1, tokens_per_step=model.seq_length, lr=0.0, min_lr=0.0)
    check_recipe(Recipe(run_dir="none", model=model, data=DataConfig(shards="none"), train=train))


def override_model(model: ModelConfig, overrides: list[str]) -> ModelConfig:
    """A copy of a model section with `model.key=value` overrides.

    Raises:
        RecipeError: a key of another section, an unknown one, or a value of the wrong type.
    """
    for override in overrides:
        if not override.startswith("model."):
            raise RecipeError(f"override {override!r}: only keys of the model section can be set here")
    try:
        changes = _parse(overrides)
        merged = _merged(Recipe(model=model), changes)
        _drop_unused_keys(merged, [OmegaConf.create({"model": resolved(model)}), changes])
        return _made(merged.model)
    except OmegaConfBaseException as error:
        raise RecipeError(_one_sentence(error)) from error


def read_model(path: Path) -> ModelConfig:
    """The model section of a resolved recipe, whatever else the file holds or lacks.

    Raises:
        RecipeError: it cannot be read, or is of another version.
    """
    try:
        return _made(_merged(ModelConfig, _read(path).model))
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path}: model.{_one_sentence(error)}") from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise RecipeError(f"{path}: no model section can be read there ({_one_line(error)})") from error


def read_value(path: Path, key: str) -> Any:
    """What a resolved recipe says of one key, None where it lacks it, whatever else the file holds.

    Raises:
        RecipeError: it cannot be read.
    """
    try:
        return OmegaConf.select(_read(path), key)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path}: {_one_sentence(error)}") from error
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a readable YAML file ({_one_line(error)})") from error


def _refuse(key: str, value: object, reason: str) -> None:
    raise RecipeError(f"{key} = {value}: {reason}")


def _check_choices(recipe: Recipe) -> None:
    choices = (
        ("model.attention.kind", recipe.model.attention.kind, ATTENTION_KINDS),
        ("model.attention.backend", recipe.model.attention.backend, BACKENDS),
        ("train.gate_penalty_per", recipe.train.gate_penalty_per, PENALTY_NORMS),
        ("train.precision", recipe.train.precision, PRECISIONS),
        ("train.device", recipe.train.device, DEVICES),
        ("data.bad_documents", recipe.data.bad_documents, BAD_DOCUMENT_POLICIES),
        ("data.packing", recipe.data.packing, PACKINGS),
        *(("data.sources.format", source.format, SOURCE_FORMATS) for source in recipe.data.sources),
        ("parallel.zero_stage", recipe.parallel.zero_stage, (0, 1, 2, 3)),
    )
    for key, value, allowed in choices:
        if value not in allowed:
            _refuse(key, value, f"must be one of {', '.join(map(str, allowed))}")


def _check_values(recipe: Recipe) -> None:
    for complaint in complaints(recipe):
        _refuse(*complaint)


def _check_model(recipe: Recipe) -> None:
    model, attention = recipe.model, recipe.model.attention
    if model.head_dim is None and model.hidden_size % model.num_heads:
        _refuse("model.hidden_size", model.hidden_size, f"is not divisible by model.num_heads {model.num_heads}")
    width = model.head_dim or model.hidden_size // model.num_heads
    if width % 2 or width < 2:
        _refuse("model.head_dim", width, "must be even, for rotary positions, and above 0")
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        _refuse("model.num_heads", model.num_heads, f"is not a multiple of model.num_kv_heads {model.num_kv_heads}")
    if model.token_rows > model.vocab_size:
        _refuse("model.vocab_tokens", model.vocab_tokens, f"must be 1 to model.vocab_size {model.vocab_size}")
    if attention.closed_layers:
        _check_closed_layers(model)
    reads_cells = KINDS[attention.kind].reads_cells
    if reads_cells and attention.query_block % attention.cell_size:
        _refuse(
            "model.attention.query_block",
            attention.query_block,
            f"is not a multiple of cell_size {attention.cell_size}",
        )
    if reads_cells and model.seq_length < attention.query_block:
        _refuse(
            "model.seq_length",
            model.seq_length,
            f"is shorter than one query block of {attention.query_block}, so no query could ever read a cell",
        )


def check_kernels(model: ModelConfig, *, on_gpu: bool, context: int = 1) -> None:
    """Raise RecipeError for sizes that the Triton kernels do not take, where the attention would run by them.

    Args:
        on_gpu: whether the model runs on a GPU; False where nobody knows yet, who must ask again.
        context: ranks that share a sequence.
    """
    attention, kind = model.attention, KINDS[model.attention.kind]
    if not (attention.backend == "triton" or (attention.backend == "auto" and on_gpu)):
        return
    # whole sequences of a dense model are torch's own to attend
    by_torch = kind.reads == (EVERYTHING,) and context == 1 and not attention.document_mask
    width = model.head_dim or model.hidden_size // model.num_heads
    way_out = "the Triton kernels take {}; change it, or set model.attention.backend=reference"
    if width > MAX_HEAD_DIM and not (by_torch and attention.backend == "auto"):
        _refuse("model.head_dim", width, way_out.format(f"at most {MAX_HEAD_DIM}"))
    if kind.reads_cells and attention.cell_size not in CELL_SIZES:
        sizes = ", ".join(map(str, CELL_SIZES))
        _refuse("model.attention.cell_size", attention.cell_size, way_out.format(f"one of {sizes}"))
    if kind.reads_cells and attention.top_k > MAX_TOP_K:
        _refuse("model.attention.top_k", attention.top_k, way_out.format(f"at most {MAX_TOP_K}"))


def _check_closed_layers(model: ModelConfig) -> None:
    layers = model.attention.closed_layers
    if len(set(layers)) != len(layers) or not all(0 <= layer < model.num_layers for layer in layers):
        _refuse("model.attention.closed_layers", layers, f"must name layers of 0 to {model.num_layers - 1}, each once")


def _check_parallel(recipe: Recipe) -> None:
    model, tensor = recipe.model, recipe.parallel.tensor
    for key in ("num_heads", "num_kv_heads", "vocab_size"):
        value = getattr(model, key)
        if value is not None and value % tensor:
            _refuse(f"model.{key}", value, f"is not divisible by parallel.tensor {tensor}")


def _check_train(recipe: Recipe) -> None:
    train = recipe.train
    if train.tokens_per_step % recipe.model.seq_length:
        _refuse(
            "train.tokens_per_step",
            train.tokens_per_step,
            f"is not a multiple of model.seq_length {recipe.model.seq_length}; take "
            f"{_nearest_multiple(train.tokens_per_step, recipe.model.seq_length)}",
        )
    if train.warmup_steps >= train.steps > 1:
        _refuse("train.warmup_steps", train.warmup_steps, f"leaves nothing of train.steps {train.steps}")
    if not 0 <= train.min_lr <= train.lr:
        _refuse("train.min_lr", train.min_lr, f"must lie between 0 and train.lr {train.lr}")


def _check_data(recipe: Recipe) -> None:
    for number, source in enumerate(recipe.data.sources):
        if source.max_chars is not None and source.max_chars < source.min_chars:
            _refuse(f"data.sources[{number}].max_chars", source.max_chars, f"is below its min_chars {source.min_chars}")
    for number, part in enumerate(recipe.data.mixture):
        if part.max_tokens is not None and part.max_tokens <= part.min_tokens:
            _refuse(
                f"data.mixture[{number}].max_tokens", part.max_tokens, f"is not above its min_tokens {part.min_tokens}"
            )


def _nearest_multiple(number: int, factor: int) -> int:
    """The multiple of `factor`, above 0, that is closest to `number`."""
    return max(1, round(number / factor)) * factor


def check_world(parallel: ParallelConfig, world: int) -> None:
    """Raise RecipeError when the layout does not divide the `world` processes that were started."""
    block = parallel.tensor * parallel.context
    if world % block:
        raise RecipeError(
            f"parallel.tensor {parallel.tensor} x parallel.context {parallel.context} = {block} does not divide "
            f"the {world} processes started; change one of the three"
        )


def accumulation_steps(recipe: Recipe, data_ranks: int) -> int:
    """Micro-batches per step and data-parallel rank.

    Raises:
        RecipeError: the global batch does not divide into micro-batches over `data_ranks`.
    """
    sequences = recipe.train.tokens_per_step // recipe.model.seq_length
    per_round = recipe.train.micro_batch * data_ranks
    if sequences % per_round:
        _refuse(
            "train.tokens_per_step",
            recipe.train.tokens_per_step,
            f"is {sequences} sequences, which {data_ranks} data-parallel ranks x train.micro_batch "
            f"{recipe.train.micro_batch} do not divide; change micro_batch, or take "
            f"{_nearest_multiple(recipe.train.tokens_per_step, per_round * recipe.model.seq_length)} tokens",
        )
    return sequences // per_round
