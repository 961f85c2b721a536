"""A run that goes on does so by its recipe: rates, constants of the optimizer, clipping, counts."""

import pytest
import torch

from launch.train import TrainingError, train
from megatron_ext.engine import TrainEngine
from recipes.load import load_recipe
from tests.distributed import run_ranks
from tests.launch.continue_program import RECIPE, STAGES, settings


@pytest.fixture(scope="module")
def found(tmp_path_factory, shards) -> dict:
    """What the step after a resume did, on two ranks, and on one from what two saved."""
    folder = tmp_path_factory.mktemp("continue")
    program = "tests.launch.continue_program"
    for name in ("two", "one"):
        (folder / name).mkdir()
    two = run_ranks(program, 2, str(folder / "two"), str(shards), str(folder / "first"))
    one = run_ranks(program, 1, str(folder / "one"), str(shards), str(folder / "first"))
    return {2: two, 1: one}


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_the_recipe_holds_from_the_first_step_on(found, stage, ranks):
    """Matrices decay and the others do not; on one rank the checkpoint goes through the universal form."""
    got = found[ranks][f"stage {stage}"]
    others = {"lr": 0.0, "betas": [0.5, 0.6], "eps": 1e-3}
    assert got["groups"] == [others | {"weight_decay": 0.7}, others | {"weight_decay": 0.0}]
    assert got["clip"] == 0.25
    assert (got["lr"], got["moved"], got["step"]) == (0.0, False, 4)


def test_steps_that_were_not_finite_count_for_the_whole_run(alone, shards, tmp_path, monkeypatch):
    """One is allowed. The second one ends the run although another process has counted the first."""
    original, bad = TrainEngine._loss, {1}

    def loss(engine, batch, forward):
        return original(engine, batch, forward) + (torch.inf if batch.context.step in bad else 0.0)

    monkeypatch.setattr(TrainEngine, "_loss", loss)
    common = [*settings(tmp_path / "run", str(shards), 1), "train.skip_nonfinite=1"]
    train(load_recipe(RECIPE, [*common, "train.steps=3"]))
    bad.add(3)
    with pytest.raises(TrainingError, match=r"step 4: .*skip_nonfinite allows 1"):
        train(load_recipe(RECIPE, [*common, "train.steps=5"]))
