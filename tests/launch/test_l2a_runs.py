"""L2A's kinds in training: layouts, the gates' penalty and its figures, layers that leak, resuming."""

import pytest

from launch.train import Trainer
from megatron_ext.router import leak_draw
from recipes.kinds import L2A_KINDS
from recipes.load import load_recipe
from tests.launch.runs import STOP, Found, job, run_jobs, run_jobs_alone, settings
from tests.launch.train_program import RECIPE

# (kind, ZeRO stage, context ranks)
LAYOUTS = [("l2a", 1, 1), *[("l2a", stage, 2) for stage in range(4)], ("l2a_shared", 1, 2), ("l2a_freesolo", 1, 2),
           ("context_free", 1, 2)]  # fmt: skip
LOOKS_ONLY = "train.train_only=['attention','layernorm','router']"
LEAK = 0.5
LEAKS = f"model.attention.leak_probability={LEAK}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> Found:
    """First on two ranks, then on one, which also goes on from what two ranks saved."""
    folder = tmp_path_factory.mktemp("l2a")
    two = [
        job(folder, shards, f"{kind} z{stage} cp{context}", *settings(kind, stage, context))
        for kind, stage, context in LAYOUTS
    ]
    layout = (*settings("l2a", 1, 2), LOOKS_ONLY, LEAKS)
    two.append(job(folder, shards, "l2a stopped", *layout, stop_at=STOP))
    two.append(job(folder, shards, "l2a whole", *layout))
    copy = str(folder / "l2a_stopped")
    two.append(job(folder, shards, "l2a resumed", *layout, copy_from=copy))
    found = run_jobs(folder, 2, two)
    one = [job(folder, shards, f"{kind} alone", *settings(kind, 1, 1)) for kind in L2A_KINDS]
    alone = settings("l2a", 1, 1)
    one.append(job(folder, shards, "l2a micro 1", *alone, "train.micro_batch=1"))
    one.append(job(folder, shards, "l2a recomputed", *alone, "train.recompute=true"))
    summed = ("train.gate_penalty=0.000625", "train.gate_penalty_per=sequence", "train.log_interval=5")  # 0.05 / 80
    one.append(job(folder, shards, "l2a summed", *alone, *summed))
    one.append(job(folder, shards, "l2a free", *alone, "train.gate_penalty=0"))
    one.append(job(folder, shards, "l2a closed", *alone, "model.attention.closed_layers=[0]"))
    one.append(job(folder, shards, "l2a smaller", *alone, LOOKS_ONLY, LEAKS, copy_from=copy))
    one.append(job(folder, shards, "l2a tight", *alone, LOOKS_ONLY, "model.attention.leak_probability=0"))
    return Found(found | run_jobs_alone(folder, one) | {"folder": folder})


@pytest.mark.parametrize(("kind", "stage", "context"), LAYOUTS)
def test_l2a_does_not_depend_on_the_layout(runs, kind, stage, context):
    got, want = runs[f"{kind} z{stage} cp{context}"], runs[f"{kind} alone"]
    for figure in ("losses", "aux"):
        assert got[figure] == pytest.approx(want[figure], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert got["open"] == want["open"]


def test_penalty_does_not_depend_on_micro_batches(runs):
    for figure in ("losses", "aux"):
        assert runs["l2a micro 1"][figure] == pytest.approx(runs["l2a alone"][figure], rel=1e-5)
    assert runs["l2a recomputed"]["losses"] == runs["l2a alone"]["losses"]
    assert runs["l2a recomputed"]["aux"] == runs["l2a alone"]["aux"]


def test_penalty_is_summed_over_a_sequence_or_averaged_over_its_tokens(runs):
    """A sequence has 80 tokens; open fractions are there in the steps that are logged and in no other."""
    summed, averaged = runs["l2a summed"], runs["l2a alone"]
    for figure in ("losses", "aux"):
        assert summed[figure] == pytest.approx(averaged[figure], rel=1e-6)
    assert [step for step, share in zip(summed["steps"], summed["open"], strict=True) if share] == [5, 10]


def test_penalty_grows_from_the_warm_up_and_closes_gates(runs):
    """3 warm-up steps of 12. At the start every p is 0.5, so the penalty is a quarter of lambda."""
    run, free = runs["l2a alone"], runs["l2a free"]
    assert run["aux"][:3] == [0, 0, 0]
    assert 0.05 / 9 * 0.1 < run["aux"][3] < 0.05 / 9 * 0.5
    assert free["aux"] == [0] * 12
    assert run["losses"][:4] == free["losses"][:4] and run["losses"][6] != free["losses"][6]
    assert sum(run["open"][-1]) < sum(free["open"][-1])
    assert all(0 <= share <= 1 for shares in run["open"] for share in shares)


def test_pruned_layers_count_neither_in_the_penalty_nor_as_another_layer(runs):
    """One gate of two layers is left: the mean is over it alone, about p^2 = 1/4 at the first of 9 stairs."""
    run = runs["l2a closed"]
    assert 0.05 / 9 * 0.17 < run["aux"][3] < 0.05 / 9 * 0.35
    assert all(shares[0] == 0 for shares in run["open"]) and run["open"][0][1] > 0.5
    assert len(run["open"][0]) == len(runs["l2a alone"]["open"][0])


def test_l2a_with_frozen_mlp_resumes_on_as_many_and_on_fewer_ranks(runs):
    """Layers leak before the stop and after it, in some steps and not in others, and the run shows it."""
    leaks = [[leak_draw(LEAK, seed=1234, step=step, layer=layer) for layer in (1, 2)] for step in range(12)]
    assert all(0 < sum(map(sum, part)) < 2 * len(part) for part in (leaks[:STOP], leaks[STOP:-1]))
    tight, leaky = runs["l2a tight"]["losses"], runs["l2a smaller"]["losses"]
    differences = [abs(a - b) for a, b in zip(tight, leaky, strict=True)]
    assert min(max(differences[:STOP]), max(differences[STOP:])) > 3e-4  # rounding by layout is a tenth of that
    whole, resumed, smaller = runs["l2a whole"], runs["l2a resumed"], runs["l2a smaller"]
    assert runs["l2a stopped"]["steps"] == list(range(1, STOP + 1))
    assert (resumed["losses"], resumed["aux"], resumed["open"]) == (whole["losses"], whole["aux"], whole["open"])
    assert smaller["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert smaller["aux"] == pytest.approx(whole["aux"], rel=1e-5)


def test_resumed_run_counts_the_gates_as_the_last_logged_step_had_them(runs, shards, alone):
    """For the FLOP of the steps until the next one is logged, which is step 15 here."""
    again = job(runs["folder"], shards, "l2a summed", *settings("l2a", 1, 1))
    trainer = Trainer(load_recipe(RECIPE, again["settings"]))
    trainer.close()
    last = runs["l2a summed"]["open"][9]
    assert trainer.step == 12
    assert trainer.open_fraction == pytest.approx(sum(last) / len(last)) and trainer.open_fraction < 1
