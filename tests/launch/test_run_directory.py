"""What a run directory keeps of its metrics, whatever a kill or a disk has done to them; and what is drawn from it."""

import json
import logging
import shutil
import time
import warnings

import pytest

from launch.cli import _keep_quiet
from launch.evaluate import open_heldout
from launch.report import draw_losses
from launch.run_directory import RunDirectory, read_metrics
from recipes.errors import UserError
from recipes.schema import ModelConfig

DAMAGED = b'{"step": 3, "loss": \xff\xfe\n\n5\n{"step": "four"}\n{"step": 4, "lo'


def line(step: int, **more) -> bytes:
    """One line of metrics.jsonl."""
    return json.dumps({"step": step, "loss": 2.0, "tokens": 640 * step, **more}).encode() + b"\n"


@pytest.fixture
def run(tmp_path):
    """A run directory of rank 0."""
    made = RunDirectory(tmp_path / "run", rank=0)
    yield made
    made.close()


def test_rewinding_keeps_what_is_dropped(run):
    run.metrics.write_bytes(b"".join(map(line, (1, 2, 2, 3, 4))))
    run.rewind_metrics(2)
    assert run.metrics.read_bytes() == b"".join(map(line, (1, 2, 2)))
    run.rewind_metrics(1)
    assert run.metrics.read_bytes() == line(1)
    assert (run.logs / "replaced_metrics.jsonl").read_bytes() == b"".join(map(line, (3, 4, 2, 2)))


def test_rewinding_is_linear(run):
    run.metrics.write_bytes(b"".join(line(step, open_fraction=[0.5] * 28) for step in range(1, 100_001)))
    begin = time.process_time()
    run.rewind_metrics(50_000)
    assert time.process_time() - begin < 1
    assert len(read_metrics(run.metrics)) == 50_000


def test_bytes_that_are_no_text_are_no_steps(run):
    run.metrics.write_bytes(line(1) + line(2) + DAMAGED)
    assert [record["step"] for record in read_metrics(run.metrics)] == [1, 2]
    run.rewind_metrics(9)
    assert run.metrics.read_bytes() == line(1) + line(2)
    assert (run.logs / "replaced_metrics.jsonl").read_bytes() == DAMAGED + b"\n"


def test_a_whole_last_line_without_its_end_is_kept(run):
    run.metrics.write_bytes(line(1) + line(2)[:-1])
    run.rewind_metrics(2)
    assert run.metrics.read_bytes() == line(1) + line(2)


def test_report_draws_a_run_whose_shards_have_gone(run, tmp_path):
    run.metrics.write_bytes(line(1) + line(2) + DAMAGED)
    (run.path / "recipe.yaml").write_text(f"data: {{shards: {tmp_path / 'gone'}}}")
    draw_losses([run.path], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [b"", DAMAGED, b'{"step": 1, "loss": null, "tokens": 640}\n'])
def test_report_of_no_step_draws_nothing(run, tmp_path, content):
    run.metrics.write_bytes(content)
    with pytest.raises(UserError, match="holds no step with a finite loss"):
        draw_losses([run.path], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_measuring_without_a_heldout_split(shards, tmp_path):
    """The way out is other shards: those at hand cannot be given one."""
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["splits"]["heldout"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(copy / "heldout")
    step = tmp_path / "run" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    facts = {"step": 1, "tokens": 80, "layout": {}, "model": {}, "tokenizer": manifest["tokenizer_hash"]}
    (step / "complete.json").write_text(json.dumps(facts))
    (tmp_path / "run" / "recipe.yaml").write_text(f"data: {{shards: {copy}}}")
    with pytest.raises(UserError, match=r"has no held-out split .* data.shards=FOLDER"):
        open_heldout(step, ModelConfig(vocab_size=320), None, 1)


def test_libraries_say_nothing_of_their_own_future():
    with warnings.catch_warnings(record=True) as said:
        _keep_quiet()
        compile(r"'\d'", "library.py", "exec")
        warnings.warn("renamed", DeprecationWarning, stacklevel=1)
    assert not said
    assert not logging.getLogger("megatron.core.models.gpt.gpt_model").isEnabledFor(logging.WARNING)
