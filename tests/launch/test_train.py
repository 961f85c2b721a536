"""One recipe, many layouts, interruptions and restarts: the losses of `train` stay what they are."""

import gc
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.host import host_folder
from launch.train import Trainer, short_collections
from megatron_ext.router import leak_draw
from recipes.kinds import ATTENTION_KINDS, L2A_KINDS
from recipes.load import load_recipe
from tests.distributed import ROOT, free_port, rank_environment, run_ranks
from tests.launch.train_program import RECIPE

KINDS = ("dense", "swa", "freesolo", "freesolo_l")
# (kind, ZeRO stage, context ranks), and a penalty so strong that the loss shows its gradient in a few steps
L2A_LAYOUTS = [("l2a", 1, 1), *[("l2a", stage, 2) for stage in range(4)], ("l2a_shared", 1, 2), ("l2a_freesolo", 1, 2),
               ("context_free", 1, 2)]  # fmt: skip
TENSOR_LAYOUTS = [("freesolo", 0), ("freesolo_l", 1), ("l2a", 1), ("swa", 3)]  # (kind, ZeRO stage), tensor ranks 2
PENALTY = ("train.gate_penalty=0.05", "train.gate_penalty_per=token", "model.attention.gate_temperature=1",
           "train.steps=12", "train.lr=3e-3")  # fmt: skip
STAGES = (0, 1, 2, 3)
STOP = 7
LOOKS_ONLY = "train.train_only=['attention','layernorm','router']"
LEAK = 0.5
LEAKS = f"model.attention.leak_probability={LEAK}"
BF16 = ("train.precision=bf16", "train.steps=3", "train.warmup_steps=0", "train.weight_decay=5")
FROZEN = r"train.freeze=['mlp\.linear_fc1']"


def job(runs: Path, shards: Path, name: str, *settings: str, **more) -> dict:
    """One entry of a train program's list."""
    fixed = [f"run_dir={runs / name.replace(' ', '_')}", f"data.shards={shards}"]
    return {"name": name, "settings": [*fixed, *settings], **more}


def run_jobs(folder: Path, world: int, jobs: list[dict]) -> dict:
    """Run the jobs in one launch on `world` ranks."""
    path = folder / f"jobs_{world}_{len(jobs)}.json"
    path.write_text(json.dumps(jobs))
    return run_ranks("tests.launch.train_program", world, str(path), timeout=600)


def settings(kind: str, stage: int, context: int) -> list[str]:
    """Overrides for a kind and a layout."""
    layout = [f"parallel.zero_stage={stage}", f"parallel.context={context}"]
    if kind == "l2a_freesolo":  # reads its whole pool: a rank that rounding turns moves the loss by 1e-5 at once
        layout.append("model.attention.top_k=6")
    return [f"model.attention.kind={kind}", *layout, *(PENALTY if kind in L2A_KINDS else [])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards) -> dict:
    """Every run of this module: first on two ranks, then on one, which also goes on from what two ranks saved."""
    folder = tmp_path_factory.mktemp("runs")
    two = [
        job(folder, shards, f"{kind} z{stage} cp{context}", *settings(kind, stage, context))
        for context, kind, stage in itertools.product((1, 2), KINDS, STAGES)
    ]
    for kind, stage, context in L2A_LAYOUTS:
        two.append(job(folder, shards, f"{kind} z{stage} cp{context}", *settings(kind, stage, context)))
    for stage in STAGES:
        layout = settings("freesolo_l", stage, 2)
        two.append(job(folder, shards, f"stopped z{stage}", *layout, FROZEN, stop_at=STOP))
        two.append(job(folder, shards, f"whole z{stage}", *layout, FROZEN))
        copy = str(folder / f"stopped_z{stage}")
        two.append(job(folder, shards, f"resumed z{stage}", *layout, FROZEN, copy_from=copy))
    restaged = (*settings("freesolo_l", 1, 2), FROZEN)
    two.append(job(folder, shards, "restaged", *restaged, copy_from=str(folder / "stopped_z2")))
    layout = (*settings("l2a", 1, 2), LOOKS_ONLY, LEAKS)
    two.append(job(folder, shards, "l2a stopped", *layout, stop_at=STOP))
    two.append(job(folder, shards, "l2a whole", *layout))
    two.append(job(folder, shards, "l2a resumed", *layout, copy_from=str(folder / "l2a_stopped")))
    for kind, stage in TENSOR_LAYOUTS:  # last: another cut of the world
        two.append(job(folder, shards, f"{kind} z{stage} tp2", *settings(kind, stage, 1), "parallel.tensor=2"))
    found = run_jobs(folder, 2, two)
    one = [job(folder, shards, f"{kind} alone", *settings(kind, 1, 1)) for kind in ATTENTION_KINDS]
    one.append(job(folder, shards, "l2a micro 1", *settings("l2a", 1, 1), "train.micro_batch=1"))
    one.append(job(folder, shards, "l2a recomputed", *settings("l2a", 1, 1), "train.recompute=true"))
    summed = ("train.gate_penalty=0.000625", "train.gate_penalty_per=sequence", "train.log_interval=5")  # 0.05 / 80
    one.append(job(folder, shards, "l2a summed", *settings("l2a", 1, 1), *summed))
    one.append(job(folder, shards, "l2a free", *settings("l2a", 1, 1), "train.gate_penalty=0"))
    closed = "model.attention.closed_layers=[0]"
    one.append(job(folder, shards, "l2a closed", *settings("l2a", 1, 1), closed))
    one.append(job(folder, shards, "micro 1", *settings("freesolo", 1, 1), "train.micro_batch=1"))
    one.append(job(folder, shards, "micro 8", *settings("freesolo", 1, 1), "train.micro_batch=8"))
    one.append(job(folder, shards, "recomputed", *settings("freesolo_l", 1, 1), "train.recompute=true"))
    for stage in STAGES:
        one.append(job(folder, shards, f"bf16 z{stage}", *settings("swa", stage, 1), *BF16))
        copy = str(folder / f"stopped_z{stage}")
        one.append(job(folder, shards, f"smaller z{stage}", *settings("freesolo_l", stage, 1), FROZEN, copy_from=copy))
    copy = str(folder / "l2a_stopped")
    one.append(job(folder, shards, "l2a smaller", *settings("l2a", 1, 1), LOOKS_ONLY, LEAKS, copy_from=copy))
    one.append(
        job(folder, shards, "l2a tight", *settings("l2a", 1, 1), LOOKS_ONLY, "model.attention.leak_probability=0")
    )
    return found | run_jobs(folder, 1, one) | {"folder": folder}


def assert_same_run(got: dict, want: dict, kind: str) -> None:
    """Two layouts' losses agree to 1e-5, gradient norms to 1e-4.

    Where rounding turns FreeSolo's choice between two cells that are nearly equal, losses are 1e-5 apart from then on:
    3e-5 was seen for one layout of 16 with megatron-core 0.19, 2e-5 in l2a_freesolo's penalty for one. So the second
    half of a run that chooses is held to 1e-4.
    """
    chooses = kind in ("freesolo", "freesolo_l", "l2a_freesolo")
    sure = len(want["losses"]) // 2 if chooses else len(want["losses"])
    for figure, rel in (("losses", 1e-5), ("aux", 1e-5), ("norms", 1e-4)):
        assert got[figure][:sure] == pytest.approx(want[figure][:sure], rel=rel)
    for figure in ("losses", "heldout"):
        assert got[figure] == pytest.approx(want[figure], rel=1e-4 if chooses else 1e-5)


@pytest.mark.parametrize(("context", "kind", "stage"), itertools.product((1, 2), KINDS, STAGES))
def test_losses_do_not_depend_on_the_layout(runs, context, kind, stage):
    want = runs[f"{kind} alone"]
    assert len(want["losses"]) == 20 and want["losses"][-1] < want["losses"][0] - 0.5
    assert_same_run(runs[f"{kind} z{stage} cp{context}"], want, kind)


@pytest.mark.parametrize(("kind", "stage"), TENSOR_LAYOUTS)
def test_losses_do_not_depend_on_tensor_ranks(runs, kind, stage):
    assert_same_run(runs[f"{kind} z{stage} tp2"], runs[f"{kind} alone"], kind)


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
def four(tmp_path_factory, shards) -> dict:
    """The random layouts' runs."""
    folder = tmp_path_factory.mktemp("four")
    jobs = [
        job(folder, shards, str(number), *settings(kind, stage, context), f"parallel.tensor={tensor}",
            f"train.micro_batch={micro}")
        for number, (tensor, context, stage, micro, kind) in enumerate(FOUR_RANKS)
    ]  # fmt: skip
    return run_jobs(folder, 4, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FOUR_RANKS)), ids=[" ".join(map(str, one)) for one in FOUR_RANKS])
def test_losses_do_not_depend_on_a_random_layout(runs, four, number):
    kind = FOUR_RANKS[number][-1]
    assert_same_run(four[str(number)], runs[f"{kind} alone"], kind)


@pytest.mark.parametrize(("kind", "stage", "context"), L2A_LAYOUTS)
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


@pytest.mark.parametrize("stage", STAGES)
def test_resumed_run_is_bit_equal(runs, stage):
    whole, stopped, resumed = (runs[f"{name} z{stage}"] for name in ("whole", "stopped", "resumed"))
    assert stopped["steps"] == list(range(1, STOP + 1))
    assert resumed["steps"] == list(range(1, 21))
    assert resumed["losses"] == whole["losses"] and resumed["norms"] == whole["norms"]
    assert resumed["heldout"] == whole["heldout"]


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
    assert runs["whole z1"]["losses"][-1] != pytest.approx(runs["freesolo_l z1 cp2"]["losses"][-1], rel=1e-4)


def start(run_dir: Path, shards: Path, *overrides: str, world: int = 2) -> list[subprocess.Popen]:
    """Start `longpitch train` on two ranks as torchrun would."""
    port = free_port()
    command = [sys.executable, "-m", "launch", "train", str(RECIPE), f"run_dir={run_dir}", f"data.shards={shards}"]
    command += [*settings("freesolo", 1, 2), "checkpoint.interval=3", *overrides]
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=rank_environment(rank, world, port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(world)
    ]


def steps_done(run_dir: Path) -> int:
    """Lines of the run's metrics so far."""
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_step(run_dir: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Block until the run has written the metrics of `step`."""
    deadline = time.monotonic() + 120
    while steps_done(run_dir) < step:
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.01)


def finish(processes: list[subprocess.Popen]) -> tuple[list[int], str]:
    """Exit codes and rank 0's output."""
    output = [process.communicate(timeout=120)[0].decode() for process in processes]
    return [process.returncode for process in processes], output[0]


def losses(run_dir: Path) -> list[float]:
    """The losses that metrics.jsonl holds."""
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_killed_run_goes_on_bit_equal(runs, shards):
    """SIGKILL at a random step; the same command again; then SIGTERM, which saves and exits 0; and again to the end."""
    run_dir = runs["folder"] / "killed"
    step = random.SystemRandom().randint(1, 14)
    print("killed after step", step)
    processes = start(run_dir, shards)
    wait_for_step(run_dir, step, processes)
    for process in processes:
        process.kill()
    finish(processes)

    processes = start(run_dir, shards)
    wait_for_step(run_dir, min(step + 2, 16), processes)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, output = finish(processes)
    assert codes == [0, 0], output
    newest = max(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/*/complete.json"))
    assert newest == steps_done(run_dir)

    codes, output = finish(start(run_dir, shards))
    assert codes == [0, 0], output
    assert losses(run_dir) == runs["freesolo z1 cp2"]["losses"]
    assert len(list(run_dir.glob("checkpoints/step_*"))) == 2  # the newest checkpoint.keep
    assert output.count("resumed from") == 1  # said by one rank only

    codes, output = finish(start(run_dir, shards))
    assert codes == [0, 0] and "already trained to step 20" in output
    assert not host_folder(run_dir).with_suffix(".job").exists()


def test_two_jobs_do_not_share_a_run_directory(runs, shards):
    import fcntl

    run_dir = runs["folder"] / "shared"
    run_dir.mkdir()
    with open(run_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        codes, output = finish(start(run_dir, shards, "parallel.context=1", world=1))
    assert codes == [1] and "another job is training here" in output
    assert "Traceback" not in output


def test_vanished_shard_ends_all_ranks(runs, shards):
    """A shard that disappears while the run reads it: exit code 1 on the rank that saw it, in seconds, not a hang."""
    copy = runs["folder"] / "vanishing"
    shutil.copytree(shards, copy)
    run_dir = runs["folder"] / "vanished"
    begin = time.monotonic()
    processes = start(run_dir, copy, "train.steps=100000", "checkpoint.interval=0", "data.timeout_seconds=10")
    wait_for_step(run_dir, 2, processes)
    for shard in (copy / "train").glob("shard*"):
        os.truncate(shard, 8)
    deadline = time.monotonic() + 90
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert any(process.returncode == 1 for process in processes), time.monotonic() - begin
    for process in processes:
        process.kill()
    output = finish(processes)[1]
    assert "Traceback" not in output and ("shard" in output or "rank" in output)


def test_resumed_run_counts_the_gates_as_the_last_logged_step_had_them(runs, shards, alone):
    """For the FLOP of the steps until the next one is logged, which is step 15 here."""
    again = job(runs["folder"], shards, "l2a summed", *settings("l2a", 1, 1))
    trainer = Trainer(load_recipe(RECIPE, again["settings"]))
    trainer.close()
    last = runs["l2a summed"]["open"][9]
    assert trainer.step == 12
    assert trainer.open_fraction == pytest.approx(sum(last) / len(last)) and trainer.open_fraction < 1


def test_garbage_collection_leaves_out_what_was_set_up():
    """What is made inside is still collected; afterwards everything is again."""
    before = [[]]  # a list of containers, which the collector follows
    with short_collections():
        inside = [[]]
        followed = {id(x) for x in gc.get_objects()}
        assert id(inside) in followed and id(before) not in followed
        assert len(followed) < 10_000
        inside.append(inside)
        del inside
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0
    assert id(before) in {id(x) for x in gc.get_objects()}
