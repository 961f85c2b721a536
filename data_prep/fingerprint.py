"""Hashes that tell whether shards, an index or a tokenizer are still the ones they were."""

import hashlib
import json
from pathlib import Path

import xxhash

CHUNK = 1 << 22  # bytes read at a time


def file_hash(path: Path) -> str:
    """xxh64 of a file, as the shards' index states it."""
    digest = xxhash.xxh64()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tokenizer_hash(folder: Path) -> str:
    """sha256 of what decides the ids of a saved tokenizer: tokenizer.json in canonical form, and the EOS token."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    eos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    for per_call_setting in ("truncation", "padding"):
        content.pop(per_call_setting, None)
    eos = eos.get("content") if isinstance(eos, dict) else eos
    canonical = json.dumps([content, eos], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
