"""The tokenizer files that travel with a model, and the special tokens that its config must name."""

import json
import shutil
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.files import check_whole, read_json

VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # at least one makes a tokenizer
CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
FILES = (
    *VOCABULARIES,
    "merges.txt",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)
GENERAL = "PreTrainedTokenizerFast"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy every tokenizer file of `source`, and its generation_config.json.

    Raises:
        UserError: `source` holds no tokenizer, or a file of it is empty, a Git LFS pointer or damaged.
    """
    if not has_tokenizer(source):
        raise UserError(f"{source} holds no tokenizer ({', '.join(VOCABULARIES)}); put its tokenizer.json there")
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            read_json(source / name) if name.endswith(".json") else check_whole(source / name)
            shutil.copyfile(source / name, target / name)


def special_tokens(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """bos_token_id and the like: as generation_config.json names them, else as the opened `tokenizer` does."""
    path = folder / GENERATION
    named = read_json(path) if path.is_file() else {}
    if "eos_token_id" not in named:
        named = {name: getattr(tokenizer, name) for name in TOKENS} | named
    return {name: named[name] for name in TOKENS if named.get(name) is not None}


def complete_config(folder: Path, tokenizer: Any) -> None:
    """Make tokenizer_config.json say what every version of transformers needs to load what `tokenizer` is.

    A tokenizer that is of no special class here is named by the general one, which version 5 has too; and where the
    config leaves open what it returns, that is what our models take: the general class would add token_type_ids, over
    which `model.generate(**tokenizer(text))` stumbles.
    """
    if type(tokenizer).__name__ != GENERAL:
        return
    path = folder / CONFIG
    config = read_json(path) if path.is_file() else {"eos_token": tokenizer.eos_token}
    config.pop("backend", None)  # of version 5, whose list of extra tokens is version 4's additional ones
    if isinstance(config.get("extra_special_tokens"), list):
        del config["extra_special_tokens"]
        config["additional_special_tokens"] = list(tokenizer.additional_special_tokens)
    config |= {"tokenizer_class": GENERAL, "add_prefix_space": tokenizer.add_prefix_space}
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def write_generation_config(folder: Path, tokens: dict[str, Any]) -> None:
    """Complete or write the generation_config.json of an exported model."""
    path = folder / GENERATION
    named = read_json(path) if path.is_file() else {}
    # without the mark that lets transformers replace the file by what it guesses from config.json
    named = {key: value for key, value in named.items() if key not in ("_from_model_config", "transformers_version")}
    path.write_text(json.dumps(tokens | named, indent=1))
