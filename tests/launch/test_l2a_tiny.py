"""recipes/l2a_tiny.yaml: gates close, and the loss stays what dense attention reaches."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from launch.run_directory import read_metrics

ROOT = Path(__file__).parents[2]


def longpitch(command: str, recipe: str, *settings: str) -> None:
    line = [sys.executable, "-m", "launch", command, f"recipes/{recipe}.yaml", *settings]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_strong_penalty_closes_gates_at_once(tmp_path, shards):
    """A few steps of the recipe: it loads, learns, starts with every gate open, and the penalty pulls p down."""
    sizes = ("model.vocab_size=320", "model.seq_length=80", "train.tokens_per_step=640", "model.attention.window=15")
    penalty = ("train.gate_penalty=2", "train.gate_penalty_start=0", "train.gate_penalty_ramp=0")
    length = ("train.steps=12", "train.warmup_steps=2", "train.device=cpu")
    longpitch("train", "l2a_tiny", f"data.shards={shards}", f"run_dir={tmp_path}", *sizes, *penalty, *length)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[0]["open_fraction"] == [1.0, 1.0]
    assert records[0]["aux"] == pytest.approx(2 * 0.5**2, rel=1e-6)  # p is 0.5 everywhere
    assert max(records[-1]["open_fraction"]) < 0.1 and records[-1]["aux"] < 0.1
    assert records[-1]["loss"] < records[0]["loss"] - 0.5


@pytest.mark.slow
def test_gates_close_and_the_loss_is_that_of_dense_attention(tmp_path):
    library = sysconfig.get_paths()["stdlib"]
    source = f"{{path: {library}, suffixes: [.py], exclude: [site-packages, dist-packages, __pycache__]}}"
    shards = f"data.shards={tmp_path}/shards"
    longpitch("prep", "l2a_tiny", shards, f"data.sources=[{source}]")
    runs = {}
    for kind in ("l2a", "dense"):
        settings = (shards, f"run_dir={tmp_path}/{kind}", f"model.attention.kind={kind}", "train.device=cpu")
        longpitch("train", "l2a_tiny", *settings)
        runs[kind] = read_metrics(tmp_path / kind / "metrics.jsonl")
    first, last = runs["l2a"][0], runs["l2a"][-1]
    assert min(first["open_fraction"]) == 1.0  # zero router: p = 0.5 opens every gate
    assert max(last["open_fraction"]) < 0.5
    assert last["heldout_loss"] <= 1.01 * runs["dense"][-1]["heldout_loss"]
