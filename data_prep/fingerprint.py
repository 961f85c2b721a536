"""Hashes that tell whether shards, an index or a tokenizer are still the ones they were."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 1 << 22  # bytes read at a time
CONFIG = "tokenizer_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def file_hash(path: Path) -> str:
    """xxh64 of a file, as the shards' index states it."""
    digest = xxhash.xxh64()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """sha256 of what decides the ids of a saved tokenizer, its EOS and its BOS.

    A SentencePiece model counts as its file; any other as its tokenizer.json in canonical form.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ends = [_content(config.get(name)) for name in ("eos_token", "bos_token")]
    if (folder / "tokenizer.model").is_file():
        content: Any = hashlib.sha256((folder / "tokenizer.model").read_bytes()).hexdigest()
    else:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        for per_call_setting in ("truncation", "padding"):
            content.pop(per_call_setting, None)
    canonical = json.dumps([content, *ends], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def tokenizer_files_hash(tokenizer: str | Path) -> str | None:
    """sha256 of what `data.tokenizer` names, as it lies there; None where nothing does.

    Vocabularies count as their bytes; of the config beside them only what decides EOS and BOS, not the chat template.
    A folder and the tokenizer.json in it are one tokenizer.
    """
    path = Path(tokenizer).expanduser()
    names = VOCABULARIES if path.is_dir() or path.name in VOCABULARIES else (path.name,)
    folder = path if path.is_dir() else path.parent
    digests = [
        [name, hashlib.sha256((folder / name).read_bytes()).hexdigest()] for name in names if (folder / name).is_file()
    ]
    if not digests:
        return None
    config: dict[str, Any] = {}
    if (folder / CONFIG).is_file():
        with contextlib.suppress(ValueError):  # whoever loads the tokenizer says what is wrong with it
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ends = [_content(config.get(name)) for name in ("eos_token", "bos_token", "add_bos_token")]
    return hashlib.sha256(json.dumps([digests, ends]).encode()).hexdigest()


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def manifest_hash(manifest: dict[str, Any]) -> str:
    """sha256 of a manifest without its own hash."""
    content = {key: value for key, value in manifest.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
