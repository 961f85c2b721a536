"""`longpitch launch`, and what it starts: `longpitch node` on each machine, `longpitch chain` in a job's script."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from launch.cluster import slurm
from launch.cluster.chain import STOP_FILE, note_start, told_to_stop
from launch.cluster.hosts import SSH, Host, read_hosts
from launch.cluster.node import run_torchrun
from launch.cluster.supervise import Job, commands, supervise
from launch.cluster.torchrun import RENDEZVOUS_PORT, Node, torchrun_command, torchrun_environment
from recipes.errors import UserError
from recipes.load import RecipeError, accumulation_steps, check_world, load_recipe
from recipes.schema import Recipe

RecipePath = Annotated[Path, typer.Argument(help="YAML file", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes to the recipe", show_default=False)
]
Gpus = Annotated[int, typer.Option(help="GPUs of each machine; as many processes", min=1, show_default=False)]
Interface = Annotated[
    str | None, typer.Option(help="network interface for gloo and NCCL, where they choose wrong", show_default=False)
]


class StopFileError(UserError):
    """Somebody has made RUN/STOP, and the chain is to end."""

    exit_code = 94


def launch(
    recipe: RecipePath,
    gpus: Gpus,
    overrides: Overrides = None,
    nodes: Annotated[str, typer.Option(help="machines: N, or MIN:MAX to go on with fewer")] = "1",
    hosts: Annotated[
        Path | None, typer.Option(help="file of machines, one `HOST [ADDRESS]` a line: over SSH", show_default=False)
    ] = None,
    use_slurm: Annotated[bool, typer.Option("--slurm", help="submit a job to SLURM")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the commands or the job's script, and start nothing")
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(help="further option of sbatch, such as --sbatch=--partition=gpu", show_default=False),
    ] = None,
    chain: Annotated[int, typer.Option(help="SLURM: an array of so many jobs; 0: one that requeues itself", min=0)] = 0,
    port: Annotated[int, typer.Option(help="of the rendezvous on the first machine", min=1, max=65535)] = (
        RENDEZVOUS_PORT
    ),
    interface: Interface = None,
    remote_shell: Annotated[str, typer.Option(help="what runs a command on a machine")] = shlex.join(SSH),
) -> None:
    """Train on the GPUs of this machine, of several over SSH, or under SLURM, and go on after faults.

    A failed run is started again from its newest checkpoint as long as that is newer than at the last start; then it
    ends with exit code 93. A file STOP in the run directory, SIGTERM, SIGUSR1 or Ctrl-C: the ranks save and end. All
    machines see this folder, the run directory and the shards under the same paths.
    """
    loaded = load_recipe(recipe, overrides)
    run, least, most = Path(loaded.run_dir).absolute(), *_counts(nodes)
    counts = _fitting(loaded, gpus, least, most)
    words = [str(recipe), *(overrides or [])]
    if use_slurm:
        if hosts is not None:
            raise RecipeError("--slurm chooses the machines itself; leave out --hosts")
        extra = ["--interface", interface] if interface else []
        text = slurm.script(
            run, [*extra, *words], nodes=str(most) if least == most else f"{least}-{most}", gpus=gpus,
            options=sbatch or [], chain=chain,
        )  # fmt: skip
        typer.echo(text if dry_run else slurm.submit(text, run), nl=not dry_run)
        return
    if sbatch or chain:
        raise RecipeError("--sbatch and --chain are for --slurm")
    machines = read_hosts(hosts) if hosts else [Host(None, None)]
    if len(machines) < most:
        raise RecipeError(
            f"--nodes {nodes} asks for {most} machines and {hosts or 'no --hosts'} names {len(machines)}; name them in "
            "a file for --hosts, one a line"
        )
    job = Job(recipe, overrides or [], run, machines, counts, gpus, shlex.split(remote_shell),
              port if hosts else 0, interface)  # fmt: skip
    if dry_run:
        for command in commands(job, machines[:most], "DRY-RUN"):
            typer.echo(shlex.join(command))
        return
    supervise(job)


def node(
    recipe: RecipePath,
    nodes: Annotated[int, typer.Option(help="machines of the job", min=1)],
    gpus: Gpus,
    rendezvous: Annotated[str, typer.Option(help="HOST:PORT of machine 0")],
    job: Annotated[str, typer.Option(help="name of this attempt")],
    overrides: Overrides = None,
    index: Annotated[
        int | None, typer.Option("--node", help="number of this machine; default: SLURM_NODEID", show_default=False)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="by which the others reach this machine; default: SLURMD_NODENAME", show_default=False),
    ] = None,
    interface: Interface = None,
    watched: Annotated[
        bool, typer.Option("--watched", help="end when the standard input does, or falls silent")
    ] = False,
) -> None:
    """One machine's part of a job, as `launch` starts it: torchrun, ended in order."""
    run = Path(load_recipe(recipe, overrides).run_dir).absolute()
    number = os.environ.get("SLURM_NODEID", "0" if nodes == 1 else "") if index is None else str(index)
    if not number.isdecimal() or int(number) >= nodes:
        raise RecipeError(f"--node is {number or 'missing'}; give this machine's number, from 0 to {nodes - 1}")
    place = Node(int(number), nodes, gpus, rendezvous, job, address or os.environ.get("SLURMD_NODENAME"))
    logs = run / "logs" / "launch" / job / f"node_{number}"
    command = torchrun_command(place, recipe, overrides or [], logs)
    raise typer.Exit(run_torchrun(command, torchrun_environment(interface), run, watched=watched))


def chain(
    run: Annotated[Path, typer.Argument(help="run directory", show_default=False)],
    again: Annotated[bool, typer.Option("--again", help="after a failure, by the chain itself")] = False,
) -> None:
    """Whether a job of a chain should train: exit code 0; 93 without progress since the last start, 94 at RUN/STOP."""
    if told_to_stop(run):
        raise StopFileError(f"{run / STOP_FILE} is there: nothing is started; remove it to go on")
    typer.echo(f"{run} goes on from step {note_start(run, again=again)}")


def _counts(nodes: str) -> tuple[int, int]:
    least, _, most = nodes.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal() or not 1 <= int(least) <= int(most or least):
        raise RecipeError(f"--nodes is {nodes}; give a number of machines, or MIN:MAX")
    return int(least), int(most or least)


def _fitting(recipe: Recipe, gpus: int, least: int, most: int) -> list[int]:
    """The numbers of machines that the recipe's layout and batch allow; the largest asked for must be one."""
    fitting = []
    for count in range(least, most + 1):
        try:
            check_world(recipe.parallel, count * gpus)
            accumulation_steps(recipe, count * gpus // (recipe.parallel.tensor * recipe.parallel.context))
        except RecipeError:
            if count == most:
                raise
        else:
            fitting.append(count)
    return fitting
