"""Paths of a recipe, one rule for all of them: a leading `~` is a home directory, wherever the path is used."""

import os

from recipes.errors import UserError
from recipes.schema import Recipe


def expand_home(path: str, key: str) -> str:
    """`path` with its leading ~ or ~name replaced by that home directory; a URL has none.

    Args:
        key: of the recipe, for the message.

    Raises:
        UserError: no such home is known.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(
            f"{key} is {path}, but no such home directory is known; write the path out, or begin it with ./"
        )
    return expanded


def expand_paths(recipe: Recipe) -> None:
    """Expand every path that a recipe holds, in place.

    Raises:
        UserError: a home directory is not known.
    """
    data = recipe.data
    unnamed = {source.path for source in data.sources if source.name is None}
    for part in data.mixture:
        if part.source in unnamed:  # a source without a name goes by its path
            part.source = expand_home(part.source, "data.mixture.source")
    places = [
        (recipe, "run_dir", "run_dir"),
        (recipe.model, "init_from", "model.init_from"),
        (data, "shards", "data.shards"),
        (data, "tokenizer", "data.tokenizer"),
        (data, "cache", "data.cache"),
        *((source, "path", "data.sources.path") for source in data.sources),
        *((stream, "shards", "data.streams.shards") for stream in data.streams),
    ]
    for section, name, key in places:
        value = getattr(section, name)
        if value is not None:
            setattr(section, name, expand_home(value, key))
