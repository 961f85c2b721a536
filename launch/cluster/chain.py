"""Whether a run is started again: never after RUN/STOP has appeared, and only if the last start has brought it further.

A run that fails before its next checkpoint would fail there for ever, and use up a week of GPUs without a step.
"""

import json
import time
from pathlib import Path

from megatron_ext.checkpoint_files import complete_checkpoints
from recipes.errors import UserError

STOP_FILE = "STOP"  # in the run directory: whoever makes it ends the run, and the chain of its restarts
STARTS = "starts.jsonl"  # in the run's logs: one line a start, with the step that it goes on from


class NoProgressError(UserError):
    """The run is where it was at its last start; starting it again would waste the machines."""

    exit_code = 93


def told_to_stop(run: Path) -> bool:
    """Whether somebody has made RUN/STOP."""
    return (run / STOP_FILE).exists()


def newest_step(run: Path) -> int:
    """The step of the run's newest complete checkpoint, 0 where there is none."""
    steps = [int(path.name.removeprefix("step_")) for path in complete_checkpoints(run / "checkpoints")]
    return max(steps, default=0)


def note_start(run: Path, *, again: bool) -> int:
    """Note that the run is being started, and return the step that it goes on from.

    Args:
        again: after a failure, by the chain itself; otherwise a person starts it, who may have mended the cause.

    Raises:
        NoProgressError: it is started again, and has no newer checkpoint than at the last start.
    """
    path, step = run / "logs" / STARTS, newest_step(run)
    last = _last_start(path)
    if again and last is not None and step <= last:
        raise NoProgressError(
            f"{run} has failed without a checkpoint beyond step {last}, from where it was last started, and is not "
            f"started again: see {run / 'logs'} for the cause, or lower checkpoint.interval; the same command, typed "
            "by a person, starts it once more"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({"time": round(time.time(), 3), "step": step, "again": again}) + "\n")
    return step


def _last_start(path: Path) -> int | None:
    """The step in the last whole line of starts.jsonl."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):  # a kill cut it off
            continue
    return None
