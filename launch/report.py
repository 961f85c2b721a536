"""Pictures of finished or running runs, drawn from their metrics.jsonl."""

import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

from data_prep.guard import read_manifest
from launch.run_directory import find_shards, read_metrics
from recipes.errors import UserError

matplotlib.use("Agg")


def draw_losses(runs: list[Path], out: Path) -> None:
    """Training and held-out loss over tokens, with the unigram entropy of the held-out text as a dashed line.

    Raises:
        UserError: a run without metrics of a step.
    """
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        records = read_records(run)
        (line,) = axes.plot([r["tokens"] for r in records], [r["loss"] for r in records], label=run.name, linewidth=1)
        held_out = [(r["tokens"], r["heldout_loss"]) for r in records if "heldout_loss" in r]
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), "o--", color=line.get_color(), markersize=5, label=f"{run.name}, held out"
            )
    entropy = unigram_entropy(runs[0])
    if entropy is not None:
        axes.axhline(entropy, linestyle=":", color="grey", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="tokens trained on", ylabel="loss (nats per token)", title="Loss")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def read_records(run: Path) -> list[dict]:
    """The metrics of a run's steps with a finite loss.

    Raises:
        UserError: there are none.
    """
    if not (run / "metrics.jsonl").exists():
        raise UserError(f"{run}: no metrics.jsonl there; name the run_dir of a run that has trained a step")
    records = [record for record in read_metrics(run / "metrics.jsonl") if record.get("loss") is not None]
    if not records:
        raise UserError(f"{run}: its metrics.jsonl holds no step with a finite loss; train a step of it first")
    return records


def unigram_entropy(run: Path) -> float | None:
    """Entropy (nats) of the held-out labels under their own unigram distribution, from the manifest of the shards."""
    try:
        value = read_manifest(find_shards(run)).get("heldout_unigram_entropy")
    except (OSError, ValueError):
        return None
    return value if value is not None and math.isfinite(value) else None
