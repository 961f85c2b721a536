"""Prepare a corpus: documents to tokens to shards, in one folder that appears only when it is complete.

    SHARDS/train/  SHARDS/heldout/   packed sequences (MDS)
    SHARDS/tokenizer/                the Hugging Face tokenizer that made them
    SHARDS/left_out.txt              file and line of every document that is bad or empty, if there were any
    SHARDS/manifest.json             counts, hashes, settings and versions; written last

Two passes, each over parts that any number of processes may do in any order and that a killed run leaves whole or
absent in SHARDS.partial/work: blocks of the corpus become token ids, then, when all lengths and hashes are known,
shards are gathered from them. A tokenizer that is trained here needs a reading before, and one for its training.
"""

import errno
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from data_prep.blocks import Corpus, load_corpus, read_facts, write_block, write_file
from data_prep.corpus import Block, Document, LeftOut, Rules, cut, files_hash, read_block
from data_prep.files import MissingSource, SourceFile, find_files, list_ignored
from data_prep.fingerprint import file_hash, manifest_hash, tokenizer_files_hash, tokenizer_hash
from data_prep.folder_lock import lock_folder
from data_prep.guard import read_manifest
from data_prep.mixture import Choice, choose, heldout_border
from data_prep.pool import num_cores, run_tasks
from data_prep.recall import MASKS, MASKS_OF
from data_prep.remote import is_url
from data_prep.shards import (
    LARGEST_SHARD_MIB,
    SplitPlan,
    entropy_nats,
    finished_shard,
    label_counts,
    plan_split,
    write_index,
    write_shard,
)
from data_prep.tokenizer import Encoder, load_tokenizer, train_tokenizer
from recipes.errors import UserError
from recipes.schema import PACKINGS, DataConfig

TRAINING_TEXT = 64 << 20  # bytes of text that a tokenizer is trained on, at most
TRAINING_BLOCKS = 1024  # of the corpus, evenly spread, in which that text is looked for
BATCH_TEXT = 1 << 20  # characters of documents that are tokenized at a time
PACKAGES = ("mosaicml-streaming", "tokenizers", "transformers", "sentencepiece", "numpy", "pyarrow", "orjson")
SETTINGS = (  # of the recipe, that decide the bytes of the shards
    "bad_documents",
    "max_document_mib",
    "deduplicate",
    "heldout_fraction",
    "split_seed",
    "add_bos",
    "packing",
    "max_tokens",
    "recall_masks",
    "shard_mib",
)


@dataclass(frozen=True)
class Prepared:
    """A finished folder of shards."""

    folder: Path
    manifest: dict[str, Any]
    fresh: bool  # False: it was there already, with the same settings

    def __str__(self) -> str:
        """Some lines for the person who asked for it."""
        if not self.fresh:
            return f"{self.folder} is there with the same settings; nothing to do"
        documents, packing = self.manifest["documents"], self.manifest["packing"]
        left_out = ", ".join(f"{count} {reason}" for reason, count in documents["skipped"].items()) or "none"
        lines = [
            f"{self.folder}: {documents['written']} of {documents['read']} documents (left out: {left_out}),"
            f" {self.manifest['tokens']} tokens, {self.manifest['sequences']} sequences"
            f" ({packing['policy']}, {packing['padding_share']:.2%} padding)"
        ]
        if ignored := self.manifest["sources"].get("ignored"):
            lines.append(
                f"  files left out by their suffixes: {list_ignored(ignored)}; data.sources.suffixes names others"
            )
        for part in self.manifest["mixture"]:
            bounds = f"{part['min_tokens']} to {part['max_tokens'] or 'any'} tokens"
            lines.append(
                f"  {part['source'] or 'all sources'}, documents of {bounds}: {part['reached']:.2%} of the training"
                f" tokens (asked {part['asked']:.2%}), {part['documents']} documents"
            )
        return "\n".join(lines)


def prepare(data: DataConfig, *, seq_length: int, vocab_size: int) -> Prepared:
    """Write the shards that `data` describes to `data.shards`, unless they are there; a killed run is continued.

    Args:
        seq_length: tokens of a sequence.
        vocab_size: of the model; the tokenizer must fit.

    Raises:
        UserError: a path, a document or a setting is unusable, or the folder holds other shards.
        OSError: a worker was killed, or the disk failed.
    """
    _check(data, seq_length)
    if is_url(data.shards):
        raise UserError(f"data.shards is {data.shards}: prepare into a local folder and copy it there when it is done")
    folder, settings = Path(data.shards).expanduser(), _settings(data, seq_length)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        manifest = _finished(folder, settings, data)
        _check_vocabulary(manifest["vocab_size"], vocab_size)
        return Prepared(folder, manifest, fresh=False)
    ignored = Counter[str]()
    files = find_files(data.sources, ignored)
    if ignored:
        _say(f"left out of data.sources by their suffixes: {list_ignored(ignored)}")
    partial = folder.with_name(folder.name + ".partial")
    try:
        with lock_folder(partial):
            manifest = _Preparation(data, settings, files, ignored, partial, seq_length).run(vocab_size)
            shutil.rmtree(partial / "work", ignore_errors=True)
            if folder.exists():
                folder.rmdir()  # it was empty
            os.rename(partial, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"the disk of {partial} is full ({os.strerror(error.errno)}); free some space and run the same command, it"
            " goes on from there"
        ) from error
    return Prepared(folder, manifest, fresh=True)


def _check(data: DataConfig, seq_length: int) -> None:
    if seq_length < 2:
        raise UserError(f"model.seq_length is {seq_length}; a sequence needs at least 2 tokens")
    if not 0 <= data.heldout_fraction < 1:
        raise UserError(f"data.heldout_fraction is {data.heldout_fraction}; give a number from 0 to below 1")
    if not 1 <= data.shard_mib <= LARGEST_SHARD_MIB:
        raise UserError(f"data.shard_mib is {data.shard_mib}; give a number from 1 to {LARGEST_SHARD_MIB}")
    if data.packing not in PACKINGS:
        raise UserError(f"data.packing is {data.packing!r}; give one of {', '.join(PACKINGS)}")
    for key, least in (("max_document_mib", 1), ("prep_workers", 0), ("split_seed", 0)):
        if getattr(data, key) < least:
            raise UserError(f"data.{key} is {getattr(data, key)}; give a number of at least {least}")
    if data.max_tokens is not None and data.max_tokens < 1:
        raise UserError(f"data.max_tokens is {data.max_tokens}; give a number of at least 1, or leave it out")
    for part in data.mixture:
        if part.proportion <= 0 or part.repeat < 1:
            raise UserError(
                f"data.mixture has a part of proportion {part.proportion} and repeat {part.repeat}; the first must be"
                " above 0, the second at least 1"
            )
    names = _names(data)
    if len(set(names)) < len(names) and data.mixture:
        raise UserError(f"data.sources has two sources of one name ({', '.join(names)}); set name to tell them apart")
    Rules(data.bad_documents)


def _names(data: DataConfig) -> list[str]:
    return [source.name or source.path for source in data.sources]


def _settings(data: DataConfig, seq_length: int) -> dict[str, Any]:
    """All that decides the bytes of the shards, besides the texts themselves."""
    settings: dict[str, Any] = {
        "sources": [asdict(source) for source in data.sources],
        "seq_length": seq_length,
        "tokenizer": data.tokenizer,
    }
    if data.tokenizer is None:
        settings["tokenizer_vocab_size"] = data.tokenizer_vocab_size
    else:
        settings["tokenizer_files_hash"] = tokenizer_files_hash(data.tokenizer)
    settings |= {key: getattr(data, key) for key in SETTINGS}
    settings["recall_masks"] = MASKS_OF if data.recall_masks else False
    return settings | {"mixture": [asdict(part) for part in data.mixture]}


def _differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    return "; ".join(
        f"{key} (then {then.get(key)}, now {value})" for key, value in now.items() if then.get(key) != value
    )


def _finished(folder: Path, settings: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """The manifest of an existing folder, if it was made with these settings and of these files."""
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder} exists but is no finished folder of shards; remove it, or change data.shards")
    manifest = read_manifest(folder)
    way_out = "change data.shards to prepare anew, or remove the folder"
    then, named = manifest.get("settings", {}), "tokenizer_files_hash"
    # shards hold a copy of their tokenizer and may outlive the one that was named; older ones do not state its hash
    now = {key: value for key, value in settings.items() if key != named or (value and named in then)}
    if differing := _differences(then, now):
        raise UserError(f"{folder} was prepared with other settings: {differing}; {way_out}")
    tokenizer = data.tokenizer if named not in then else None
    if tokenizer and settings[named] and not _is_tokenizer_of(manifest, tokenizer, data.add_bos):
        raise UserError(f"{folder} was prepared with another tokenizer than {data.tokenizer} now is; {way_out}")
    try:
        files = find_files(data.sources)
    except MissingSource:  # shards outlive their corpus
        return manifest
    if _sizes_hash(files) != manifest["sources"]["hash"]:
        raise UserError(f"{folder} was prepared from other files than data.sources now hold; {way_out}")
    if not _same_stamps(manifest, files):
        newest = max(files, key=lambda file: (len(file.stamp), file.stamp)).path
        raise UserError(
            f"{folder} was prepared before files of data.sources were written again, as their times of change say (the"
            f" newest is {newest}); {way_out}"
        )
    return manifest


def _is_tokenizer_of(manifest: dict[str, Any], tokenizer: str, add_bos: bool | None) -> bool:
    """Whether a tokenizer gives the ids of the shards, by what `prepare` would save of it."""
    encoder = load_tokenizer(tokenizer, add_bos)
    with tempfile.TemporaryDirectory() as aside:
        encoder.save(Path(aside))
        found = (tokenizer_hash(Path(aside)), encoder.eos_id, encoder.bos_id)
    return found == (manifest["tokenizer_hash"], manifest["eos_id"], manifest["bos_id"])


def _sizes_hash(files: Sequence[SourceFile]) -> str:
    """Changes when a file comes, goes or has another size."""
    return xxhash.xxh64_hexdigest(repr([(file.path, file.size) for file in files]))


def _same_stamps(manifest: dict[str, Any], files: Sequence[SourceFile]) -> bool:
    """Whether no file has been written since: by its time of change, or what a URL has of the kind."""
    return manifest["sources"].get("stamps_hash") in (None, files_hash(files))


def _check_vocabulary(tokenizer: int, model: int) -> None:
    if tokenizer > model:
        raise UserError(
            f"the tokenizer has {tokenizer} entries but model.vocab_size is {model}; raise model.vocab_size, or lower"
            " data.tokenizer_vocab_size"
        )


class _Preparation:
    """One preparation under way; every method may be interrupted and the whole begun again."""

    def __init__(
        self,
        data: DataConfig,
        settings: dict[str, Any],
        files: list[SourceFile],
        ignored: Counter[str],
        folder: Path,
        seq_length: int,
    ) -> None:
        self.data, self.settings, self.files, self.folder, self.seq_length = data, settings, files, folder, seq_length
        self.ignored = ignored  # files that suffixes leave out
        self.rules = Rules(data.bad_documents, data.max_document_mib << 20)
        self.workers = data.prep_workers or num_cores()
        self.masks = len(MASKS) if data.recall_masks else 0
        self.blocks = folder / "work" / "blocks"

    def run(self, vocab_size: int) -> dict[str, Any]:
        """Do what is left to do; returns the manifest."""
        if (done := self._done()) is not None:
            return done
        self._begin()
        encoder = self._tokenizer(vocab_size)
        facts = self._tokenize(encoder)
        corpus = load_corpus(self.blocks, facts, encoder.dtype)
        left_out = Counter[str]()
        for one in facts.values():
            left_out.update(one["left_out"])
        if not len(corpus.lengths):
            raise _no_text(left_out)
        data = self.data
        choice = choose(
            corpus,
            names=_names(data),
            heldout_fraction=data.heldout_fraction,
            deduplicate=data.deduplicate,
            mixture=data.mixture,
            max_tokens=data.max_tokens,
            longest_first=data.packing == "long_first",
        )
        if not len(choice.train):
            raise UserError("no document is left for training; lower data.heldout_fraction or add documents")
        if data.heldout_fraction and not len(choice.heldout):
            raise UserError(
                "no document of the mixture is held out; raise data.heldout_fraction, set it to 0, or add documents"
            )
        left_out.update(choice.left_out)
        splits = self._write_splits(corpus, choice, encoder)
        places = [place for key in sorted(facts) for place in facts[key]["places"]]
        (self.folder / "left_out.txt").unlink(missing_ok=True)  # of a killed run, before its files were repaired
        if places:
            write_file(self.folder / "left_out.txt", "".join(f"{place}\n" for place in places).encode())
        manifest = self._manifest(corpus, choice, encoder, splits, dict(sorted(left_out.items())))
        content = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
        write_file(self.folder / "manifest.json", content)
        return manifest

    def _done(self) -> dict[str, Any] | None:
        """The manifest of a run that was killed in its last moment."""
        if not (self.folder / "manifest.json").is_file():
            return None
        manifest = read_manifest(self.folder)
        same = not _differences(manifest["settings"], self.settings)
        same = same and manifest["sources"]["hash"] == _sizes_hash(self.files) and _same_stamps(manifest, self.files)
        return manifest if same else None

    def _begin(self) -> None:
        """Keep what a killed run with the same settings has left, and nothing else."""
        path = self.folder / "work" / "settings.json"
        # a tokenizer that is trained here has learned from all files
        now = self.settings | {"files": None if self.data.tokenizer else files_hash(self.files)} | _versions()
        then = json.loads(path.read_bytes()) if path.is_file() else None
        if then != json.loads(json.dumps(now)):
            if then is not None:
                _say(f"{self.folder} was begun with other settings, files or versions; beginning anew")
            for entry in self.folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            write_file(path, json.dumps(now).encode())

    # tokens

    def _tokenizer(self, vocab_size: int) -> Encoder:
        data, saved = self.data, self.folder / "tokenizer"
        if data.tokenizer:
            encoder = load_tokenizer(data.tokenizer, data.add_bos)
        elif saved.is_dir():
            encoder = load_tokenizer(saved, data.add_bos)
        else:
            encoder = self._train()
        _check_vocabulary(encoder.vocab_size, vocab_size)
        if not saved.is_dir():
            aside = self.folder / "work" / "tokenizer"
            shutil.rmtree(aside, ignore_errors=True)
            encoder.save(aside)
            os.rename(aside, saved)
        return encoder

    def _train(self) -> Encoder:
        """A tokenizer that has learned from an equal share of every training document of the corpus, or of a part."""

        def survey(block: Block) -> dict[str, Any]:
            left_out = LeftOut()
            found = [(d.size, _hash(d.text, self.data.split_seed)[0]) for d in self._documents(block, left_out)]
            sizes, hashes = [size for size, _ in found], [half for _, half in found]
            return {
                "bytes": sum(sizes),
                "smallest": min(hashes, default=None),
                "largest": max(hashes, default=None),
                "left_out": left_out.counts,
                "cost": block.cost,
            }

        parts = []
        with self._progress("reading") as bar:
            for part in run_tasks(survey, cut(self.files, self.rules), self.workers):
                parts.append(part)
                bar.update(part["cost"])
        found = [part for part in parts if part["smallest"] is not None]
        if not found:
            raise _no_text(sum((part["left_out"] for part in parts), Counter()))
        fraction = self.data.heldout_fraction
        smallest, largest = min(part["smallest"] for part in found), max(part["largest"] for part in found)
        below = heldout_border(smallest, largest, fraction)
        every = -(-len(parts) // TRAINING_BLOCKS)
        share = min(1.0, TRAINING_TEXT * every / sum(part["bytes"] for part in found))
        _say("training the tokenizer")
        return train_tokenizer(self._training_texts(below, every), self.data.tokenizer_vocab_size, share=share)

    def _training_texts(self, heldout_below: int, every: int) -> Iterator[str]:
        for block in itertools.islice(cut(self.files, self.rules), 0, None, every):
            assert isinstance(block, Block)
            for document in self._documents(block, LeftOut()):
                if _hash(document.text, self.data.split_seed)[0] >= heldout_below:
                    yield document.text

    def _documents(self, block: Block, left_out: LeftOut) -> Iterator[Document]:
        return read_block(block, self.data.sources[block.source], self.rules, left_out)

    def _tokenize(self, encoder: Encoder) -> dict[str, dict[str, Any]]:
        """Turn every block into token ids that is not yet; facts of all of them by key."""
        facts: dict[str, dict[str, Any]] = {}

        def work(block: Block) -> dict[str, Any]:
            return self._tokenize_block(block, encoder)

        def pending(bar: tqdm) -> Iterator[Block]:
            for block in cut(self.files, self.rules, lambda key: read_facts(self.blocks, key)):
                if isinstance(block, dict):
                    facts[block["key"]] = block
                    bar.update(block["cost"])
                else:
                    yield block

        tokens = 0
        with self._progress("tokenizing") as bar:
            for done in run_tasks(work, pending(bar), self.workers):
                facts[done["key"]] = done
                tokens += done["tokens"]
                _show_rate(bar, tokens)
                bar.update(done["cost"])
        if files_hash(find_files(self.data.sources)) != files_hash(self.files):
            raise UserError("data.sources changed while they were read; run the same command again")
        return facts

    def _tokenize_block(self, block: Block, encoder: Encoder) -> dict[str, Any]:
        left_out = LeftOut()
        documents: list[np.ndarray] = []
        hashes: list[tuple[int, int]] = []
        text_bytes = 0
        for batch in _batches(self._documents(block, left_out)):
            documents += encoder.encode([document.text for document in batch])
            hashes += [_hash(document.text, self.data.split_seed) for document in batch]
            text_bytes += sum(document.size for document in batch)
        more = {"text_bytes": text_bytes, "left_out": dict(left_out.counts), "places": left_out.places}
        facts = block.facts() | more
        return write_block(self.blocks, block.key, facts, documents, hashes, encoder.dtype)

    # shards

    def _write_splits(self, corpus: Corpus, choice: Choice, encoder: Encoder) -> dict[str, dict[str, Any]]:
        """Gather the sequences of both splits into shards; the splits' parts of the manifest."""
        chosen = {"train": choice.train, "heldout": choice.heldout}
        plans = {
            name: plan_split(
                name,
                documents,
                corpus,
                seq_length=self.seq_length,
                packing=self.data.packing,
                masks=self.masks,
                shard_mib=self.data.shard_mib,
            )
            for name, documents in chosen.items()
            if len(documents)
        }
        entries = self._write_shards(plans, corpus, encoder.eos_id)
        splits = {}
        for name, split in plans.items():
            write_index(self.folder / name, entries[name])
            counts = label_counts(self.folder, split, encoder.vocab_size)
            splits[name] = {
                "documents": len(np.unique(split.documents)),
                "tokens": split.plan.tokens,
                "sequences": split.plan.num_sequences,
                "padding": split.plan.padding,
                "documents_cut": split.plan.cut_documents(),
                "labels": int(counts.sum()),
                "unigram_entropy_nats": entropy_nats(counts),
                "bytes": sum(file.stat().st_size for file in (self.folder / name).iterdir()),
                "index_hash": file_hash(self.folder / name / "index.json"),
            }
        return splits

    def _write_shards(self, plans: dict[str, SplitPlan], corpus: Corpus, pad_id: int) -> dict[str, list[dict]]:
        def work(task: tuple[str, int]) -> tuple[str, int, dict[str, Any]]:
            name, number = task
            done = finished_shard(self.folder, plans[name], number)
            done = done or write_shard(self.folder, plans[name], number, corpus, pad_id=pad_id, masks=self.masks)
            return name, number, done

        for name, split in plans.items():  # a run of other texts may have left shards behind
            known = {f"shard.{number:05}.mds" for number in range(len(split.shards))}
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            for file in folder.iterdir():
                if file.name not in known:
                    file.unlink()
        tasks = [(name, number) for name, split in plans.items() for number in range(len(split.shards))]
        entries: dict[str, list[dict]] = {name: [{}] * len(split.shards) for name, split in plans.items()}
        total = sum(split.plan.num_sequences * self.seq_length for split in plans.values())
        tokens = 0
        with self._progress("writing", total=total, unit=" tokens") as bar:
            for name, number, entry in run_tasks(work, tasks, min(self.workers, len(tasks))):
                entries[name][number] = entry
                tokens += entry["samples"] * self.seq_length
                _show_rate(bar, tokens)
                bar.update(entry["samples"] * self.seq_length)
        return entries

    def _progress(self, label: str, total: int | None = None, unit: str = "B") -> tqdm:
        """A bar over the bytes of the corpus, with what is left of the time."""
        total = sum(file.size for file in self.files) if total is None else total
        tqdm.monitor_interval = 0  # its thread would be running while workers are forked
        interval = 0.5 if sys.stderr.isatty() else 10.0  # a log file needs no animation
        return tqdm(total=total, desc=label, unit=unit, unit_scale=True, mininterval=interval, file=sys.stderr)

    def _manifest(
        self,
        corpus: Corpus,
        choice: Choice,
        encoder: Encoder,
        splits: dict[str, dict[str, Any]],
        left_out: dict[str, int],
    ) -> dict[str, Any]:
        written = len(np.unique(choice.train)) + len(choice.heldout)
        before = sum(count for reason, count in left_out.items() if reason not in choice.left_out)
        read = len(corpus.lengths) + before
        if read != written + sum(left_out.values()):
            raise AssertionError(f"{read} documents read, {written} written, left out {left_out}")
        padded = sum(split["sequences"] for split in splits.values()) * self.seq_length
        manifest = {
            "documents": {"read": read, "written": written, "skipped": left_out},
            "tokens": sum(split["tokens"] for split in splits.values()),
            "sequences": sum(split["sequences"] for split in splits.values()),
            "bytes": sum(split["bytes"] for split in splits.values()),
            "seq_length": self.seq_length,
            "token_dtype": encoder.dtype.name,
            "vocab_size": encoder.vocab_size,
            "eos_id": encoder.eos_id,
            "bos_id": encoder.bos_id,
            "tokenizer_hash": tokenizer_hash(self.folder / "tokenizer"),
            "packing": {
                "policy": self.data.packing,
                "padding_share": sum(split["padding"] for split in splits.values()) / padded,
            },
            "mixture": choice.mixture,
            "length_buckets": self._length_buckets(corpus, choice),
            "splits": splits,
            "heldout_unigram_entropy": splits["heldout"]["unigram_entropy_nats"] if "heldout" in splits else None,
            "sources": {
                "files": len(self.files),
                "bytes": sum(file.size for file in self.files),
                "hash": _sizes_hash(self.files),
                "stamps_hash": files_hash(self.files),
                "ignored": dict(sorted(self.ignored.items())),
            },
            "settings": json.loads(json.dumps(self.settings)),
            "versions": _versions(),
        }
        return manifest | {"hash": manifest_hash(manifest)}

    def _length_buckets(self, corpus: Corpus, choice: Choice) -> list[dict[str, Any]]:
        """Training documents and their tokens by source and by length, in powers of two."""
        lengths = corpus.lengths[choice.train].astype(np.int64)
        sources, powers = corpus.sources[choice.train], np.frexp(lengths.astype(np.float64))[1] - 1
        buckets = []
        for number, name in enumerate(_names(self.data)):
            for power in np.unique(powers[sources == number]).tolist():
                inside = (sources == number) & (powers == power)
                tokens = int(lengths[inside].sum())
                buckets.append(
                    {"source": name, "min_tokens": 1 << power, "documents": int(inside.sum()), "tokens": tokens}
                )
        return buckets


def _versions() -> dict[str, str]:
    """Of what decides the bytes of the shards besides settings and texts."""
    return {"python": ".".join(map(str, sys.version_info[:3]))} | {name: version(name) for name in PACKAGES}


def _no_text(left_out: Counter[str]) -> UserError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "none at all"
    return UserError(f"data.sources hold no document with text (left out: {reasons}); name other sources")


def _hash(text: str, seed: int) -> tuple[int, int]:
    """Two halves of a 128-bit hash: the first decides the split, the second the order of a choice."""
    digest = xxhash.xxh3_128_intdigest(text.encode("utf-8"), seed=seed)
    return digest >> 64, digest & ((1 << 64) - 1)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_TEXT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _show_rate(bar: tqdm, tokens: int) -> None:
    bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-3):,.0f} tokens/s", refresh=False)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
