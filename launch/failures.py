"""What a person reads when a command fails: one sentence, said once however many ranks find it, and no lost traceback.

A UserError is its own sentence. Everything else is a fault: its traceback goes to the run's logs/rank_N.log, or to the
screen where no run directory is known, and the sentence says where. Imports no torch, which a wrong recipe need not
wait for.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from recipes.errors import UserError
from recipes.load import RecipeError

LONGEST = 2000  # characters of a sentence on the screen
STORE_SECONDS = 5.0  # how long the other ranks are asked whether they have said it already
MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc")
GROUP = re.compile(r"\b(gloo|nccl)\b|connection closed by peer|connectFullMesh|store->get|wait timeout after", re.I)
LESS_MEMORY = (
    "lower train.micro_batch, train.loss_chunk or model.seq_length, set train.recompute=true, raise parallel.context "
    "or parallel.zero_stage, or use more GPUs"
)
PEERS = (
    "another rank has ended or does not answer: what it said, or its own logs/rank_N.log, has the cause; the same "
    "command goes on from the last checkpoint"
)

_run_directory: list[Path] = []


def note_run_directory(path: str | Path) -> None:
    """Where tracebacks go from now on."""
    _run_directory[:] = [Path(path)]


def report(error: Exception) -> int:
    """Say what has failed, keep the traceback of what is no UserError; returns the exit code."""
    if isinstance(error, UserError):
        sentence = one_line(error)
        _log("".join(traceback.format_exception(error)), only_if_there=True)
    else:
        trace = "".join(traceback.format_exception(error))
        path = _log(trace)
        sentence = f"{explain(error)}; the traceback is {f'in {path}' if path else 'above'}"
        if path is None and _is_first(trace.rsplit("\n", 2)[-2]):
            print(trace, file=sys.stderr)
    sentence = _cut(sentence)
    if _is_first(sentence, everywhere=isinstance(error, RecipeError)):
        who = f"longpitch (rank {_rank()})" if "RANK" in os.environ else "longpitch"
        print(f"{who}: {sentence}", file=sys.stderr, flush=True)
    _tell_torchrun(sentence)
    return 2 if isinstance(error, RecipeError) else getattr(error, "exit_code", 1)


def explain(error: Exception) -> str:
    """One sentence for an error that is no UserError, with the way out where its kind is known."""
    text = one_line(error)
    if isinstance(error, MemoryError) or MEMORY.search(text):
        device = "a GPU" if "CUDA" in text or "HIP" in text else "this machine"
        return f"out of memory on {device} ({_cut(text, 300)}): {LESS_MEMORY}"
    if is_group_error(error):
        return f"{_cut(text, 300)}: {PEERS}"
    return f"an error that Longpitch does not know, {type(error).__name__}: {_cut(text, 600)}"


def is_group_error(error: Exception) -> bool:
    """Whether talking to other ranks has failed: whatever NCCL, gloo or torch's store raise."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and GROUP.search(str(error)) is not None


def one_line(error: Exception) -> str:
    """The words of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a person writes them: `rank 3`, `ranks 0-7, 9`."""
    ranks, spans = sorted(ranks), []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"


def in_time(ask: Callable[[], Any], seconds: float = STORE_SECONDS) -> Any:
    """What `ask` returns, None if it fails or takes longer: a rank that has stopped must not stop this one."""
    answer: list[Any] = []

    def work() -> None:
        with contextlib.suppress(Exception):
            answer.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def _log(text: str, *, only_if_there: bool = False) -> Path | None:
    """Append to this rank's log; returns its path, None where that is not possible."""
    for run in _run_directory:
        path = run / "logs" / f"rank_{_rank()}.log"
        with contextlib.suppress(OSError):
            if not only_if_there:
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_dir():
                with open(path, "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
                return path
    return None


def _is_first(sentence: str, *, everywhere: bool = False) -> bool:
    """Whether this rank is the one that says it: the first one to ask, numbers apart. All do where none can be asked.

    Args:
        everywhere: every rank is sure to find the same, and rank 0 to be among them.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    if everywhere:
        return _rank() == 0
    alike = hashlib.sha256(re.sub(r"\d+", "#", sentence).encode()).hexdigest()[:16]
    import torch.distributed  # noqa: F401 - takes longer than the answer may

    said = in_time(lambda: _store().add(f"longpitch/said/{alike}", 1))
    return said is None or said == 1


def _store() -> Any:
    """The store that the ranks share: the process group's, or before there is one torchrun's own."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError("no store to ask")
    from datetime import timedelta

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _tell_torchrun(sentence: str) -> None:
    """Leave the sentence where torchrun looks for the cause, which it prints last of all, below its own traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        cause = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": cause}))
