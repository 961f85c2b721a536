"""A job for SLURM: its script, from job.slurm beside this file, and its submission."""

import os
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import UserError

TEMPLATE = Path(__file__).with_name("job.slurm")
SUBMIT_SECONDS = 60.0


class _Template(string.Template):
    delimiter = "@"  # the script's own variables begin with $


def script(
    run: Path,
    words: Sequence[str],
    *,
    nodes: str,
    gpus: int,
    options: Sequence[str],
    chain: int,
) -> str:
    """The job's script.

    Args:
        run: the run directory, absolute.
        words: recipe, overrides and options of `longpitch node`.
        nodes: as SLURM wants them, `2` or `1-2`.
        gpus: of each node.
        options: further #SBATCH options, each as `--name=value`.
        chain: 0: the job requeues itself; N: an array of N jobs, one after the other.

    Raises:
        UserError: an option or the run directory would break the script's lines.
    """
    for option in options:
        if not option.startswith("-") or "\n" in option:
            raise UserError(f"--sbatch takes an option of sbatch such as --sbatch=--partition=gpu, not {option!r}")
    if set('"\n%\\') & set(str(run)):
        raise UserError(f"SLURM cannot write output below {run}; choose a run_dir without quotes, % and backslashes")
    return _Template(TEMPLATE.read_text()).substitute(
        name="".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in run.name),
        nodes=nodes,
        gpus=gpus,
        logs=run / "logs",
        chain=f"--array=1-{chain}%1" if chain else "--requeue",
        options="\n".join([*(f"#SBATCH {option}" for option in options), ""]),
        folder=shlex.quote(os.getcwd()),
        run=shlex.quote(str(run)),
        python=shlex.quote(sys.executable),
        words=shlex.join(words),
    )


def submit(text: str, run: Path) -> str:
    """Keep the script in the run's logs and hand it to sbatch; returns what sbatch answers.

    Raises:
        UserError: there is no sbatch here, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch on this machine; start from a login node, or look at it with --dry-run")
    path = run / "logs" / "job.slurm"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, timeout=SUBMIT_SECONDS)
    if done.returncode:
        raise UserError(f"sbatch refused {path}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout.strip()
