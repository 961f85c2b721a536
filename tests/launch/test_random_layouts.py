"""Layouts drawn at random (LAYOUT_SEED) for four ranks train to one rank's losses."""

import os
import random

import pytest

from recipes.kinds import ATTENTION_KINDS
from tests.launch.runs import STAGES, Found, assert_same_run, job, run_jobs, run_jobs_alone, settings

pytestmark = pytest.mark.slow


def random_layouts(number: int, seed: int) -> list[tuple]:
    """(tensor, context, ZeRO stage, sequences of a micro-batch, kind) that four ranks can train 8 sequences with.

    Sorted: every new cut of the world leaves threads behind.
    """
    draw, found = random.Random(seed), set()
    while len(found) < number:
        tensor, context = draw.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
        micro = draw.choice([n for n in (1, 2, 4, 8) if 4 // (tensor * context) * n <= 8])
        found.add((tensor, context, draw.choice(STAGES), micro, draw.choice(ATTENTION_KINDS)))
    return sorted(found)


FOUR_RANKS = random_layouts(24, seed=int(os.environ.get("LAYOUT_SEED", "0")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> Found:
    """The layouts' runs, and each kind's on one rank."""
    folder = tmp_path_factory.mktemp("four")
    jobs = [
        job(folder, shards, str(number), *settings(kind, stage, context), f"parallel.tensor={tensor}",
            f"train.micro_batch={micro}")
        for number, (tensor, context, stage, micro, kind) in enumerate(FOUR_RANKS)
    ]  # fmt: skip
    kinds = sorted({layout[-1] for layout in FOUR_RANKS})
    one = [job(folder, shards, f"{kind} alone", *settings(kind, 1, 1)) for kind in kinds]
    return Found(run_jobs(folder, 4, jobs) | run_jobs_alone(folder, one))


@pytest.mark.parametrize("number", range(len(FOUR_RANKS)), ids=[" ".join(map(str, one)) for one in FOUR_RANKS])
def test_losses_do_not_depend_on_a_random_layout(runs, number):
    kind = FOUR_RANKS[number][-1]
    assert_same_run(runs[str(number)], runs[f"{kind} alone"], kind)
