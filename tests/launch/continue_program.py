"""Rank program: what a run does with the checkpoint of another recipe, and with one that is not as it should be.

Arguments: RESULT FOLDER SHARDS FROM. FROM is a folder of the runs to go on from, with checkpoints of steps 2 and 3; two
ranks train them there first. Rank 0 returns {"stage N": what `next_step` found} and, under the names
of the faults, what each rank said and what was there afterwards.
"""

import json
import os
import resource
import shutil
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

RECIPE = Path(__file__).parent / "tiny.yaml"
STAGES = (0, 1, 2, 3)
# nothing moves at a rate of 0, whatever the moments are; the others differ from tiny.yaml's
OTHERS = ("train.steps=4", "train.lr=0", "train.min_lr=0", "train.weight_decay=0.7", "train.beta1=0.5",
          "train.beta2=0.6", "train.adam_eps=1e-3", "train.clip=0.25")  # fmt: skip


def settings(run: Path, shards: str, stage: int) -> list[str]:
    """Overrides of tiny.yaml that all runs have."""
    fixed = ("model.attention.kind=swa", "train.warmup_steps=0", "train.eval_sequences=0", "checkpoint.keep=5",
             "checkpoint.interval=2")  # fmt: skip
    return [f"run_dir={run}", f"data.shards={shards}", f"parallel.zero_stage={stage}", *fixed]


def weights(trainer) -> list:
    """Every parameter in fp32, whole."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    if trainer.engine.zero_stage == 0:
        return [parameter.detach().clone() for parameter in trainer.engine.model.parameters()]
    return [torch.clone(safe_get_full_fp32_param(parameter)) for parameter in trainer.engine.model.parameters()]


def next_step(recipe) -> dict:
    """Go on for one step; what the optimizer then held, and whether a weight moved."""
    import torch

    from launch.train import Trainer

    trainer = Trainer(recipe)
    before = weights(trainer)
    record = trainer.train_step()
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    optimizer = trainer.engine.deepspeed.optimizer
    constants = ("lr", "weight_decay", "betas", "eps")
    found = {
        "moved": moved,
        "groups": [{name: group[name] for name in constants} for group in optimizer.param_groups],
        "clip": getattr(optimizer, "clip_grad", trainer.engine.deepspeed.gradient_clipping()),
        "lr": record["lr"],
        "step": trainer.step,
        "skipped": trainer.skipped,
    }
    trainer.close()
    return found


class Faults:
    """Each method is one fault: it returns what every rank said, "" for nothing, and what is there afterwards."""

    def __init__(self, folder: Path, origin: Path, shards: str):
        self.folder, self.origin, self.shards = folder, origin, shards
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def all_of_them(self) -> dict:
        """Run those that fit the number of ranks."""
        if self.world == 1:
            return {"conversion": self.conversion()}
        found = {f"freeze {stage}": self.other_recipe(stage, r"train.freeze=['layers\.0\.']") for stage in STAGES}
        found |= {f"bf16 {stage}": self.other_recipe(stage, "train.precision=bf16") for stage in (1, 3)}
        found |= {f"swapped {stage}": self.swapped(stage) for stage in (1, 3)}
        for fault in (self.stale, self.unseen, self.two_folders, self.unshared_save, self.full_disk, self.truncated,
                      self.scribbled, self.all_damaged):  # fmt: skip
            found[fault.__name__] = fault()
        return found

    def copy(self, name: str, stage: int = 1) -> Path:
        """A copy of a first run; rank 0 makes it."""
        import torch.distributed as dist

        run = self.folder / name
        if self.rank == 0:
            shutil.copytree(self.origin / f"stage_{stage}", run)
        dist.barrier()
        return run

    def recipe(self, run: Path, *more: str, stage: int = 1):
        """To go on from a run for one step."""
        from recipes.load import load_recipe

        return load_recipe(RECIPE, [*settings(run, self.shards, stage), "train.steps=4", *more])

    def said(self, function) -> list[str]:
        """What each rank had to say against doing this."""
        from megatron_ext.parallel.collectives import gather_objects
        from recipes.errors import UserError

        sentence = ""
        try:
            function()
        except UserError as error:
            sentence = str(error)
        return gather_objects(sentence)

    def go_on(self, run: Path, *more: str, stage: int = 1) -> dict:
        """Start the run again and end it at once; what was said, where ranks would have gone on, and what is left."""
        from launch.train import Trainer
        from megatron_ext.parallel.collectives import gather_objects

        steps = []

        def start() -> None:
            trainer = Trainer(self.recipe(run, *more, stage=stage))
            steps.append(trainer.step)
            trainer.close()

        said = self.said(start)
        return {"said": said, "steps": gather_objects(steps), "left": left(run)}

    def other_recipe(self, stage: int, change: str) -> dict:
        return self.go_on(self.copy(f"other_{change[6:9]}_{stage}", stage), change, stage=stage)

    def swapped(self, stage: int) -> dict:
        """Each rank's part of the optimizer's state lies under the other's name, in sizes as complete.json has them."""
        run = self.copy(f"swapped_{stage}", stage)
        if self.rank == 0:
            step = run / "checkpoints" / "step_3"
            first, second = sorted((step / "state").glob("*optim_states.pt"))
            first.rename(run / "aside")
            second.rename(first)
            (run / "aside").rename(second)
            facts = json.loads((step / "complete.json").read_text())
            for written, file in zip(facts["files"], (first, second), strict=True):
                written[f"state/{file.name}"] = file.stat().st_size
            (step / "complete.json").write_text(json.dumps(facts))
        return self.go_on(run, stage=stage)

    def stale(self) -> dict:
        """Rank 1 lists a folder as it was before."""
        from megatron_ext import checkpoint_files

        run, original = self.copy("stale"), checkpoint_files.complete_checkpoints
        if self.rank == 1:
            checkpoint_files.complete_checkpoints = lambda folder: original(folder)[:1]
        found = self.go_on(run)
        checkpoint_files.complete_checkpoints = original
        return found

    def unseen(self) -> dict:
        """Rank 1 does not see the mark that rank 0 sees."""
        from megatron_ext import checkpoint_choice

        run, original, limit = self.copy("unseen"), checkpoint_choice._digest, checkpoint_choice.SEEN_LIMIT
        checkpoint_choice.SEEN_LIMIT = 0.5
        if self.rank == 1:
            checkpoint_choice._digest = lambda _checkpoint: ""
        found = self.go_on(run)
        checkpoint_choice._digest, checkpoint_choice.SEEN_LIMIT = original, limit
        return found

    def two_folders(self) -> dict:
        """The run directory is another one for rank 1."""
        from megatron_ext import checkpoint_choice

        limit, checkpoint_choice.SEEN_LIMIT = checkpoint_choice.SEEN_LIMIT, 0.5
        found = self.go_on(self.folder / f"of_rank_{self.rank}")
        checkpoint_choice.SEEN_LIMIT = limit
        return found

    def trained(self, run: Path):
        """A trainer that has a step to save."""
        from launch.train import Trainer

        trainer = Trainer(self.recipe(run))
        trainer.train_step()
        return trainer

    def unshared_save(self) -> dict:
        """What rank 1 writes lies elsewhere."""
        from megatron_ext import checkpoint

        run, original = self.copy("unshared"), checkpoint.on_rank_0
        trainer = self.trained(run)
        trainer.seen_limit = 0.5

        def elsewhere(function, rank: int):
            found = original(function, rank)
            if isinstance(found, Path) and rank == 1:
                found = self.folder / "elsewhere" / found.name
                (found / "state").mkdir(parents=True)
            return found

        checkpoint.on_rank_0 = elsewhere
        said = self.said(trainer.save)
        checkpoint.on_rank_0 = original
        trainer.close()
        return {"said": said, "left": left(run)}

    def full_disk(self) -> dict:
        """Rank 1 may not write a file so large; later it may."""
        run = self.copy("full")
        trainer = self.trained(run)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        said = self.said(trainer.save)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        then = left(run)
        again = self.said(trainer.save)
        trainer.close()
        return {"said": said, "left": then, "again": again, "left again": left(run)}

    def truncated(self) -> dict:
        """Half of a file of the newest checkpoint is missing; the run goes on and saves that step again."""
        run = self.copy("truncated")
        file = run / "checkpoints" / "step_3" / "state" / "mp_rank_00_model_states.pt"
        if self.rank == 0:
            os.truncate(file, file.stat().st_size // 2)
        from launch.train import train

        found = self.go_on(run)
        train(self.recipe(run, "train.steps=3"))
        return found | {"left again": left(run)}

    def scribbled(self) -> dict:
        """A file of the newest checkpoint has its size and nothing readable at its end."""
        run = self.copy("scribbled")
        file = max((run / "checkpoints" / "step_3" / "state").glob("*optim_states.pt"))
        if self.rank == 0:
            size = file.stat().st_size
            with open(file, "r+b") as opened:
                opened.seek(size - 2000)
                opened.write(bytes(2000))
        return self.go_on(run) | {"file": str(file)}

    def all_damaged(self) -> dict:
        run = self.copy("damaged")
        if self.rank == 0:
            for file in run.glob("checkpoints/*/random_rank_1.pt"):
                file.unlink()
        return self.go_on(run)

    def conversion(self) -> dict:
        """One parameter's moments are lost on the way to another number of ranks."""
        import torch

        from megatron_ext import deepspeed_compat

        run, original = self.copy("conversion"), deepspeed_compat.convert_to_universal

        def convert(checkpoint: Path, tag: str) -> str:
            made = original(checkpoint, tag)
            file = next((checkpoint / made / "zero").glob("*layers.1*fc1.weight/exp_avg.pt"))
            saved = torch.load(file)
            saved["param"].zero_()
            torch.save(saved, file)
            return made

        deepspeed_compat.convert_to_universal = convert
        found = self.go_on(run)
        deepspeed_compat.convert_to_universal = original
        return found


def left(run: Path) -> list[str]:
    """Names in the folder of checkpoints."""
    return sorted(path.name for path in run.glob("checkpoints/*"))


def main(result: str, folder: str, shards: str, origin: str) -> None:
    """Run all stages; rank 0 writes what they found."""
    import torch.distributed as dist

    from launch.train import train
    from megatron_ext.parallel.layout import leave_layout
    from recipes.load import load_recipe

    rank, world, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), {}
    for stage in STAGES:
        half, frozen = Path(origin) / f"bf16_{stage}", r"train.freeze=['mlp\.linear_fc1']"
        short = [*settings(half, shards, stage), "train.precision=bf16", frozen]
        if world == 2:
            train(load_recipe(RECIPE, [*short, "train.steps=1"]))
        found[f"bf16 step {stage}"] = train(load_recipe(RECIPE, [*short, f"train.steps={2 if world == 2 else 3}"]))
        first, again = Path(origin) / f"stage_{stage}", Path(folder) / f"again_{stage}"
        if world == 2:
            train(load_recipe(RECIPE, [*settings(first, shards, stage), "train.steps=3"]))
        if rank == 0:
            shutil.copytree(first, again)
        if dist.is_initialized():
            dist.barrier()
        found[f"stage {stage}"] = next_step(load_recipe(RECIPE, [*settings(again, shards, stage), *OTHERS]))
    found |= Faults(Path(folder), Path(origin), shards).all_of_them()
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
