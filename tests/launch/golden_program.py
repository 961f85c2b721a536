"""Writes the golden losses: 20 steps of every recipe in recipes/, at tiny width, through the training loop itself.

Argument: the folder that gets a file for each recipe, with a line for each step: its loss and its gradient's norm.
tests/launch/test_golden.py compares with tests/launch/golden; tests/README.md has the command that writes that again.
"""

import random
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
STEPS, SEQ_LENGTH, WIDTH = 20, 96, 64
MODEL = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": 4, "ffn_size": 176, "vocab_size": 320}
ATTENTION = {"window": 15, "cell_size": 4, "query_block": 16, "retain": 8, "recent": 2}


def tiny(name: str, shards: Path, run_dir: Path) -> list[str]:
    """Overrides that shrink a shipped recipe's widths and lengths for one process without its files; all else stays.

    The learning rate grows as the width shrinks, and a penalty that is summed over a sequence as its length does:
    with those of the full size, next to nothing would move in 20 steps.
    """
    from recipes.kinds import KINDS
    from recipes.load import load_recipe

    shipped = load_recipe(RECIPES / f"{name}.yaml")
    model, train = shipped.model, shipped.train
    sizes = MODEL | {"seq_length": SEQ_LENGTH}
    if model.num_kv_heads is not None:
        sizes["num_kv_heads"] = 2
    if model.head_dim is not None:
        sizes["head_dim"] = 16
    wider = model.hidden_size / WIDTH
    longer = model.seq_length / SEQ_LENGTH if train.gate_penalty_per == "sequence" else 1
    changed = {
        "run_dir": run_dir,
        "data.shards": shards,
        "data.tokenizer": "null",
        "model.init_from": "null",
        "parallel.context": 1,
        "train.device": "cpu",
        "train.steps": STEPS,
        "train.warmup_steps": max(1, round(STEPS * train.warmup_steps / train.steps)),
        "train.tokens_per_step": 2 * train.micro_batch * SEQ_LENGTH,
        "train.lr": train.lr * wider,
        "train.min_lr": train.min_lr * wider,
        "train.gate_penalty": train.gate_penalty * longer,
        "train.eval_sequences": 0,
        "checkpoint.interval": 0,
        **{f"model.{key}": value for key, value in sizes.items()},
        **{f"model.attention.{key}": ATTENTION[key] for key in ATTENTION.keys() & KINDS[model.attention.kind].keys},
    }
    return [f"{key}={value}" for key, value in changed.items()]


def make_shards(folder: Path) -> Path:
    """Shards of a made-up language, whose text is the same wherever this runs."""
    from data_prep.prep import prepare
    from recipes.schema import DataConfig, SourceConfig

    draw = random.Random(0)
    words = [
        "".join(draw.choice("aeiou" if at % 2 else "bdklmnrst") for at in range(draw.randint(2, 6))) for _ in "a" * 200
    ]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(40):
        text = " ".join(words[int(len(words) * draw.random() ** 3)] for _ in range(600))
        (corpus / f"{number}.txt").write_text(text)
    source = SourceConfig(path=str(corpus))
    data = DataConfig(shards=str(folder / "shards"), sources=[source], tokenizer_vocab_size=300, prep_workers=1)
    return prepare(data, seq_length=SEQ_LENGTH, vocab_size=MODEL["vocab_size"]).folder


def write(name: str, shards: Path, folder: Path, *more: str) -> Path:
    """Train one recipe, with `more` overrides, and write its file into `folder`."""
    from launch.run_directory import read_metrics
    from launch.train import train
    from recipes.load import load_recipe

    with tempfile.TemporaryDirectory() as run_dir:
        train(load_recipe(RECIPES / f"{name}.yaml", [*tiny(name, shards, Path(run_dir)), *more]))
        records = read_metrics(Path(run_dir) / "metrics.jsonl")
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{record['loss']:.7f} {record['grad_norm']:.6e}\n" for record in records))
    return path


def read(path: Path) -> tuple[list[float], list[float]]:
    """The losses and the gradients' norms of a file."""
    losses, norms = zip(*(map(float, line.split()) for line in path.read_text().splitlines()), strict=True)
    return list(losses), list(norms)


def main(folder: str) -> None:
    """Write every recipe's file."""
    import torch

    torch.set_num_threads(1)  # how a sum is cut over threads changes its rounding
    with tempfile.TemporaryDirectory() as scratch:
        shards = make_shards(Path(scratch))
        for name in NAMES:
            write(name, shards, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
