"""A step brings its micro-batches to the device one after the other, and what they share there is made once."""

import weakref
from pathlib import Path

import pytest

from launch.run_directory import read_metrics
from launch.train import Trainer, train
from megatron_ext import model, sequence_context
from megatron_ext.engine import TrainEngine
from megatron_ext.parallel.layout import leave_layout
from recipes.load import load_recipe
from tests.launch.train_program import RECIPE

ACCUMULATION, STEPS = 8, 2
SETTINGS = ("train.micro_batch=1", f"train.steps={STEPS}", "train.warmup_steps=0")
DOCUMENTS = "model.attention.document_mask=true"
# what a recipe says -> rotation tables that its run makes: one, or one for each micro-batch (and held-out sequence)
CASES = {
    "l2a": (("model.attention.kind=l2a", "train.gate_penalty=0.05"), 1),
    "positions that go on": (("model.attention.kind=swa", DOCUMENTS, "model.attention.restart_positions=false"), 1),
    "positions that restart": (("model.attention.kind=swa", DOCUMENTS), None),
}


def records(run: Path) -> list[dict]:
    """The run's metrics without its times and memory."""
    found, own = read_metrics(run / "metrics.jsonl"), ("tokens_per_second", "mfu", "memory_gib")
    return [{key: value for key, value in one.items() if key not in own} for one in found]


@pytest.fixture(autouse=True)
def alone():
    """Leave the groups that a run in this process makes."""
    yield
    leave_layout()


@pytest.mark.parametrize("case", CASES)
def test_one_at_a_time(case, shards, tmp_path, monkeypatch):
    settings, tables = CASES[case]
    made, alive, built = [], [], []
    model_input, loss = Trainer.model_input, TrainEngine._loss

    def count_made(self, *arguments, **options):
        one = model_input(self, *arguments, **options)
        made.append(weakref.ref(one))
        return one

    def count_alive(self, batch, forward):
        alive.append(sum(reference() is not None for reference in made))
        return loss(self, batch, forward)

    def count_built(positions, *arguments):
        built.append(positions.shape)
        return make_tables(positions, *arguments)

    make_tables = sequence_context.rope_tables
    monkeypatch.setattr(sequence_context, "rope_tables", count_built)
    monkeypatch.setattr(model, "rope_tables", count_built)
    monkeypatch.setattr(Trainer, "model_input", count_made)
    monkeypatch.setattr(TrainEngine, "_loss", count_alive)
    train(load_recipe(RECIPE, [f"run_dir={tmp_path / 'run'}", f"data.shards={shards}", *SETTINGS, *settings]))
    assert len(alive) == len(made) >= STEPS * ACCUMULATION
    assert max(alive) <= 2  # the one at work, and the next
    assert len(built) == (tables or len(made))

    # the losses are, to the last bit, those of micro-batches that are all there at once, each with its own tables
    def all_at_once(self, batches, measured):
        ready = list(inputs(self, batches, measured))
        return iter(ready)

    inputs = Trainer._inputs
    monkeypatch.setattr(Trainer, "_inputs", all_at_once)
    monkeypatch.setattr(Trainer, "_tables", None)
    for counted in (made, alive, built):
        counted.clear()
    train(load_recipe(RECIPE, [f"run_dir={tmp_path / 'before'}", f"data.shards={shards}", *SETTINGS, *settings]))
    assert max(alive) == ACCUMULATION and len(built) == len(made)
    assert records(tmp_path / "run") == records(tmp_path / "before")
