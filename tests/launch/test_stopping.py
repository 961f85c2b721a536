"""A stop comes between micro-batches, leaves the weights of a whole step, and costs the run not one bit."""

import os
import signal
from pathlib import Path

import pytest

from launch import processes, stopping
from launch import train as training
from launch.run_directory import read_metrics
from launch.stopping import LAUNCHER_GONE, STOP_SIGNALS, Stop, torchruns_patience, words
from launch.train import Trainer, train
from recipes.load import load_recipe
from tests.launch.train_program import RECIPE

STOPS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")


@pytest.fixture(autouse=True)
def world(alone):
    """Groups of one process."""


def recipe(run: Path, shards: Path, *settings: str):
    """Eight micro-batches a step, six steps."""
    fixed = ("train.steps=6", "train.micro_batch=1", "model.attention.kind=swa")
    return load_recipe(RECIPE, [f"run_dir={run}", f"data.shards={shards}", *fixed, *settings])


def losses(run: Path) -> list[tuple]:
    """Step, loss and gradient norm of each step."""
    return [(one["step"], one["loss"], one["grad_norm"]) for one in read_metrics(run / "metrics.jsonl")]


def stop_at(monkeypatch, step: int, done: int, number: int) -> None:
    """The process gets a signal when it has done so many micro-batches of a step."""
    original = Trainer.must_stop

    def must_stop(trainer, at, parts):
        if (at, parts) == (step, done):
            os.kill(os.getpid(), number)
        return original(trainer, at, parts)

    monkeypatch.setattr(Trainer, "must_stop", must_stop)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_left_is_trained_again_bit_equal(shards, tmp_path, monkeypatch, capfd, stage):
    settings = (f"parallel.zero_stage={stage}",)
    train(recipe(tmp_path / "whole", shards, *settings))
    stop_at(monkeypatch, 4, 5, signal.SIGTERM)
    assert train(recipe(tmp_path / "run", shards, *settings)) == 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_3"]
    assert "told to stop by SIGTERM: step 3 is saved; the same command goes on" in capfd.readouterr().err
    monkeypatch.undo()
    assert train(recipe(tmp_path / "run", shards, *settings)) == 6
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert all("aux" not in one for one in read_metrics(tmp_path / "run" / "metrics.jsonl"))  # it has no gates


def test_a_stop_before_the_first_step_saves_nothing(shards, tmp_path, monkeypatch, capfd):
    stop_at(monkeypatch, 1, 3, signal.SIGHUP)
    assert train(recipe(tmp_path / "run", shards)) == 0
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert "told to stop by SIGHUP: no step had been saved" in capfd.readouterr().err


def test_a_stop_ends_an_evaluation_but_not_the_last(shards, tmp_path, monkeypatch):
    settings = ("train.eval_interval=2", "train.eval_sequences=4")
    stop_at(monkeypatch, 2, 8 + 1, signal.SIGUSR1)  # after the first of its batches
    assert train(recipe(tmp_path / "run", shards, *settings)) == 2
    assert all("heldout_loss" not in one for one in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    monkeypatch.undo()
    stop_at(monkeypatch, 7, 0, signal.SIGUSR1)
    assert train(recipe(tmp_path / "run", shards, *settings)) == 6
    assert ["heldout_loss" in one for one in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("name", STOPS)
def test_every_stop_signal_is_noted(name, capfd):
    number, stop = getattr(signal, name), Stop()
    assert number in STOP_SIGNALS
    with stop.listening():
        assert stop.wanted() == 0
        os.kill(os.getpid(), number)
        assert stop.wanted() == number
        assert words(number) == ("stopped by Ctrl-C" if name == "SIGINT" else f"told to stop by {name}")
    assert signal.getsignal(number) != stop._note
    assert ("Ctrl-C again ends at once" in capfd.readouterr().err) == (name == "SIGINT")


def test_a_second_ctrl_c_ends_at_once():
    stop = Stop(speaks=False)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_nohup_is_obeyed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stop()
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.wanted() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_launcher_that_is_gone(monkeypatch):
    """torchrun's ranks stop; a process that somebody's shell started goes on without it."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(stopping, "LAUNCHER", processes.LAUNCHER + 1)
    assert Stop().wanted() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert Stop().wanted() == LAUNCHER_GONE and words(LAUNCHER_GONE) == "torchrun is gone"


@pytest.mark.parametrize(
    ("arguments", "variable", "seconds"),
    [
        ([], None, 30),
        ([], "50", 50),
        (["--nnodes=1", "--shutdown-timeout", "600", "-m"], "50", 600),
        (["--shutdown_timeout=90"], None, 90),
    ],
)
def test_a_save_that_torchrun_would_cut_off_is_said(monkeypatch, arguments, variable, seconds):
    class Launcher:
        def __init__(self, _number): ...

        def cmdline(self) -> list[str]:
            return ["torchrun", *arguments]

    class Writer:
        said: list[str] = []
        say = said.append

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert not training._warn_of_patience(Writer, 1e6, 1e6)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(stopping.psutil, "Process", Launcher)
    if variable:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    assert torchruns_patience() == seconds
    Writer.said.clear()
    assert not training._warn_of_patience(Writer, 1, seconds - 2)
    assert (
        training._warn_of_patience(Writer, 10, seconds) and f"--shutdown-timeout {2 * seconds + 20}" in Writer.said[0]
    )
