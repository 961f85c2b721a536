"""Checks in how many processes a command was started, before torch is imported: one, or a torchrun job."""

import os
import shlex
import sys

from recipes.load import RecipeError

LAUNCHER = os.getppid()  # who started this process: read before it can be gone
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# what starts several processes without telling them about each other: number of this one, of all
STARTERS = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
}


def expect_one_process(command: str) -> None:
    """Let a command that is one process know nothing of ranks; refuse several processes of it.

    Raises:
        RecipeError: WORLD_SIZE is above 1.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # left over, and no rank 0 beside this process to say it
            os.environ.pop("RANK", None)
        raise RecipeError(
            f"`longpitch {command}` is one process, but WORLD_SIZE={world} is set: start it without torchrun, or type "
            f"`env -u RANK -u WORLD_SIZE longpitch {command} ...`"
        )
    for name in TORCHRUN:
        os.environ.pop(name, None)


def expect_torchrun_or_one() -> None:
    """Refuse to be one of several processes that know nothing of each other.

    Raises:
        RecipeError: srun or an MPI launcher started several, or only some of torchrun's variables are set.
    """
    command = shlex.join(sys.argv[1:])
    there = [name for name in TORCHRUN if name in os.environ]
    if "RANK" in there or "WORLD_SIZE" in there:
        if missing := [name for name in TORCHRUN if name not in there]:
            raise RecipeError(
                f"{', '.join(there)} are set but {', '.join(missing)} are not: start with torchrun, which sets all, as "
                f"`torchrun --nproc-per-node 8 -m launch {command}`, or unset them to train in one process"
            )
        return
    for starter, (number, total) in STARTERS.items():
        count = os.environ.get(total, "1")
        if number in os.environ and count.isdecimal() and int(count) > 1:
            if os.environ[number] != "0":
                os._exit(2)  # process 0 says it
            raise RecipeError(
                f"{starter} started {count} processes that know nothing of each other ({total}={count}): "
                f"{_what_to_type(starter, int(count), command)}; for one process alone, unset {number}"
            )


def _what_to_type(starter: str, count: int, command: str) -> str:
    nodes = int(os.environ.get("SLURM_NNODES", "1")) if starter == "srun" else 1
    each = max(1, count // nodes)
    if nodes == 1:
        return f"type `torchrun --nproc-per-node {each} -m launch {command}` instead"
    return (
        f"let it start one torchrun a node, `srun --ntasks-per-node=1 torchrun --nnodes {nodes} --nproc-per-node "
        f"{each} --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID --rdzv-endpoint FIRST_NODE:29400 -m launch {command}`"
    )
