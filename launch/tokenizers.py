"""The tokenizer of an import or a run, opened by the same code that prepares shards, and held against the model."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data_prep.tokenizer import open_tokenizer, vocabulary_size
from recipes.errors import UserError
from recipes.schema import ModelConfig


def open_fitting_tokenizer(folder: Path, model: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, of which every token has a row in the model's embedding.

    Raises:
        UserError: it cannot be loaded, or has tokens beyond the rows.
    """
    tokenizer = open_tokenizer(folder)
    entries, rows = vocabulary_size(tokenizer), model.token_rows
    if entries > rows:
        last = tokenizer.convert_ids_to_tokens(entries - 1)
        raise UserError(
            f"the tokenizer {folder} has {entries} entries, the last is {last!r}, but the model has {rows} rows of "
            "tokens; take the tokenizer that the model was trained with, or remove the tokens that were added to it"
        )
    return tokenizer
