"""Rank program: trains a list of jobs one after the other in one process group and notes each one's losses.

Arguments: RESULT JOBS, a JSON file with a list of {"name", "settings", "stop_at"?, "copy_from"?}. `stop_at` sends this
process SIGUSR1 after that step; `copy_from` starts from a copy of another run's directory. Jobs of one layout belong
together: every new cut of the world leaves threads behind. A job that dies ends the program; what was done before it
stands in `found_path(JOBS)`, a line a job. tests/launch/runs.py starts it.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

RECIPE = Path(__file__).parent / "tiny.yaml"


def found_path(jobs: Path) -> Path:
    """Where the results of a list of jobs are noted, a line {name: result} for each that is done."""
    return jobs.with_suffix(".found")


def stop_after(step: int | None) -> None:
    """Let rank 0 receive SIGUSR1 once it has written the metrics of `step`; None never."""
    from launch.metrics import MetricsWriter

    original = ORIGINAL.setdefault("write", MetricsWriter.write)

    def write(self, record):
        original(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGUSR1)

    MetricsWriter.write = write


ORIGINAL: dict = {}


def run_job(job: dict, rank: int) -> dict:
    """Train one job; {"losses", "norms", "aux", "open", "heldout", "steps"} from its metrics."""
    import torch.distributed as dist

    from launch.run_directory import read_metrics
    from launch.train import train
    from recipes.load import load_recipe

    recipe = load_recipe(RECIPE, job["settings"])
    if job.get("copy_from") and rank == 0:
        shutil.copytree(job["copy_from"], recipe.run_dir)
    if dist.is_initialized():
        dist.barrier()
    stop_after(job.get("stop_at"))
    train(recipe)
    records = read_metrics(Path(recipe.run_dir) / "metrics.jsonl")
    return {
        "losses": [record["loss"] for record in records],
        "norms": [record["grad_norm"] for record in records],
        "aux": [record.get("aux", 0) for record in records],
        "open": [record.get("open_fraction") for record in records],
        "heldout": records[-1].get("heldout_loss"),
        "steps": [record["step"] for record in records],
    }


def main(result: str, jobs: str) -> None:
    """Run all jobs; rank 0 notes each one's result, and writes all of them by name at the end."""
    from megatron_ext.parallel.layout import leave_layout

    rank, found = int(os.environ["RANK"]), {}
    for job in json.loads(Path(jobs).read_text()):
        found[job["name"]] = run_job(job, rank)
        print(job["name"], found[job["name"]]["losses"][-1:], flush=True)
        if rank == 0:
            with open(found_path(Path(jobs)), "a") as file:
                file.write(json.dumps({job["name"]: found[job["name"]]}) + "\n")
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
