"""Trains a list of jobs, one after the other, on one GPU or on as many as torchrun starts it for.

Argument: JOBS, a JSON file with a list of {"settings", "kill_after"?}: overrides of training.yaml, and the step after
whose metrics the process ends itself with SIGKILL.
"""

import json
import os
import signal
import sys
from pathlib import Path

from launch.metrics import MetricsWriter
from launch.train import train
from megatron_ext.parallel.layout import leave_layout
from recipes.load import load_recipe

RECIPE = Path(__file__).with_name("training.yaml")
write_metrics = MetricsWriter.write


def kill_after(last: int | None) -> None:
    """Let this process die once it has written the metrics of step `last`; None never."""

    def write(writer: MetricsWriter, record: dict) -> None:
        write_metrics(writer, record)
        if record["step"] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsWriter.write = write


def main(jobs: str) -> None:
    """Run all jobs."""
    for job in json.loads(Path(jobs).read_text()):
        kill_after(job.get("kill_after"))
        train(load_recipe(RECIPE, job["settings"]))
    leave_layout()


if __name__ == "__main__":
    main(sys.argv[1])
