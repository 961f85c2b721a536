"""Rank program: `train` in one process group over kinds x ZeRO stages x context parallelism; returns every loss.

Arguments: RESULT SHARDS RUNS KINDS STAGES CONTEXTS [KEY=VALUE ...], lists separated by commas.
"""

import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

RECIPE = Path(__file__).parent / "tiny.yaml"


def main(result: str, shards: str, runs: str, kinds: str, stages: str, contexts: str, *overrides: str) -> None:
    """Train every combination; rank 0 writes {"kind z0 cp1": [[loss, grad_norm], ...]}."""
    from launch.run_directory import read_metrics
    from launch.train import train
    from megatron_ext.context_parallel.layout import leave_layout
    from recipes.load import load_recipe

    found = {}
    # layouts outermost: every new cut of the world leaves gloo's threads behind
    for context in contexts.split(","):
        for kind in kinds.split(","):
            for stage in stages.split(","):
                name = f"{kind} z{stage} cp{context}"
                run = Path(runs) / name.replace(" ", "_")
                settings = [
                    f"run_dir={run}", f"data.shards={shards}", f"model.attention.kind={kind}",
                    f"parallel.zero_stage={stage}", f"parallel.context={context}", *overrides,
                ]  # fmt: skip
                train(load_recipe(RECIPE, settings))
                if os.environ["RANK"] == "0":
                    found[name] = [[r["loss"], r["grad_norm"]] for r in read_metrics(run / "metrics.jsonl")]
                    print(name, found[name][0], found[name][-1], flush=True)
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
