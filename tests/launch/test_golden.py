"""Losses of every shipped recipe at tiny width, as they were when tests/launch/golden was written.

A change of numerics, wanted or not, fails here by the recipe's name; tests/README.md has the command that writes the
files again, and their diff then shows what moved.

Losses were at most 1.3e-7 apart, and norms 5.1e-5, between torch 2.11 and 2.14, between megatron-core 0.16 on Python
3.11 and 0.19 on 3.12 (no difference), and between the AVX-512 and the AVX2 code of one CPU; 5e-7 with neither.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.golden_program import NAMES, STEPS, make_shards, read, write

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
LOSS, NORM = 1e-6, 2e-4  # relative


@pytest.fixture(scope="module")
def now(tmp_path_factory) -> Path:
    """The folder with today's numbers, of one process that trains all recipes."""
    folder = tmp_path_factory.mktemp("golden")
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.launch.golden_program", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def assert_as_before(got: Path, want: Path) -> None:
    """Both columns agree, step by step."""
    (losses, norms), (old_losses, old_norms) = read(got), read(want)
    assert len(losses) == STEPS
    assert losses == pytest.approx(old_losses, rel=LOSS), f"{want.stem}: its losses have changed"
    assert norms == pytest.approx(old_norms, rel=NORM), f"{want.stem}: its gradients have changed"


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_as_they_were(now, name):
    assert_as_before(now / f"{name}.txt", GOLDEN / f"{name}.txt")


def test_every_shipped_recipe_has_its_file_and_no_other():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == NAMES


@pytest.mark.parametrize("change", ["model.norm_eps=1.01e-5", "train.weight_decay=0.11"])
def test_a_small_change_of_numerics_is_seen(change, tmp_path, alone):
    with pytest.raises(AssertionError, match="swa_340m: its losses have changed"):
        assert_as_before(write("swa_340m", make_shards(tmp_path), tmp_path, change), GOLDEN / "swa_340m.txt")
