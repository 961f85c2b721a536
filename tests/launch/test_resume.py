"""A stopped run goes on bit-equal in its layout, and to rounding in another one."""

import pytest

from tests.launch.runs import STAGES, STOP, Found, job, run_jobs, settings

FROZEN = r"train.freeze=['mlp\.linear_fc1']"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> Found:
    """First on two ranks, then on one, which goes on from what two ranks saved."""
    folder = tmp_path_factory.mktemp("resume")
    two = [job(folder, shards, "thawed", *settings("freesolo_l", 1, 2))]
    for stage in STAGES:
        layout = settings("freesolo_l", stage, 2)
        two.append(job(folder, shards, f"stopped z{stage}", *layout, FROZEN, stop_at=STOP))
        two.append(job(folder, shards, f"whole z{stage}", *layout, FROZEN))
        copy = str(folder / f"stopped_z{stage}")
        two.append(job(folder, shards, f"resumed z{stage}", *layout, FROZEN, copy_from=copy))
    restaged = (*settings("freesolo_l", 1, 2), FROZEN)
    two.append(job(folder, shards, "restaged", *restaged, copy_from=str(folder / "stopped_z2")))
    found = run_jobs(folder, 2, two)
    one = []
    for stage in STAGES:
        copy = str(folder / f"stopped_z{stage}")
        one.append(job(folder, shards, f"smaller z{stage}", *settings("freesolo_l", stage, 1), FROZEN, copy_from=copy))
    return Found(found | run_jobs(folder, 1, one) | {"folder": folder})


@pytest.mark.parametrize("stage", STAGES)
def test_resumed_run_is_bit_equal(runs, stage):
    whole, stopped, resumed = (runs[f"{name} z{stage}"] for name in ("whole", "stopped", "resumed"))
    assert stopped["steps"] == list(range(1, STOP + 1))
    assert resumed["steps"] == list(range(1, 21))
    assert resumed["losses"] == whole["losses"] and resumed["norms"] == whole["norms"]
    assert resumed["heldout"] == whole["heldout"]


@pytest.mark.parametrize("stage", STAGES)
def test_resumes_on_fewer_ranks(runs, stage):
    """Through a universal checkpoint, with frozen weights and two groups of weight decay, which DeepSpeed loses."""
    whole, smaller = runs[f"whole z{stage}"], runs[f"smaller z{stage}"]
    assert smaller["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_resumes_at_another_stage(runs):
    """Two ranks read what one of them has converted."""
    assert runs["restaged"]["losses"] == pytest.approx(runs["whole z2"]["losses"], rel=1e-5)
    assert not list(runs["folder"].glob("restaged/checkpoints/*/*universal/*"))


def test_frozen_weights_change_the_run(runs):
    assert runs["whole z1"]["losses"][-1] != pytest.approx(runs["thawed"]["losses"][-1], rel=1e-4)
