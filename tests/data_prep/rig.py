"""Splits whose sequence i holds only the number i, and ranks that read them in processes of their own.

The processes come from a fork server that has done the imports, so a launch costs a fraction of a second.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["data_prep.loader", "data_prep.prep"])
LAUNCH_SECONDS = 60.0


def write_split(folder: Path, samples: list[dict[str, np.ndarray]], *, per_shard: int = 5) -> Path:
    """Write samples as they are to `folder`; every column has the shape it has in the first sample."""
    first = samples[0]
    columns = {k: f"ndarray:{v.dtype.name}:{len(v)}" for k, v in first.items() if k != "doc_lengths"}
    columns["doc_lengths"] = "ndarray:uint32"
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh64"], size_limit=None) as writer:
        for number, sample in enumerate(samples, start=1):
            writer.write(sample)
            if number % per_shard == 0 and number < len(samples):
                writer.flush_shard()
                writer._reset_cache()
    return folder


def numbered(count: int, seq_length: int = 8) -> list[dict[str, np.ndarray]]:
    """Samples of one document each, in which every token of sample i is i."""
    lengths = np.array([seq_length], dtype=np.uint32)
    return [{"tokens": np.full(seq_length, i, np.uint16), "doc_lengths": lengths} for i in range(count)]


def read_steps(loader, steps: int) -> list[list[int]]:
    """The numbers that this rank receives, step by step; the ids must agree with the contents."""
    result = []
    for _ in range(steps):
        step: list[int] = []
        for _ in range(loader.micro_batches_per_step):
            batch = next(loader)
            assert batch.tokens[:, 0].tolist() == batch.sample_ids
            step += batch.sample_ids
        loader.step_done()
        result.append(step)
    return result


def read_and_state(shards: Path, steps: int, state: dict | None, temp_dir: str, numbers: dict) -> tuple[list, dict]:
    """Rank program: read some steps, from `state` if there is one; returns them and the state after them."""
    from data_prep.loader import TrainLoader

    with TrainLoader(shards, temp_dir=temp_dir, **numbers) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return read_steps(loader, steps), loader.state_dict()


def _rank(rank: int, world: int, init_file: str, program: Callable, arguments: tuple, results) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import torch.distributed as dist

    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
    began = time.monotonic()
    try:
        outcome: Any = program(*arguments)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    results.put((rank, outcome, time.monotonic() - began))
    if world > 1 and not isinstance(outcome, str):
        dist.destroy_process_group()


def run_ranks(world: int, program: Callable, *arguments) -> tuple[list[Any], float]:
    """What `program(*arguments)` returned on each rank (the text of the error if it raised), and the longest time."""
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_rank, args=(r, world, f"{folder}/init", program, arguments, results))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            outcomes = sorted((results.get(timeout=LAUNCH_SECONDS) for _ in ranks), key=lambda outcome: outcome[0])
            for process in ranks:
                process.join(LAUNCH_SECONDS)
            assert all(process.exitcode is not None for process in ranks), "a rank did not end"
        finally:
            for process in ranks:
                process.kill()
    return [outcome for _, outcome, _ in outcomes], max(seconds for _, _, seconds in outcomes)


def global_batches(per_rank: list[list[list[int]]], replication: int = 1) -> list[list[int]]:
    """The sorted numbers of each step over all data-parallel ranks; replicas must have received the same ones."""
    for rank, steps in enumerate(per_rank):
        assert steps == per_rank[rank // replication * replication]
    distinct = per_rank[::replication]
    return [sorted(sum(step, [])) for step in zip(*distinct, strict=True)]
