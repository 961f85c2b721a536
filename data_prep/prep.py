"""Prepare a corpus: documents to tokens to shards, in one folder that appears only when it is complete.

    SHARDS/train/  SHARDS/heldout/   packed sequences (MDS)
    SHARDS/tokenizer/                the Hugging Face tokenizer that made them
    SHARDS/manifest.json             counts, hashes, settings and versions

The corpus is read twice, and a third time when a tokenizer is trained: first to count it, find documents that cannot
be used and place the border of the held-out split; last to write.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from data_prep.corpus import Document, SourceFile, find_files, read_documents
from data_prep.fingerprint import file_hash, tokenizer_hash
from data_prep.folder_lock import lock_folder
from data_prep.guard import read_manifest
from data_prep.shards import LARGEST_SHARD_MIB, SplitWriter
from data_prep.tokenizer import TextEncoder, load_tokenizer, train_tokenizer
from recipes.schema import DataConfig

TRAINING_TEXT = 64 << 20  # bytes of text that a tokenizer is trained on, at most
BATCH_TEXT = 4 << 20  # bytes of documents that are tokenized at a time
BATCH_DOCUMENTS = 1024
PACKAGES = ("mosaicml-streaming", "tokenizers", "transformers", "numpy")
HASH_END = 1 << 64  # document hashes are below this


@dataclass(frozen=True)
class Prepared:
    """A finished folder of shards."""

    folder: Path
    manifest: dict[str, Any]
    fresh: bool  # False: it was there already, with the same settings

    def __str__(self) -> str:
        """One line for the person who asked for it."""
        if not self.fresh:
            return f"{self.folder} is there with the same settings; nothing to do"
        documents = self.manifest["documents"]
        left_out = ", ".join(f"{count} {reason}" for reason, count in documents["skipped"].items()) or "none"
        return (
            f"{self.folder}: {documents['written']} of {documents['read']} documents (left out: {left_out}),"
            f" {self.manifest['tokens']} tokens, {self.manifest['sequences']} sequences"
        )


@dataclass(frozen=True)
class Survey:
    """What the first reading of the corpus found."""

    documents: int  # usable ones
    skipped: dict[str, int]  # the others, by reason
    text_bytes: int
    heldout_below: int  # documents with a smaller hash are held out


def prepare(data: DataConfig, *, seq_length: int, vocab_size: int, seed: int = 0) -> Prepared:
    """Write the shards that `data` describes to `data.shards`, unless they are there.

    Args:
        seq_length: tokens of a sequence.
        vocab_size: of the model; the tokenizer must fit.
        seed: of the split between training and held-out documents, which is by a hash of their text.

    Raises:
        FileNotFoundError, ValueError: a path, a document or a setting is unusable, or the folder holds other shards.
    """
    _check(data, seq_length)
    folder, settings = Path(data.shards).expanduser(), _settings(data, seq_length, seed)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        manifest = _finished(folder, settings)
        _check_vocabulary(manifest["vocab_size"], vocab_size)
        return Prepared(folder, manifest, fresh=False)

    files = find_files(data.sources)
    encoder = load_tokenizer(data.tokenizer) if data.tokenizer else None
    survey = _survey(files, data, seed)
    partial = folder.with_name(folder.name + ".partial")
    with lock_folder(partial):
        encoder = encoder or _train(files, data, survey, seed)
        _check_vocabulary(encoder.vocab_size, vocab_size)
        encoder.save(partial / "tokenizer")
        splits = _write_splits(partial, files, data, encoder, survey, seq_length, seed)
        manifest = _manifest(partial, settings, files, encoder, survey, splits)
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        os.rename(partial, folder)
    return Prepared(folder, manifest, fresh=True)


def _check(data: DataConfig, seq_length: int) -> None:
    if seq_length < 2:
        raise ValueError(f"model.seq_length is {seq_length}; a sequence needs at least 2 tokens")
    if not 0 <= data.heldout_fraction < 1:
        raise ValueError(f"data.heldout_fraction is {data.heldout_fraction}; give a number from 0 to below 1")
    if not 1 <= data.shard_mib <= LARGEST_SHARD_MIB:
        raise ValueError(f"data.shard_mib is {data.shard_mib}; give a number from 1 to {LARGEST_SHARD_MIB}")


def _settings(data: DataConfig, seq_length: int, seed: int) -> dict[str, Any]:
    """All that decides the bytes of the shards, besides the texts themselves."""
    settings: dict[str, Any] = {
        "sources": [asdict(source) for source in data.sources],
        "seq_length": seq_length,
        "seed": seed,
        "tokenizer": data.tokenizer,
    }
    if data.tokenizer is None:
        settings["tokenizer_vocab_size"] = data.tokenizer_vocab_size
    else:
        path = Path(data.tokenizer).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        settings["tokenizer_file_hash"] = file_hash(path) if path.is_file() else None
    for key in ("heldout_fraction", "recall_masks", "bad_documents", "shard_mib"):
        settings[key] = getattr(data, key)
    return settings


def _finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest of an existing folder, if it was made with these settings."""
    if not (folder / "manifest.json").is_file():
        raise ValueError(f"{folder} exists but is no finished folder of shards; remove it, or change data.shards")
    manifest = read_manifest(folder)
    then = manifest.get("settings", {})
    differing = [
        f"{key} (then {then.get(key)}, now {value})" for key, value in settings.items() if then.get(key) != value
    ]
    if differing:
        raise ValueError(
            f"{folder} was prepared with other settings: {'; '.join(differing)}; change data.shards to prepare anew,"
            " or remove the folder"
        )
    return manifest


def _check_vocabulary(tokenizer: int, model: int) -> None:
    if tokenizer > model:
        raise ValueError(
            f"the tokenizer has {tokenizer} entries but model.vocab_size is {model}; raise model.vocab_size, or lower"
            " data.tokenizer_vocab_size"
        )


def _hash(text: str, seed: int) -> int:
    return xxhash.xxh64_intdigest(text.encode("utf-8"), seed=seed)


def _survey(files: Sequence[SourceFile], data: DataConfig, seed: int) -> Survey:
    skipped: Counter[str] = Counter()
    documents, text_bytes, smallest, largest = 0, 0, HASH_END, -1
    for document in _read(files, data, skipped, "reading"):
        digest = _hash(document.text, seed)
        smallest, largest = min(smallest, digest), max(largest, digest)
        documents += 1
        text_bytes += document.size
    if not documents:
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none at all"
        raise ValueError(f"data.sources hold no document with text (left out: {left_out}); name other sources")
    border = int(data.heldout_fraction * HASH_END)
    if data.heldout_fraction > 0:
        if smallest == largest:
            raise ValueError(
                f"data.heldout_fraction is {data.heldout_fraction} but the corpus holds only one distinct document;"
                " add documents, or set it to 0"
            )
        border = min(max(border, smallest + 1), largest)  # at least one document on either side
    return Survey(documents, dict(sorted(skipped.items())), text_bytes, border)


def _train(files: Sequence[SourceFile], data: DataConfig, survey: Survey, seed: int) -> TextEncoder:
    """A tokenizer that has learned from an equal share of every training document."""
    documents = _read(files, data, Counter(), "training the tokenizer")
    texts = (document.text for document in documents if _hash(document.text, seed) >= survey.heldout_below)
    return train_tokenizer(texts, data.tokenizer_vocab_size, share=min(1.0, TRAINING_TEXT / survey.text_bytes))


def _write_splits(
    folder: Path,
    files: Sequence[SourceFile],
    data: DataConfig,
    encoder: TextEncoder,
    survey: Survey,
    seq_length: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    names = ("train", "heldout") if survey.heldout_below else ("train",)
    writers = {
        name: SplitWriter(
            folder / name,
            seq_length=seq_length,
            pad_id=encoder.eos_id,
            dtype=encoder.dtype,
            vocab_size=encoder.vocab_size,
            masks=data.recall_masks,
            shard_mib=data.shard_mib,
        )
        for name in names
    }

    def tokens_written() -> int:
        return sum(writer.tokens for writer in writers.values())

    for batch in _batches(_read(files, data, Counter(), "writing", tokens_written)):
        for document, tokens in zip(batch, encoder.encode([d.text for d in batch]), strict=True):
            is_heldout = _hash(document.text, seed) < survey.heldout_below
            writers["heldout" if is_heldout else "train"].add(tokens)
    splits = {name: writer.finish() for name, writer in writers.items()}
    if (written := sum(split["documents"] for split in splits.values())) != survey.documents:
        raise ValueError(f"the sources changed while they were read ({survey.documents} documents, then {written})")
    return splits


def _read(
    files: Sequence[SourceFile],
    data: DataConfig,
    skipped: Counter[str],
    label: str,
    tokens_written: Callable[[], int] | None = None,
) -> Iterator[Document]:
    """The documents of the corpus, with a progress bar over the bytes of its files."""
    total = sum(file.path.stat().st_size for file in files)
    interval = 0.5 if sys.stderr.isatty() else 10.0  # a log file needs no animation
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, mininterval=interval, file=sys.stderr) as bar:
        for document in read_documents(files, data.bad_documents, skipped):
            yield document
            if tokens_written:
                rate = tokens_written() / max(bar.format_dict["elapsed"], 1e-3)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(document.size)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= BATCH_TEXT or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _manifest(
    folder: Path,
    settings: dict[str, Any],
    files: Sequence[SourceFile],
    encoder: TextEncoder,
    survey: Survey,
    splits: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    return {
        "documents": {
            "read": survey.documents + sum(survey.skipped.values()),
            "written": survey.documents,
            "skipped": survey.skipped,
        },
        "tokens": sum(split["tokens"] for split in splits.values()),
        "sequences": sum(split["sequences"] for split in splits.values()),
        "bytes": sum(split["bytes"] for split in splits.values()),
        "seq_length": settings["seq_length"],
        "token_dtype": encoder.dtype.name,
        "vocab_size": encoder.vocab_size,
        "eos_id": encoder.eos_id,
        "tokenizer_hash": tokenizer_hash(folder / "tokenizer"),
        "splits": splits,
        "heldout_unigram_entropy": splits["heldout"]["unigram_entropy_nats"] if "heldout" in splits else None,
        "sources": {"files": len(files), "bytes": sum(file.path.stat().st_size for file in files)},
        "settings": settings,
        "versions": {"python": ".".join(map(str, sys.version_info[:3]))} | {name: version(name) for name in PACKAGES},
    }
