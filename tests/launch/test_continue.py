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


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_loaded_in_bf16_passes_for_what_was_saved(found, stage):
    """With frozen weights: on two ranks from step 1, then on one rank from step 2."""
    assert (found[2][f"bf16 step {stage}"], found[1][f"bf16 step {stage}"]) == (2, 3)


def on_all(said: list[str]) -> str:
    """The sentence, which every rank said."""
    assert len(said) == 2 and said[0] == said[1] != "", said
    return said[0]


@pytest.mark.parametrize("stage", STAGES)
def test_another_choice_of_what_trains_is_refused_by_name(found, stage):
    sentence = on_all(found[2][f"freeze {stage}"]["said"])
    assert "step_3: decoder.layers.0." in sentence and "was trained in it and is frozen in the recipe" in sentence
    assert "set train.freeze and train.train_only back, or start another run_dir with model.init_from=" in sentence


@pytest.mark.parametrize("stage", [1, 3])
def test_another_precision_is_refused(found, stage):
    sentence = on_all(found[2][f"bf16 {stage}"]["said"])
    assert "was trained in fp32 and this run would go on in bf16: set train.precision=fp32, or" in sentence


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_another_rank_are_noticed(found, stage):
    assert "step_3: rank 0 has loaded another state than was saved" in on_all(found[2][f"swapped {stage}"]["said"])


def test_state_lost_in_a_conversion_is_noticed(found):
    (sentence,) = found[1]["conversion"]["said"]
    assert "step_3: the state that was loaded is not the one that was saved" in sentence


def test_rank_0_decides_where_all_go_on(found):
    assert found[2]["stale"]["said"] == ["", ""]
    assert found[2]["stale"]["steps"] == [[3], [3]]


def test_checkpoint_that_a_rank_does_not_see(found):
    sentence = on_all(found[2]["unseen"]["said"])
    assert sentence.startswith("rank 1: ") and "step_3/complete.json is not what rank 0 sees" in sentence


def test_run_directory_must_be_one_for_all(found):
    sentence = on_all(found[2]["two_folders"]["said"])
    assert sentence.startswith("rank 1: ") and "of_rank_1 on" in sentence and "a disk that all nodes share" in sentence


def test_save_that_is_not_on_one_disk_leaves_the_one_before(found):
    sentence = on_all(found[2]["unshared_save"]["said"])
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in sentence and "was written by rank 1 on" in sentence
    assert "step_3 is still there" in sentence
    assert found[2]["unshared_save"]["left"] == ["step_2", "step_3"]


def test_save_onto_a_full_disk_ends_all_ranks_and_frees_it(found):
    got = found[2]["full_disk"]
    sentence = on_all(got["said"])
    assert sentence.startswith("step 4 is not saved: rank 1 on ")
    assert "optim_states.pt could not be written (File too large); free space" in sentence
    assert got["left"] == ["step_2", "step_3"]
    assert got["again"] == ["", ""] and got["left again"] == ["step_2", "step_3", "step_4"]


def test_damaged_checkpoint_is_passed_over_and_kept(found):
    """The run goes on from step 2; what it saves at step 3 is its own."""
    got = found[2]["truncated"]
    assert got["said"] == ["", ""] and got["steps"] == [[2], [2]] and got["left"] == ["step_2", "step_3"]
    assert got["left again"] == ["step_2", "step_3", "step_3.damaged"]


def test_unreadable_checkpoint_is_named_with_the_one_before(found):
    got = found[2]["scribbled"]
    sentence = on_all(got["said"])
    assert f"{got['file']} cannot be read (" in sentence
    assert "the same command then goes on from" in sentence and sentence.endswith("step_2)")


def test_no_whole_checkpoint(found):
    got = found[2]["all_damaged"]
    assert "step_3 is damaged: its random_rank_1.pt is missing; no checkpoint of this run" in on_all(got["said"])
    assert got["left"] == ["step_2", "step_3"]
