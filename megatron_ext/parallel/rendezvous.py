"""The ranks of one start of a job find each other, whatever an earlier start has left in torchrun's store.

torchrun keeps its store when it starts the ranks again, and torch's process groups look there for keys that the killed
ranks wrote: new ranks then connect to dead ones and wait for ever. The number of the restart is no help, since each
node counts its own. So rank 0 draws a name for the start, and gives it to every rank that asks now.
"""

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from recipes.errors import UserError

POLL_SECONDS = 0.05
MOST_NAMED = 8  # ranks in the sentence


def torchruns_store(timeout: timedelta) -> dist.Store | None:
    """The store that torchrun offers its ranks, None where there is none (rank 0 then makes a new one)."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, is_master=False, timeout=timeout)


def own_part(store: dist.Store, *, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The part of `store` that belongs to this start of the job alone. Every rank calls it.

    Raises:
        UserError: a rank did not come in time.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _give(store, name, world, timeout)
        return dist.PrefixStore(name, store)
    question = uuid.uuid4().hex
    store.set(f"longpitch/asks/{rank}", question)
    try:
        store.wait([f"longpitch/answer/{question}"], timeout)
    except dist.DistError as error:
        raise UserError(
            f"rank {rank} waited {timeout.total_seconds():g} s for rank 0 to start; see what rank 0 says, or raise "
            "parallel.timeout_seconds"
        ) from error
    name = store.get(f"longpitch/answer/{question}").decode()
    store.set(f"longpitch/came/{name}/{rank}", "")
    return dist.PrefixStore(name, store)


def _give(store: dist.Store, name: str, world: int, timeout: timedelta) -> None:
    """Answer every rank's question of this start: an older one is answered too, but nobody hears it."""
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, str] = {}
    waiting = set(range(1, world))
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"longpitch/came/{name}/{rank}"]):
                waiting.discard(rank)
            elif store.check([f"longpitch/asks/{rank}"]):
                question = store.get(f"longpitch/asks/{rank}").decode()
                if answered.get(rank) != question:
                    store.set(f"longpitch/answer/{question}", name)
                    answered[rank] = question
        if waiting and time.monotonic() > deadline:
            named = ", ".join(map(str, sorted(waiting)[:MOST_NAMED])) + ", ..." * (len(waiting) > MOST_NAMED)
            raise UserError(
                f"rank 0 waited {timeout.total_seconds():g} s for ranks that did not start: {named}; see what they "
                "say, or raise parallel.timeout_seconds"
            )
        time.sleep(POLL_SECONDS)
