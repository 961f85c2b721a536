"""Changes to a trained model on the command line: what `eval`, `generate`, `export` and `prune` take as key=value.

Imports neither torch nor megatron-core, so that a misspelt key is refused in a blink.
"""

from pathlib import Path

from recipes.errors import UserError
from recipes.kinds import KINDS
from recipes.load import RecipeError, check_model, override_model, read_model
from recipes.schema import ModelConfig

SHARDS = "data.shards="


def split_shards(overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """The value of `data.shards=` among overrides, and the others."""
    named = [override.removeprefix(SHARDS) for override in overrides or [] if override.startswith(SHARDS)]
    return (named[-1] if named else None), [other for other in overrides or [] if not other.startswith(SHARDS)]


def changed_model(model: ModelConfig, overrides: list[str], *, length: bool = False) -> ModelConfig:
    """A copy of a trained model's section with `model.key=value` overrides.

    Args:
        length: whether `model.seq_length` may be set too, beside keys of the attention.

    Raises:
        RecipeError: an unknown or impossible value, or a key on which nothing of such a model depends.
    """
    changed = override_model(model, overrides)
    kind = changed.attention.kind
    check_model(changed)
    attention = KINDS[kind].changeable_keys
    known = {f"model.attention.{key}" for key in attention} | ({"model.seq_length"} if length else set())
    for override in overrides:
        if override.partition("=")[0] not in known:
            raise RecipeError(
                f"{override} cannot be set: a trained {kind} model does not depend on it here, or its weights fix it; "
                f"what can be: {'model.seq_length and ' * length}model.attention.{{{', '.join(attention)}}}"
            )
    return changed


def check_changes(run: Path, overrides: list[str] | None, *, length: bool = False, shards: bool = False) -> None:
    """`changed_model` on the recipe of a run, or of one of its checkpoints, before anything is imported for it.

    Args:
        shards: whether `data.shards=FOLDER` may be among the overrides.

    Raises:
        UserError: no recipe there, or what `changed_model` raises.
    """
    places = [home / "recipe.yaml" for home in (run, run.parent.parent)]
    recipe = next((place for place in places if place.exists()), None)
    if recipe is None:
        raise UserError(f"{places[0]} does not exist; name a run directory or one of its step folders")
    changed_model(read_model(recipe), split_shards(overrides)[1] if shards else overrides or [], length=length)
