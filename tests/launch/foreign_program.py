"""Rank program: every path that reads a checkpoint, over checkpoints of which one file holds a pickle that runs.

Arguments: RESULT FOLDER SHARDS. One rank trains a step at every ZeRO stage, then reads copies of what it saved: the
weights (as eval, generate, export, prune and init_from do), a resume, a conversion, and a resume from one that was
converted before. Returns by case and poisoned file {"error": sentence or None, "ran": whether the pickle ran}.
"""

import json
import shutil
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - the filter comes first

from tests.launch.train_program import RECIPE  # noqa: E402

STAGES = (0, 1, 2, 3)
CLEAN = "nothing"


class MakesAFile:
    """A pickle of this creates `path` when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "x")


def poison(file: Path, marker: Path) -> None:
    """Add the pickle to what a file holds, and have complete.json say its new size."""
    state = torch.load(file, weights_only=False)
    if isinstance(state, torch.Tensor):
        state.extra = MakesAFile(marker)
    else:
        state["extra"] = MakesAFile(marker)
    torch.save(state, file)
    step = next(folder for folder in file.parents if folder.name == "step_1")
    facts = json.loads((step / "complete.json").read_text())
    for written in facts["files"]:
        if str(file.relative_to(step)) in written:
            written[str(file.relative_to(step))] = file.stat().st_size
    (step / "complete.json").write_text(json.dumps(facts))


def recipe_of(run: Path, shards: str, stage: int, steps: int):
    """The tiny recipe at a stage, with frozen weights."""
    from recipes.load import load_recipe

    settings = [f"run_dir={run}", f"data.shards={shards}", f"parallel.zero_stage={stage}", f"train.steps={steps}"]
    more = ["train.warmup_steps=0", "train.eval_sequences=0", r"train.freeze=['mlp\.linear_fc1']"]
    return load_recipe(RECIPE, [*settings, *more, "train.tokens_per_step=160"])


def of_two_ranks(run: Path) -> None:
    """Let a checkpoint pass for one of two ranks: to go on from it, it must be converted."""
    mark = run / "checkpoints/step_1/complete.json"
    facts = json.loads(mark.read_text())
    facts["layout"]["world"] = 2
    mark.write_text(json.dumps(facts))


def read_weights(run: Path) -> None:
    """What eval, generate, export, prune and init_from read."""
    from megatron_ext import checkpoint

    weights = checkpoint.stored_weights(checkpoint.find(run))
    assert all(weights[name].isfinite().all() for name in weights)


def attempt(action, marker: Path) -> dict:
    """What came of an action."""
    error = None
    try:
        action()
    except ValueError as refusal:
        error = str(refusal)
    except Exception as other:  # a file object that came out of a pickle cannot be saved
        error = f"{type(other).__name__}: {other}"
    return {"error": error, "ran": marker.exists()}


def paths_of(stage: int, shards: str, converted: Path):
    """(case, folder that is copied, files that may be poisoned, action on the copy) of a stage."""
    from launch.train import train

    def resume(run: Path) -> None:
        assert train(recipe_of(run, shards, stage, steps=2)) == 2

    def convert(run: Path) -> None:
        of_two_ranks(run)
        resume(run)

    run = converted.parent / f"z{stage}"
    yield f"weights z{stage}", run, "step_1/state/*.pt", read_weights
    yield f"resume z{stage}", run, "step_1/**/*.pt", resume
    if stage:
        yield f"convert z{stage}", run, "step_1/state/*.pt", convert
        yield f"converted z{stage}", converted, "step_1/state_universal/**/*layernorm*/*.pt", convert
        yield f"converted z{stage} states", converted, "step_1/state_universal/*.pt", convert


def main(result: str, folder: str, shards: str) -> None:
    """Try every case with every file poisoned in turn, and with none."""
    from launch.train import train
    from megatron_ext import checkpoint
    from megatron_ext.parallel.layout import leave_layout

    root, found = Path(folder), {}
    for stage in STAGES:
        run, converted = root / f"z{stage}", root / f"converted_z{stage}"
        train(recipe_of(run, shards, stage, steps=1))
        if stage:
            shutil.copytree(run, converted)
            checkpoint.universal_form(converted / "checkpoints/step_1", rank=0)
        for case, source, pattern, action in paths_of(stage, shards, converted):
            files = sorted(file.relative_to(source) for file in (source / "checkpoints").glob(pattern))
            if "layernorm" in pattern:
                files = files[:3]
            found[case] = {}
            for number, file in enumerate([None, *files]):
                copy, marker = root / f"{case} {number}", root / f"{case} {number} ran"
                shutil.copytree(source, copy)
                if file is not None:
                    poison(copy / file, marker)
                name = CLEAN if file is None else str(file.relative_to("checkpoints"))
                found[case][name] = attempt(lambda run=copy, action=action: action(run), marker)
                shutil.rmtree(copy)
    Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
