"""A command knows in how many processes it was started, and says at once what is wrong with that."""

import os

import pytest

from launch.processes import STARTERS, TORCHRUN, expect_one_process, expect_torchrun_or_one
from recipes.load import RecipeError
from tests.launch.test_errors import longpitch


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """No launcher's variable is set."""
    for name in (
        *TORCHRUN,
        "TORCHELASTIC_RUN_ID",
        "SLURM_NNODES",
        *(name for pair in STARTERS.values() for name in pair),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["longpitch", "train", "my recipe.yaml"])


def test_one_process_forgets_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    expect_one_process("generate")
    assert not set(TORCHRUN) & os.environ.keys()


def test_one_process_refuses_several(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match=r"generate. is one process, but WORLD_SIZE=2 .*env -u RANK -u WORLD_SIZE"):
        expect_one_process("generate")


@pytest.mark.parametrize("there", [("RANK",), ("WORLD_SIZE",), ("RANK", "WORLD_SIZE", "LOCAL_RANK")])
def test_half_of_torchruns_variables(monkeypatch, there):
    for name in there:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RecipeError, match=r"MASTER_ADDR.* are not: start with torchrun"):
        expect_torchrun_or_one()


def test_one_process_and_torchrun_are_right(monkeypatch):
    expect_torchrun_or_one()
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    expect_torchrun_or_one()
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for name in TORCHRUN:  # srun started torchrun
        monkeypatch.setenv(name, "0")
    expect_torchrun_or_one()


def test_tasks_of_srun_are_told_what_to_type(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    with pytest.raises(RecipeError, match=r"torchrun --nproc-per-node 16 -m launch train 'my recipe.yaml'"):
        expect_torchrun_or_one()
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(RecipeError, match=r"srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 "):
        expect_torchrun_or_one()


def test_the_commands_look_at_once():
    done = longpitch("generate", "nowhere", "--prompt", "x", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "WORLD_SIZE=2" in done.stderr
    for number in "01":
        done = longpitch("train", "recipes/quickstart.yaml", SLURM_PROCID=number, SLURM_NTASKS="3")
        assert done.returncode == 2 and done.stderr.count("srun started 3 processes") == (number == "0")
