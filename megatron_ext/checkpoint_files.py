"""Which checkpoints a run has, which of them are whole, how one appears and how it goes: by their files alone.

A checkpoint is a folder step_N with complete.json, which lists its files. It is written as .step_N.partial, gets its
name once everything is on disk, and becomes .step_N.removed before it goes: a kill leaves no half folder with a name
that counts. Only one process at a time, rank 0 of the run, changes anything here.
"""

import json
import os
import re
import shutil
from pathlib import Path

from recipes.errors import UserError

TAG = "state"  # DeepSpeed's folder inside a checkpoint
MARK = "complete.json"
WEIGHTS = "weights"  # folder of a checkpoint that holds weights only, as safetensors
LEFT_OVER = re.compile(r"\.step_\d+\.(partial|removed)")
OURS = re.compile(
    rf"{TAG}(_universal.*)?|latest_universal|zero_to_fp32\.py|random_rank_\d+\.pt|{re.escape(MARK)}\.partial"
)


class CheckpointError(UserError):
    """A checkpoint that cannot be used or written; the message names it and the way out."""


def _step(path: Path) -> int | None:
    """N of a folder called step_N, None for any other name (a copy set aside)."""
    number = path.name.removeprefix("step_")
    return int(number) if path.name.startswith("step_") and number.isdecimal() else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints under `folder` with their complete.json, whole or not, oldest first."""
    marked = [mark.parent for mark in folder.glob(f"step_*/{MARK}")]
    return sorted((path for path in marked if _step(path) is not None), key=lambda path: _step(path) or 0)


def read_facts(checkpoint: Path) -> dict:
    """What complete.json says of a checkpoint.

    "step", "tokens", "layout" and "model" are in all of them, "tokenizer" is None where it is not known. Checkpoints
    that a run can go on from also have "files" (a dict of name and bytes for each rank that wrote), "held" (what
    `deepspeed_files.held_by_rank` said, for each rank), "trained", "precision" and "recipe".
    """
    try:
        facts = json.loads((checkpoint / MARK).read_text())
        known = {key: facts[key] for key in ("step", "tokens", "layout", "model")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint}: its {MARK} cannot be read ({error}); remove the folder or restore it"
        ) from error
    return {"tokenizer": None} | facts | known


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a complete checkpoint; None where all are there in their sizes."""
    try:
        files = json.loads((checkpoint / MARK).read_text()).get("files", [])
        wanted = {name: size for written in files for name, size in written.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"its {MARK} cannot be read ({error})"
    for name, size in wanted.items():
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"its {name} is missing"
        if found != size:
            return f"its {name} has {found} bytes and not {size}"
    return None


def newest_whole(folder: Path, *, before: Path | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence on each newer one that is not.

    Args:
        before: only older ones than this are looked at.
    """
    damaged = []
    for path in reversed(complete_checkpoints(folder)):
        if before is not None and (_step(path) or 0) >= (_step(before) or 0):
            continue
        what = damage(path)
        if what is None:
            return path, damaged
        damaged.append(f"{path} is damaged: {what}")
    return None, damaged


def find(path: str | Path) -> Path:
    """The checkpoint that `path` names: a step folder itself, or the newest one of a run directory.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    path = Path(path)
    if (path / MARK).exists():
        found = path
    else:
        complete = complete_checkpoints(path / "checkpoints")
        if not complete:
            raise CheckpointError(
                f"{path}: no complete checkpoint there; name a run directory or one of its step folders"
            )
        found = complete[-1]
    if what := damage(found):
        older = newest_whole(found.parent, before=found)[0]
        raise CheckpointError(f"{found}: {what}; restore it{f', or name {older}, which is whole' if older else ''}")
    return found


def make_room(folder: Path, step: int) -> Path | None:
    """An empty folder to write the checkpoint of `step` into; None where that checkpoint is there and whole.

    A damaged one of that step is set aside as step_N.damaged.
    """
    target, partial = folder / f"step_{step}", folder / f".step_{step}.partial"
    if (target / MARK).exists() and damage(target) is None:
        return None
    if target.exists() and _is_ours(target):
        shutil.rmtree(target)
    elif target.exists():
        names = (f"{target.name}.damaged{number}" for number in ("", *(f"_{n}" for n in range(2, 1000))))
        target.rename(folder / next(name for name in names if not (folder / name).exists()))
    shutil.rmtree(partial, ignore_errors=True)
    (partial / TAG).mkdir(parents=True)
    return partial


def _is_ours(folder: Path) -> bool:
    """Whether a folder without its mark is what a killed save or removal left: it holds nothing else."""
    return folder.is_dir() and all(OURS.fullmatch(path.name) for path in folder.iterdir())


def publish(partial: Path, target: Path, facts: dict) -> None:
    """Make a checkpoint of `partial`, all of whose files are on disk.

    Raises:
        CheckpointError: the disk does not take it.
    """
    mark = partial / MARK
    try:
        mark.write_text(json.dumps(facts, indent=1))
        sync(mark)
        for path in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
            sync(path)
        partial.rename(target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{mark} could not be written ({error.strerror}); free space, or see to the disk"
        ) from error


def mark_complete(target: Path, facts: dict) -> None:
    """Write the mark of a folder that is in its place already, all of whose files are on disk."""
    aside = target / (MARK + ".partial")
    aside.write_text(json.dumps(facts, indent=1))
    sync(aside)
    aside.rename(target / MARK)
    sync(target)
    sync(target.parent)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole checkpoints. Damaged ones stay: somebody may want to mend them."""
    whole = [path for path in complete_checkpoints(folder) if damage(path) is None]
    for path in whole[:-keep]:
        going = folder / f".{path.name}.removed"
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
        shutil.rmtree(going, ignore_errors=True)  # what is left is swept away later
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what kills have left: folders half written or half removed, and those that lost their mark.

    Of the latter only what is older than a complete checkpoint and holds nothing but files of ours.
    """
    for path in folder.glob(".step_*"):
        if LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    complete = complete_checkpoints(folder)
    newest = _step(complete[-1]) if complete else None
    for path in folder.glob("step_*"):
        number = _step(path)
        old = number is not None and newest is not None and number < newest
        if old and not (path / MARK).exists() and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
