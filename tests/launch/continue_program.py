"""Rank program: what a run does with the checkpoint of another recipe, at every ZeRO stage.

Arguments: RESULT FOLDER SHARDS FROM. FROM is a folder of the runs to go on from, which are trained there first where it
is empty. Rank 0 returns {"stage N": {"moved", "groups", "clip", "lr", "step", "skipped"}}.
"""

import json
import os
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
    fixed = ("model.attention.kind=swa", "train.warmup_steps=0", "train.eval_sequences=0", "checkpoint.keep=5")
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


def main(result: str, folder: str, shards: str, origin: str) -> None:
    """Run all stages; rank 0 writes what they found."""
    import torch.distributed as dist

    from launch.train import train
    from megatron_ext.context_parallel.layout import leave_layout
    from recipes.load import load_recipe

    rank, found = int(os.environ["RANK"]), {}
    for stage in STAGES:
        first, again = Path(origin) / f"stage_{stage}", Path(folder) / f"again_{stage}"
        if not first.exists():
            train(load_recipe(RECIPE, [*settings(first, shards, stage), "train.steps=3"]))
        if rank == 0:
            shutil.copytree(first, again)
        if dist.is_initialized():
            dist.barrier()
        found[f"stage {stage}"] = next_step(load_recipe(RECIPE, [*settings(again, shards, stage), *OTHERS]))
    if rank == 0:
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
