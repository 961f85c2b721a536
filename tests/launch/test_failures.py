"""What the command says when it fails: one sentence, once for all ranks, and where the traceback is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch import failures, train
from launch.failures import explain, name_ranks, note_run_directory, report
from recipes.errors import UserError
from tests.distributed import ROOT


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A run directory that is known, for one process."""
    monkeypatch.setattr(failures, "_run_directory", [])
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    note_run_directory(tmp_path / "run")
    return tmp_path / "run"


def raised(error: Exception) -> Exception:
    """The error with a traceback."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_users_error_is_its_sentence(place, capsys):
    assert report(raised(UserError("data.shards\nis no folder"))) == 1
    assert capsys.readouterr().err == "longpitch: data.shards is no folder\n"
    assert not place.exists()


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, KeyError, AssertionError])
def test_any_other_error_keeps_its_traceback_in_the_log(place, capsys, kind):
    """A library's ValueError and OSError too."""
    assert report(raised(kind("what a library says"))) == 1
    said = capsys.readouterr().err
    log = place / "logs" / "rank_0.log"
    assert said.count("\n") == 1 and kind.__name__ in said and "what a library says" in said and str(log) in said
    assert "Traceback" in log.read_text() and "in raised" in log.read_text()


def test_without_a_run_directory_the_traceback_is_on_the_screen(place, capsys):
    failures._run_directory.clear()
    report(raised(ValueError("deep inside")))
    trace, _, sentence = capsys.readouterr().err.rpartition("longpitch: ")
    assert trace.startswith("Traceback") and "deep inside" in sentence and sentence.endswith("is above\n")


def test_a_log_that_cannot_be_written_loses_no_traceback(place, capsys):
    place.write_text("a file where the run directory should be")
    report(raised(ValueError("deep inside")))
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_says_what_to_lower(error):
    assert explain(error).startswith("out of memory on ") and "train.micro_batch" in explain(error)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"),
        dist.DistStoreError("wait timeout after 60000ms"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]"
        ),
    ],
)
def test_errors_of_nccl_and_gloo_say_where_to_look(error):
    assert "another rank" in explain(error) and "goes on from the last checkpoint" in explain(error)


def test_no_sentence_fills_the_screen(place, capsys):
    report(raised(UserError("x" * 100_000)))
    assert len(capsys.readouterr().err) < 2100


def test_ranks_are_named_as_spans():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([9, 0, 1, 2, 4]) == "ranks 0-2, 4, 9"
    assert name_ranks(range(1024)) == "ranks 0-1023"


def test_findings_of_1024_ranks_are_one_short_sentence():
    alike = [("decoder.layers.3.mlp", [8 * rank + n for n in range(8)]) for rank in range(1024)]
    assert train._findings(alike).startswith("ranks 0-1023: decoder.layers.3.mlp, samples [0, 1, 2,")
    alike[7] = ("the loss", [56])
    assert "ranks 0-6, 8-1023: decoder" in train._findings(alike)
    assert "rank 7: the loss, samples [56];" in train._findings(alike)
    assert len(train._findings([(f"decoder.layers.{rank}", [rank]) for rank in range(1024)])) < 1000


RANKS = """
import os, sys
from multiprocessing import Process
import torch.distributed as dist
from tests.distributed import free_port
def one(rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    from launch.failures import report
    from recipes.errors import UserError
    report(UserError("found by all " + "y" * 100_000))
    report(UserError(f"shard {rank} is damaged"))
    if rank == 5:
        report(UserError("found by one"))
if __name__ == "__main__":
    port = free_port()
    ranks = [Process(target=one, args=(rank, port)) for rank in range(8)]
    for rank in ranks: rank.start()  # before the store has threads, which a fork would leave behind
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for rank in ranks: rank.join()
"""


def test_what_many_ranks_find_alike_is_said_once():
    """Through torchrun's store, which is there before the ranks have a group."""
    command = [sys.executable, "-c", RANKS]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    said = sorted(line.partition(": ")[2].split(" ")[0] + line[-9:] for line in done.stderr.splitlines())
    assert [one[:5] for one in said] == ["found", "found", "shard"], done.stderr[:3000]
    assert len(done.stderr) < 5000
