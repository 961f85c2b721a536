"""One recipe, many layouts: the losses of `train` are those of one rank."""

import itertools

import pytest

from tests.launch.runs import (
    KINDS,
    STAGES,
    Found,
    assert_same_run,
    job,
    run_jobs,
    run_jobs_alone,
    settings,
)

TENSOR_LAYOUTS = [("freesolo", 0), ("freesolo_l", 1), ("l2a", 1), ("swa", 3)]  # (kind, ZeRO stage), tensor ranks 2
# one micro-batch a step: sums of several are rounded differently by stage 0 (test_accumulation.py holds their error)
BF16 = ("train.precision=bf16", "train.steps=3", "train.warmup_steps=0", "train.weight_decay=5", "train.micro_batch=8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> Found:
    """Every run of this module."""
    folder = tmp_path_factory.mktemp("layouts")
    two = [
        job(folder, shards, f"{kind} z{stage} cp{context}", *settings(kind, stage, context))
        for context, kind, stage in itertools.product((1, 2), KINDS, STAGES)
    ]
    for kind, stage in TENSOR_LAYOUTS:  # last: another cut of the world
        two.append(job(folder, shards, f"{kind} z{stage} tp2", *settings(kind, stage, 1), "parallel.tensor=2"))
    one = [job(folder, shards, f"{kind} alone", *settings(kind, 1, 1)) for kind in (*KINDS, "l2a")]
    one.append(job(folder, shards, "micro 1", *settings("freesolo", 1, 1), "train.micro_batch=1"))
    one.append(job(folder, shards, "micro 8", *settings("freesolo", 1, 1), "train.micro_batch=8"))
    one.append(job(folder, shards, "recomputed", *settings("freesolo_l", 1, 1), "train.recompute=true"))
    for stage in STAGES:
        one.append(job(folder, shards, f"bf16 z{stage}", *settings("swa", stage, 1), *BF16))
    return Found(run_jobs(folder, 2, two) | run_jobs_alone(folder, one))


@pytest.mark.parametrize(("context", "kind", "stage"), itertools.product((1, 2), KINDS, STAGES))
def test_losses_do_not_depend_on_the_layout(runs, context, kind, stage):
    want = runs[f"{kind} alone"]
    assert len(want["losses"]) == 20 and want["losses"][-1] < want["losses"][0] - 0.5
    assert_same_run(runs[f"{kind} z{stage} cp{context}"], want, kind)


@pytest.mark.parametrize(("kind", "stage"), TENSOR_LAYOUTS)
def test_losses_do_not_depend_on_tensor_ranks(runs, kind, stage):
    assert_same_run(runs[f"{kind} z{stage} tp2"], runs[f"{kind} alone"], kind)


def test_micro_batches_are_not_averaged_one_by_one(runs):
    """Labels are weighted and unevenly spread, so a mean of means would differ in the second digit."""
    assert runs["micro 1"]["losses"] == pytest.approx(runs["micro 8"]["losses"], rel=1e-6)
    assert runs["micro 1"]["losses"] == pytest.approx(runs["freesolo alone"]["losses"], rel=1e-6)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_bf16_weights_move_alike_from_the_first_step(runs, stage):
    """Each step's loss shows the updates before it, of which the first is the easiest to get wrong."""
    got, want = runs["bf16 z0"], runs[f"bf16 z{stage}"]
    assert want["losses"][2] < want["losses"][0] - 0.1
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)


def test_recomputation_changes_nothing(runs):
    assert runs["recomputed"]["losses"] == runs["freesolo_l alone"]["losses"]
