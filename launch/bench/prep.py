"""`longpitch bench prep`: the four speeds of preparing and reading data, measured in one run on this machine."""

import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter

from data_prep.loader import TrainLoader
from data_prep.pool import num_cores
from data_prep.prep import prepare
from data_prep.shards import columns, write_index
from data_prep.tokenizer import train_tokenizer
from recipes.schema import DataConfig, SourceConfig

PACKAGES = ("tokenizers", "mosaicml-streaming", "torch", "numpy", "pyarrow")
H200_TOKENS_PER_SECOND = 3500  # that training consumes, of 128K-token sequences
LONG = 131_072
MANY_SHARDS, MANY_SAMPLES = 10_000, 1_000_000
VOCABULARY = 32_000

# what Hugging Face reaches by itself: one process, its own threads, texts in memory
REFERENCE = """
import json, sys, time
from tokenizers import Tokenizer
texts = json.load(open(sys.argv[1])); tokenizer = Tokenizer.from_file(sys.argv[2]); tokens = 0
began = time.perf_counter()
for first in range(0, len(texts), 256):
    encodings = tokenizer.encode_batch_fast(texts[first : first + 256], add_special_tokens=False)
    tokens += sum(len(encoding.ids) for encoding in encodings)
print(json.dumps([tokens, time.perf_counter() - began]))
"""


def bench_prep(*, json_path: Path | None = None, mib: int = 48) -> dict[str, Any]:
    """Measure and print; returns the figures.

    Args:
        json_path: also written there.
        mib: text that is tokenized.
    """
    figures: dict[str, Any] = {
        "cores": num_cores(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
    with tempfile.TemporaryDirectory(prefix="longpitch-bench-") as name:
        folder = Path(name)
        for part in (_tokenizing, _reading, _starting, _resuming):
            found = part(folder, mib)
            figures |= found
            print(", ".join(f"{key} {value:,.2f}" for key, value in found.items()), flush=True)
    if json_path:
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _texts(mib: int) -> list[str]:
    """Python's own library, from the beginning again where it is not enough, every copy with a line of its own."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    found, size, round_ = [], 0, 0
    while size < mib << 20:
        for file in files:
            text = f"# {round_}\n" + file.read_text(encoding="utf-8", errors="ignore")
            found.append(text)
            size += len(text.encode())
            if size >= mib << 20:
                break
        round_ += 1
    return found


def _tokenizing(folder: Path, mib: int) -> dict[str, float]:
    """The second of preparing from JSONL with all cores, beside the tokenizer library's own batches of the texts."""
    texts = _texts(mib)
    train_tokenizer(texts[:600], VOCABULARY).save(folder / "tokenizer")
    (folder / "texts.json").write_text(json.dumps(texts))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours, theirs, our_cpu, their_cpu = [], [], [], []
    for attempt in range(3):  # taken in turns, so that a busy machine is busy for both
        command = [
            sys.executable,
            "-c",
            REFERENCE,
            str(folder / "texts.json"),
            str(folder / "tokenizer/tokenizer.json"),
        ]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_cores())}
        before = _cpu_seconds()
        tokens, seconds = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        theirs.append(tokens / seconds)
        their_cpu.append(tokens / (_cpu_seconds() - before))
        data = DataConfig(
            shards=str(folder / f"shards{attempt}"),
            sources=[SourceConfig(path=str(folder / "texts.jsonl"))],
            tokenizer=str(folder / "tokenizer"),
            deduplicate=False,
        )
        began, before = time.perf_counter(), _cpu_seconds()
        made = prepare(data, seq_length=4096, vocab_size=VOCABULARY)
        ours.append(made.manifest["tokens"] / (time.perf_counter() - began))
        our_cpu.append(made.manifest["tokens"] / (_cpu_seconds() - before))
    return {
        "prep_tokens_per_second": max(ours),
        "hf_batch_tokens_per_second": max(theirs),
        "prep_over_hf_batch": max(ours) / max(theirs),
        "prep_over_hf_batch_per_cpu_second": max(our_cpu) / max(their_cpu),
    }


def _cpu_seconds() -> float:
    """Of this process and those that have ended under it; what a busy machine does not change."""
    return sum(
        one.ru_utime + one.ru_stime for one in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _reading(folder: Path, mib: int) -> dict[str, float]:
    """Micro-batches of 128K-token sequences, labels and weights made, from shards on disk."""
    rng, count = np.random.default_rng(0), 192
    out = folder / "long" / "train"
    shape = columns(np.dtype(np.uint32), LONG, 2)
    with MDSWriter(columns=shape, out=str(out), hashes=["xxh64"], size_limit=64 << 20) as writer:
        for _ in range(count):
            tokens = rng.integers(0, 150_000, LONG).astype(np.uint32)
            mask = rng.integers(0, 256, LONG // 8).astype(np.uint8)
            lengths = np.array([LONG // 2, LONG // 2], np.uint32)
            writer.write({"tokens": tokens, "doc_lengths": lengths, "recall": mask, "switch": mask})
    with TrainLoader(
        folder / "long", global_batch=1, micro_batch=1, seed=1, recall_beta=9.0, switch_beta=9.0
    ) as loader:
        next(loader)
        began = time.perf_counter()
        for _ in range(count - 2):
            next(loader)
        speed = (count - 2) * LONG / (time.perf_counter() - began)
    return {"read_tokens_per_second": speed, "read_over_h200": speed / H200_TOKENS_PER_SECOND}


def _many(folder: Path, shards: int, samples: int) -> Path:
    """A split of many small shards, all hard links to one."""
    one, out = folder / f"one{shards}", folder / f"many{shards}" / "train"
    each = samples // shards
    with MDSWriter(columns=columns(np.dtype(np.uint16), 8, 0), out=str(one), hashes=["xxh64"]) as writer:
        for number in range(each):
            tokens, lengths = np.full(8, number % 100, np.uint16), np.array([8], np.uint32)
            writer.write({"tokens": tokens, "doc_lengths": lengths})
    (entry,) = json.loads((one / "index.json").read_text())["shards"]
    out.mkdir(parents=True)
    names = [f"shard.{number:05}.mds" for number in range(shards)]
    for name in names:
        os.link(one / "shard.00000.mds", out / name)
    write_index(out, [entry | {"raw_data": entry["raw_data"] | {"basename": name}} for name in names])
    return out.parent


def _starting(folder: Path, mib: int) -> dict[str, float]:
    """From the call to the first batch, every shard checked to be there with its size and count."""
    shards = _many(folder, MANY_SHARDS, 40 * MANY_SHARDS)
    began = time.perf_counter()
    with TrainLoader(shards, global_batch=8, micro_batch=1, seed=1) as loader:
        next(loader)
        return {"start_seconds_10000_shards": time.perf_counter() - began}


def _resuming(folder: Path, mib: int) -> dict[str, float]:
    """From the call to the first batch in the middle of an epoch of a million samples."""
    shards = _many(folder, 1000, MANY_SAMPLES)
    with TrainLoader(shards, global_batch=8, micro_batch=1, seed=1) as loader:
        state = loader.state_dict() | {"samples_in_epoch": MANY_SAMPLES // 2}
    began = time.perf_counter()
    with TrainLoader(shards, global_batch=8, micro_batch=1, seed=1) as loader:
        loader.load_state_dict(state)
        next(loader)
        return {"resume_seconds_1000000_samples": time.perf_counter() - began}
