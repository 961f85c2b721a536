"""Sets up the process groups of one run: tensor x context x data parallel ranks, and the device of this rank."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.parallel.collectives import MAX, Group, all_reduce, joined
from megatron_ext.parallel.rendezvous import own_part, torchruns_store
from recipes.errors import UserError
from recipes.schema import DEVICES

# what a launcher would set for one process; LONGPITCH_ALONE marks that it was us
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # named by DeepSpeed, opened by nobody
    "LONGPITCH_ALONE": "1",
}


_control: dict[str, Group] = {}


@dataclass(frozen=True)
class Layout:
    """Where this rank stands. Tensor-parallel ranks are neighbours, then context, then data."""

    rank: int
    world: int
    tensor: int
    context: int
    tensor_rank: int
    context_rank: int
    data_rank: int
    device: torch.device
    tensor_group: Group
    context_group: Group
    data_context_group: Group  # the ranks over which ZeRO shards and gradients are summed
    control_group: Group  # all ranks, for numbers on the CPU that no GPU should wait for

    @property
    def data(self) -> int:
        """Number of data-parallel replicas of a (tensor x context) block."""
        return self.world // (self.tensor * self.context)

    def highest(self, number: int) -> int:
        """The highest number that any rank brings; no GPU is waited for. Collective."""
        return int(all_reduce(torch.tensor(float(number)), self.control_group, "stop", MAX).item())


def pick_device(wanted: str) -> torch.device:
    """`cpu`, or the GPU of this local rank for `cuda`, or for `auto` the GPU where there is one.

    Raises:
        UserError: another name, or no GPU for this rank.
    """
    if wanted not in DEVICES:
        raise UserError(f"device {wanted} is not one of {', '.join(DEVICES)}")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("train.device is cuda but torch sees no GPU; use train.device=cpu or auto")
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU of its own: this node shows {count}; start {count} processes"
        )
    return torch.device("cuda", local_rank)


def init_layout(*, tensor: int, context: int, device: str, timeout_seconds: float) -> Layout:
    """Join the process group named by torchrun's environment (a world of one without it) and cut it up.

    Raises:
        UserError: there is no such device. A cut that does not divide the world is megatron-core's RuntimeError.
    """
    chosen = pick_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not dist.is_initialized():
        _join_world(chosen, timeout_seconds)
    if not _is_cut_up(tensor, context):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            # 30 without it; a fraction is fine in the timedelta that it goes into
            distributed_timeout_minutes=timeout_seconds / 60,  # pyright: ignore[reportArgumentType] - said to be an int
        )
    return Layout(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor=tensor,
        context=context,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        device=chosen,
        tensor_group=joined(parallel_state.get_tensor_model_parallel_group()),
        context_group=joined(parallel_state.get_context_parallel_group()),
        data_context_group=joined(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        control_group=_control["group"],
    )


def _is_cut_up(tensor: int, context: int) -> bool:
    """Whether the groups of an earlier run in this process fit: new ones would leave the old ones' threads behind."""
    return parallel_state.is_initialized() and (tensor, context) == (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
    )


def _join_world(device: torch.device, timeout_seconds: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = torchruns_store(timeout)
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = own_part(store, rank=rank, world=world, timeout=timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        if device.type == "cuda":  # a barrier would guess the device of a group that has not been used, and say so
            dist.all_reduce(torch.zeros(1, device=device))
    else:  # one process, no launcher: no port to open, but the libraries below read the same variables
        os.environ.update(_ALONE)
        dist.init_process_group(backend, timeout=timeout, rank=0, world_size=1, store=dist.HashStore())
    # a vote on the GPU would make every rank wait for what it has queued there
    own = backend == "nccl"
    _control["group"] = joined(dist.new_group(backend="gloo", timeout=timeout) if own else dist.group.WORLD)


def leave_layout() -> None:
    """Dismantle the groups and leave the world; does nothing when there is none."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    for name in _ALONE if os.environ.get("LONGPITCH_ALONE") else ():
        del os.environ[name]
