"""Bad input gets one sentence with the name, number or file, an exit code, and nothing written over."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from data_prep.prep import prepare
from launch.evaluate import evaluate
from launch.metrics import MetricsWriter
from launch.run_directory import find_tokenizer, read_metrics
from launch.train import optimizer_settings, train
from megatron_ext import deepspeed_compat
from megatron_ext.engine import TrainEngine, lr_at
from megatron_ext.parallel.layout import leave_layout, pick_device
from recipes.errors import UserError
from recipes.load import RecipeError, load_recipe
from tests.distributed import ROOT, free_port, rank_environment
from tests.launch.train_program import RECIPE


@pytest.fixture(scope="module", autouse=True)
def alone():
    """One world of one rank for the whole module, left behind clean."""
    before = dict(os.environ)
    yield
    leave_layout()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Path:
    """A run of two steps with its checkpoint."""
    run_dir = tmp_path_factory.mktemp("errors") / "run"
    train(recipe(run_dir, shards, "train.steps=2", "train.warmup_steps=0"))
    return run_dir


def recipe(run_dir: Path, shards: Path, *overrides: str):
    """tiny.yaml with these places and changes."""
    return load_recipe(RECIPE, [f"run_dir={run_dir}", f"data.shards={shards}", *overrides])


def longpitch(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "launch", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def files(folder: Path) -> dict[str, bytes]:
    """Every file under a folder, but for logs and locks."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "logs" not in p.parts}


def test_device_that_is_none():
    with pytest.raises(ValueError, match="device gpu is not one of auto, cpu, cuda"):
        pick_device("gpu")


def test_unknown_key_exits_2_with_a_hint():
    done = longpitch("train", "recipes/quickstart.yaml", "model.attention.blok_size=3", "run_dir=/nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("longpitch: ") and done.stderr.count("\n") == 1
    assert "blok_size" in done.stderr


def test_torchrun_ends_with_our_sentence(tmp_path):
    """Its report of what failed says what failed, with nothing but a line below."""
    note = str(tmp_path / "error.json")  # torchrun names such a file to every rank
    done = longpitch("train", "recipes/quickstart.yaml", "model.nonsense=3", TORCHELASTIC_ERROR_FILE=note)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=done.returncode, error_file=note)
    *_, said, line = str(ChildFailedError("launch", {0: failure})).strip().split("\n")
    assert said.endswith(done.stderr.strip().removeprefix("longpitch: ")) and set(line) == {"="}


def test_unknown_key_names_the_nearest():
    with pytest.raises(RecipeError, match=r"model.attention.windo: .*Did you mean.*'window'"):
        load_recipe(RECIPE, ["model.attention.windo=3"])


def test_missing_corpus_exits_1(tmp_path):
    done = longpitch(
        "prep", str(RECIPE), f"data.shards={tmp_path / 's'}", f"data.sources=[{{path: {tmp_path / 'no'}}}]"
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and f"{tmp_path / 'no'} does not exist" in done.stderr
    assert not (tmp_path / "s").exists()


def test_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    settings = [f"data.shards={tmp_path / 's'}", f"data.sources=[{{path: {tmp_path}}}]"]
    loaded = load_recipe(RECIPE, settings)
    with pytest.raises(ValueError, match="document"):
        prepare(loaded.data, seq_length=80, vocab_size=320)
    assert not (tmp_path / "s").exists()


def test_missing_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    settings = [f"data.shards={tmp_path / 's'}", f"data.sources=[{{path: {tmp_path}}}]"]
    loaded = load_recipe(RECIPE, [*settings, f"data.tokenizer={tmp_path / 'tokenizer'}"])
    with pytest.raises(UserError, match="tokenizer"):
        prepare(loaded.data, seq_length=80, vocab_size=320)


def test_missing_shards(tmp_path):
    with pytest.raises(UserError, match="longpitch prep"):
        train(recipe(tmp_path / "run", tmp_path / "nothing"))
    assert not (tmp_path / "run").exists()


def test_sequence_shorter_than_a_block():
    with pytest.raises(RecipeError, match=r"model.seq_length = 8: is shorter than one query block of 16"):
        load_recipe(RECIPE, ["model.seq_length=8", "train.tokens_per_step=80"])


def test_context_that_does_not_divide_the_world_is_said_once(tmp_path, shards):
    port = free_port()
    settings = [str(RECIPE), f"run_dir={tmp_path / 'run'}", f"data.shards={shards}", "parallel.context=3"]
    command = [sys.executable, "-m", "launch", "train", *settings]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(command, env=rank_environment(rank, 2, port), **options) for rank in range(2)]
    output = "".join(rank.communicate(timeout=60)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert output.count("does not divide the 2 processes started") == 1 and "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_heads_not_divisible_by_tensor():
    with pytest.raises(RecipeError, match=r"model.num_kv_heads = 2: is not divisible by parallel.tensor 4"):
        load_recipe(RECIPE, ["parallel.tensor=4"])


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_shard(tmp_path, shards, damage):
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    shard = next((copy / "train").glob("shard*"))
    if damage == "missing":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(UserError, match=str(shard)):
        train(recipe(tmp_path / "run", copy))


def test_checkpoint_of_another_model(trained, shards):
    before = files(trained)
    with pytest.raises(ValueError, match=r"model.ffn_size is 48 there and 64 in the recipe"):
        train(recipe(trained, shards, "model.ffn_size=64"))
    assert files(trained) == before


def test_checkpoint_of_another_stage(trained, shards):
    before = files(trained)
    with pytest.raises(ValueError, match="zero_stage 1, which stage 3"):
        train(recipe(trained, shards, "parallel.zero_stage=3"))
    assert files(trained) == before


def test_other_data_than_the_checkpoint(trained, shards):
    with pytest.raises(ValueError, match="seed"):
        train(recipe(trained, shards, "train.steps=3", "train.warmup_steps=0", "seed=99"))


@pytest.fixture(scope="module")
def other_shards(tmp_path_factory, shards) -> Path:
    """Shards of the same model by another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text.txt").write_text(Path(__file__).read_text() * 4)
    settings = [f"data.sources=[{{path: {folder}}}]", "data.heldout_fraction=0", "data.tokenizer_vocab_size=290"]
    made = load_recipe(RECIPE, [f"data.shards={folder / 'shards'}", *settings])
    return prepare(made.data, seq_length=80, vocab_size=320).folder


def test_shards_of_another_tokenizer(trained, shards, other_shards, tmp_path):
    more = ("train.steps=3", "train.warmup_steps=0")
    before = files(trained)
    with pytest.raises(ValueError, match="was trained with another tokenizer than that of"):
        train(recipe(trained, other_shards, *more))
    with pytest.raises(ValueError, match="was trained with another tokenizer than that of"):
        train(recipe(tmp_path / "new", other_shards, *more, f"model.init_from={trained}"))
    both = f"data.streams=[{{shards: {shards}, proportion: 1}}, {{shards: {other_shards}, proportion: 1}}]"
    with pytest.raises(ValueError, match="was tokenized with another tokenizer"):
        train(recipe(tmp_path / "mixed", shards, *more, both))
    assert files(trained) == before


def test_measuring_on_shards_of_another_tokenizer(trained, other_shards):
    with pytest.raises(ValueError, match="was tokenized with another tokenizer than the checkpoint"):
        evaluate(trained, sequences=1, device="cpu", overrides=[f"data.shards={other_shards}"])


def test_mixed_streams_and_a_url_train(shards, tmp_path):
    """Two streams, one of them behind a cache: the run trains, and its tokenizer is found again."""
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    both = f"data.streams=[{{shards: {shards}, proportion: 2}}, {{shards: 'file://{copy}', proportion: 1}}]"
    train(recipe(tmp_path / "run", f"file://{copy}", "train.steps=2", "train.warmup_steps=0", both))
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 2 and record["heldout_loss"] > 0
    assert find_tokenizer(tmp_path / "run").is_dir()


def test_init_from_another_model(trained, shards, tmp_path):
    with pytest.raises(ValueError, match="another model"):
        train(recipe(tmp_path / "new", shards, f"model.init_from={trained}", "model.ffn_size=64"))
    with pytest.raises(ValueError, match=r"sigma is 4.0 there and 8.0 in the recipe"):
        train(recipe(tmp_path / "newer", shards, f"model.init_from={trained}", "model.attention.sigma=8"))


def test_init_from_continues_with_a_fresh_optimizer(trained, shards, tmp_path):
    """FS-L from FS weights: the first loss is far below that of a fresh model only if the weights came along."""
    settings = ("model.attention.kind=freesolo_l", "model.attention.retain=64", "train.steps=1", "train.warmup_steps=0")
    train(recipe(tmp_path / "continued", shards, f"model.init_from={trained}", *settings))
    train(recipe(tmp_path / "fresh", shards, *settings))
    first, continued, fresh = (
        json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        for run in (trained, tmp_path / "continued", tmp_path / "fresh")
    )
    assert fresh["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert continued["loss"] < fresh["loss"] - 0.01 and continued["step"] == 1


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(shards, tmp_path, monkeypatch, stage, what):
    """The third of four: the weights stay as the second left them, and the schedule goes on as if it had been taken."""
    original, states = TrainEngine._loss, []

    def loss(engine, batch, forward):
        value = original(engine, batch, forward)
        if batch.context.step == 2 and what == "loss":
            return value + torch.inf
        if batch.context.step == 2 and value.requires_grad:
            value.register_hook(lambda gradient: gradient * torch.nan)
        return value

    def write(writer, record):
        written(writer, record)
        states.append([safe_get_full_fp32_param(p).clone() if stage else p.clone() for p in trainer[0].parameters()])

    def deepspeed(*arguments):
        trainer.append(arguments[0])
        return initialize(*arguments)

    trainer, written, initialize = [], MetricsWriter.write, deepspeed_compat.initialize
    monkeypatch.setattr(TrainEngine, "_loss", loss)
    monkeypatch.setattr(MetricsWriter, "write", write)
    monkeypatch.setattr(deepspeed_compat, "initialize", deepspeed)
    settings = ("train.steps=4", "train.warmup_steps=0", f"parallel.zero_stage={stage}")
    loaded = recipe(tmp_path / "run", shards, *settings, "train.skip_nonfinite=1")
    train(loaded)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss" if what == "loss" else "grad_norm"] is None for record in records] == [0, 0, 1, 0]
    assert [record["lr"] for record in records] == [lr_at(step, optimizer_settings(loaded)) for step in range(4)]
    _, second, third, fourth = states
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(third, fourth, strict=True))
    assert "step 3: loss" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_non_finite_loss_stops_with_step_rank_and_data(shards, tmp_path):
    """A learning rate that blows the model up: the run stops, and its weights and checkpoints stay what they were."""
    settings = ("train.lr=1e30", "train.min_lr=0", "train.warmup_steps=0", "train.clip=0", "checkpoint.interval=1")
    with pytest.raises(UserError, match=r"step \d+: loss .*rank 0: .*samples \["):
        train(recipe(tmp_path / "run", shards, *settings))
    assert list((tmp_path / "run" / "checkpoints").glob("step_*/complete.json"))
