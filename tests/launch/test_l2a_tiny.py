"""recipes/l2a_tiny.yaml: gates close while the loss stays what dense attention reaches."""

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
