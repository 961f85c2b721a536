"""What DeepSpeed's ranks write into a checkpoint and what they hold, counted, so that nothing is lost or mixed up."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ext.deepspeed_compat import UnreadableFile, data_only
from megatron_ext.parallel.collectives import Group, group_rank

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SUMMED = 2**20  # elements at once: the sum of all would copy them as int64


class WrittenFiles:
    """Stands in for DeepSpeed's writer during a save: syncs and remembers what this rank writes, and keeps its error.

    DeepSpeed waits for all ranks after it has written, and would wait for good for one that has raised.
    """

    def __init__(self, writer):
        self._writer = writer
        self.sizes: dict[str, int] = {}  # path -> bytes
        self.error: str | None = None  # the first failure, with its path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: dict, path: str) -> None:
        """Write one file, unless one could not be written."""
        if self.error is not None:
            return
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
                self.sizes[path] = file.tell()
        except (OSError, RuntimeError) as error:
            self.error = f"{path} could not be written ({_cause(error)})"


def _cause(error: BaseException) -> str:
    """What the system said; torch's own error hides it."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    return str((first and first.strerror) or error)


@contextlib.contextmanager
def written_files(engine) -> Iterator[WrittenFiles]:
    """Inside, `engine.save_checkpoint` writes through a `WrittenFiles`, and does not copy a script beside the files."""
    before = engine.checkpoint_engine
    engine.checkpoint_engine = written = WrittenFiles(before)
    engine._copy_recovery_script = lambda _path: None  # would fail on a full disk where nothing catches it
    try:
        yield written
    finally:
        engine.checkpoint_engine = before
        del engine._copy_recovery_script


def unreadable(files: Iterable[Path], device: torch.device) -> str | None:
    """What is wrong with the first of DeepSpeed's files that cannot be read, None where all can. Reads no tensors."""
    os.environ["DS_ACCELERATOR"] = device.type  # before anything of DeepSpeed is imported
    try:
        with data_only(mapped=True):
            for file in files:
                torch.load(file, map_location="cpu")
    except (UnreadableFile, OSError) as error:
        return str(error)
    return None


@torch.no_grad()
def sum_of_bits(tensors: Iterable[torch.Tensor]) -> int:
    """All elements, read as integers, added up modulo 2^64: the same however the tensors are cut into parts."""
    total: torch.Tensor | int = 0
    for tensor in tensors:
        integers = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
        for part in integers.split(SUMMED):
            total = total + part.sum(dtype=torch.int64)
    return int(total) % 2**64


def held_by_rank(engine, model: nn.Module, *, zero_stage: int, group: Group) -> list[int]:
    """Sums of the bits of what this rank holds: of the optimizer's masters and moments, and of weights and buffers.

    Args:
        group: the ranks that share the state.
    """
    rank, buffers = group_rank(group), list(model.buffers())
    if zero_stage == 3:  # without what pads the last parts
        parts = [_own_part(parameter, rank) for parameter in model.parameters()]
        return [sum_of_bits(_masters_and_moments_of_stage_3(engine.optimizer, rank)), sum_of_bits(parts + buffers)]
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state
    tensors = [each for master, moments in states.items() for each in (master, *_moments(moments))]
    return [sum_of_bits(tensors), sum_of_bits([*model.parameters(), *buffers])]


def _own_size(parameter: Any, rank: int) -> int:
    """Elements of a parameter of stage 3, with what DeepSpeed attaches to it, that lie on this rank."""
    part = parameter.ds_tensor.numel()
    return min(max(parameter.ds_numel - rank * part, 0), part)


def _own_part(parameter: Any, rank: int) -> torch.Tensor:
    return parameter.ds_tensor.narrow(0, 0, _own_size(parameter, rank))


def _moments(state: dict) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _masters_and_moments_of_stage_3(optimizer, rank: int) -> Iterator[torch.Tensor]:
    for parameters, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in parameters:
            for flat in (master, *_moments(optimizer.optimizer.state[master])):
                yield flat.narrow(0, start, _own_size(parameter, rank))
            start += parameter.ds_tensor.numel()
