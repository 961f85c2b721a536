"""The tokenizer files that travel with a model, and the special tokens that its config must name."""

import json
import shutil
from pathlib import Path
from typing import Any

from recipes.errors import UserError

VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # at least one makes a tokenizer
FILES = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
GENERAL_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")  # of transformers 4 and 5
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy every tokenizer file of `source`, and its generation_config.json.

    Raises:
        UserError: `source` holds no tokenizer.
    """
    if not has_tokenizer(source):
        raise UserError(f"{source} holds no tokenizer ({', '.join(VOCABULARIES)}); put its tokenizer.json there")
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def special_tokens(folder: Path) -> dict[str, Any]:
    """bos_token_id and the like: as generation_config.json names them, else as the tokenizer does."""
    path = folder / "generation_config.json"
    named = json.loads(path.read_text()) if path.is_file() else {}
    if "eos_token_id" not in named:
        from transformers import AutoTokenizer  # seconds of import, needed for trained-here tokenizers only

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        named = {name: getattr(tokenizer, name) for name in TOKENS} | named
    return {name: named[name] for name in TOKENS if named.get(name) is not None}


def name_model_inputs(folder: Path) -> None:
    """Make the tokenizer return what our models take, where its config leaves that open.

    transformers' general class would add token_type_ids, over which `model.generate(**tokenizer(text))` stumbles.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") in GENERAL_CLASSES and "model_input_names" not in config:
        config["model_input_names"] = ["input_ids", "attention_mask"]
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def write_generation_config(folder: Path, tokens: dict[str, Any]) -> None:
    """Complete or write the generation_config.json of an exported model."""
    path = folder / "generation_config.json"
    named = json.loads(path.read_text()) if path.is_file() else {}
    # without the mark that lets transformers replace the file by what it guesses from config.json
    named = {key: value for key, value in named.items() if key not in ("_from_model_config", "transformers_version")}
    path.write_text(json.dumps(tokens | named, indent=1))
