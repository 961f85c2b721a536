"""Who is missing when a rank waits for the others in vain: each tells where it is through the store they share.

A collective that fails names an address at best. So every rank leaves a mark where it is, and when it fails says so;
who has said nothing a few seconds later is the one that has stopped, or was killed.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from launch.failures import in_time, is_group_error, name_ranks, one_line
from megatron_ext.parallel import collectives
from recipes.errors import UserError

GRACE = 5.0  # seconds that ranks differ in when they notice
WAY_OUT = "the same command goes on from the last checkpoint"
MOST_SAID = 300  # characters of another rank's sentence
COLLECTIVES = {"loss": "the sum of the loss", "stop": "the vote on stopping",
               "findings": "saying what is not finite",
               "checkpoint": "choosing, writing or reading a checkpoint"}  # fmt: skip

_mine: dict[str, Any] = {}


class PeerError(UserError):
    """Another rank has failed, stopped or gone; the message names it."""


def mark(step: int, part: int) -> None:
    """Tell the others that this rank is in `step`, and has done `part` of its micro-batches."""
    if dist.get_world_size() == 1:
        return
    _mine.update(step=step, part=part, time=time.time(), process=os.getpid(), host=socket.gethostname())
    with suppress(RuntimeError):  # torchrun is gone, and its store
        _store().set(f"longpitch/at/{dist.get_rank()}", json.dumps(_mine))


@contextmanager
def explained(timeout_seconds: float) -> Iterator[None]:
    """Tell the others if the block fails, and raise a PeerError if it fails because of one of them."""
    begin = time.monotonic()
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        because_of_others = is_group_error(error)
        said = "" if because_of_others else one_line(error)[:MOST_SAID]
        in_time(lambda: _store().set(f"longpitch/failed/{dist.get_rank()}", said), 2.0)
        if because_of_others:
            raise PeerError(_explain(error, min(timeout_seconds, time.monotonic() - begin))) from error
        raise


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _explain(error: Exception, waited: float) -> str:
    found = in_time(_ask, GRACE + 5)
    late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    if found is None:
        host = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
        return f"{host} has ended or does not answer, through which the ranks find each other; {WAY_OUT}"
    failed, silent = found
    in_time(lambda: _leave_last(set(silent)), 2 * GRACE)
    causes = {rank: said for rank, said in failed.items() if said}
    if causes:
        rank = min(causes)
        return f"{name_ranks(causes)} failed and this rank waited for it ({causes[rank]}); {WAY_OUT}"
    here = f"step {_mine['step']}, in {_collective()}" if _mine else f"the set-up, in {_collective()}"
    if not silent:
        return f"the ranks lost each other in {here} ({one_line(error)[:MOST_SAID]}); {WAY_OUT}"
    what = f"did not come within {waited:.0f} s" if late else "ended, or lost its connection,"
    return f"{name_ranks(silent)} {what} in {here}{_last_seen(silent)}; {WAY_OUT}"


def _ask() -> tuple[dict[int, str], dict[int, dict]]:
    """Ranks that have failed, with what they say, and those that are silent, with their last marks."""
    store, silent, failed = _store(), set(range(dist.get_world_size())), {}
    deadline = time.monotonic() + GRACE
    while silent and time.monotonic() < deadline and not any(failed.values()):
        for rank in sorted(silent):
            if store.check([f"longpitch/failed/{rank}"]):
                failed[rank] = store.get(f"longpitch/failed/{rank}").decode()
                silent.discard(rank)
        time.sleep(0.2)
    keys = {rank: f"longpitch/at/{rank}" for rank in silent}
    marks = {rank: json.loads(store.get(key)) if store.check([key]) else {} for rank, key in keys.items()}
    behind = {rank: at for rank, at in marks.items() if _place(at) < _place(_mine)}
    return failed, behind or marks  # whoever is as far as this rank waits like it, and has not noticed yet


def _leave_last(silent: set[int]) -> None:
    """Rank 0 holds the store where torchrun does not: it stays until the others have asked what they need."""
    _store().set(f"longpitch/asked/{dist.get_rank()}", "")
    if dist.get_rank() > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    waiting = set(range(1, dist.get_world_size())) - silent
    while waiting:
        waiting -= {rank for rank in waiting if _store().check([f"longpitch/asked/{rank}"])}
        time.sleep(0.1)
    time.sleep(1.0)  # they ask once more: who says it


def _place(at: dict) -> tuple[int, int]:
    return at.get("step", -1), at.get("part", -1)


def _collective() -> str:
    kind = collectives.doing["collective"]
    return COLLECTIVES.get(kind, f"the exchange of {kind}") if kind else "a collective of DeepSpeed's"


def _last_seen(silent: dict[int, dict]) -> str:
    at = silent[min(silent)]
    if not at:
        return ""
    return (
        f" (process {at['process']} on {at['host']}, last seen {time.time() - at['time']:.0f} s ago after micro-batch "
        f"{at['part']} of step {at['step']}; `py-spy dump --pid {at['process']}` there shows where it hangs)"
    )
