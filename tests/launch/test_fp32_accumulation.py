"""Runs whose bf16 gradients are summed in fp32 save and resume as others do: bit for bit, and on fewer ranks."""

import json
from pathlib import Path

import pytest

from tests.distributed import run_ranks

STAGES = (0, 1, 2, 3)
STOP, STEPS = 2, 4
BF16 = ("train.precision=bf16", f"train.steps={STEPS}", "train.warmup_steps=0", "train.micro_batch=1",
        "model.attention.kind=swa", "train.lr=3e-3", r"train.freeze=['mlp\.linear_fc1']")  # fmt: skip


def job(folder: Path, shards: Path, name: str, stage: int, **more) -> dict:
    """A run of 8 micro-batches a step in all."""
    layout = [f"run_dir={folder / name}", f"data.shards={shards}", f"parallel.zero_stage={stage}"]
    return {"name": name, "settings": [*layout, *BF16], **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> dict:
    """Whole, stopped and resumed runs on two ranks, then those that one rank continues."""
    folder = tmp_path_factory.mktemp("accumulation")
    two, one = [], []
    for stage in STAGES:
        copy = str(folder / f"stopped{stage}")
        two.append(job(folder, shards, f"whole{stage}", stage))
        two.append(job(folder, shards, f"stopped{stage}", stage, stop_at=STOP))
        two.append(job(folder, shards, f"resumed{stage}", stage, copy_from=copy))
        one.append(job(folder, shards, f"fewer{stage}", stage, copy_from=copy))
    found = {}
    for world, jobs in ((2, two), (1, one)):
        path = folder / f"jobs_{world}.json"
        path.write_text(json.dumps(jobs))
        found |= run_ranks("tests.launch.train_program", world, str(path))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_resumes_bit_for_bit(runs, stage):
    assert runs[f"stopped{stage}"]["steps"] == [1, 2]
    assert runs[f"resumed{stage}"]["losses"] == runs[f"whole{stage}"]["losses"]
    assert runs[f"resumed{stage}"]["norms"] == runs[f"whole{stage}"]["norms"]


@pytest.mark.parametrize("stage", STAGES)
def test_goes_on_on_one_rank(runs, stage):
    whole, fewer = runs[f"whole{stage}"]["losses"], runs[f"fewer{stage}"]["losses"]
    assert fewer[:STOP] == whole[:STOP]
    assert fewer[STOP:] == pytest.approx(whole[STOP:], rel=3e-4)  # bf16; the order of sums is another
    assert whole[0] - whole[-1] > 0.1


@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_agree(runs, stage):
    assert runs[f"whole{stage}"]["losses"] == pytest.approx(runs["whole0"]["losses"], rel=3e-4)
