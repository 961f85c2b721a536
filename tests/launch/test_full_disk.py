"""A disk that is full ends a run with the path of what could not be written; a log that is full ends nothing."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launch.metrics import MetricsWriter
from launch.run_directory import RunDirectory, read_metrics
from recipes.errors import UserError

RECORD = {"loss": 1.0, "lr": 1e-3, "grad_norm": 0.5}


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes, as a full disk would; pytest writes its own output after."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_metrics_name_their_path(tmp_path, capsys):
    """What was written before can still be read, and closing says the same."""
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, tmp_path / "tensorboard", first_step=0, steps=3, log_interval=1)
    writer.write(RECORD | {"step": 1})
    for fails in (lambda: writer.write(RECORD | {"step": 2}), writer.close):
        with no_file_beyond(path.stat().st_size + 20), pytest.raises(UserError) as caught:
            fails()
        assert str(caught.value).startswith(f"{path} could not be written (File too large); free space")
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_tensorboard_names_its_path(tmp_path, capsys):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "board", first_step=0, steps=3, log_interval=1)
    sentence = rf"^{tmp_path / 'board'} could not be written \(File too large\)"
    with no_file_beyond(500), pytest.raises(UserError, match=sentence):
        for step in range(1, 300):  # it is written by a thread
            writer.write(RECORD | {"step": step})
            (tmp_path / "metrics.jsonl").write_text("")
            time.sleep(0.02)


def test_log_is_done_without(tmp_path, capsys):
    run = RunDirectory(tmp_path, rank=0)
    run.log.info("first")
    with no_file_beyond((tmp_path / "logs" / "rank_0.log").stat().st_size + 5):
        for word in ("second", "third"):
            run.log.info(word)
    said = [line for line in capsys.readouterr().err.splitlines() if "rank_0.log" in line]
    assert len(said) == 1 and "could not be written ([Errno 27] File too large); the run goes on without it" in said[0]
    run.close()
