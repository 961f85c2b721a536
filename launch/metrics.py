"""What a run tells about itself, from rank 0: metrics.jsonl, TensorBoard and one progress line."""

import json
import math
import resource
import sys
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from launch.run_directory import read_metrics, written
from megatron_ext.model import head_dim
from recipes.kinds import KINDS
from recipes.schema import ModelConfig

# dense bf16 of the vendor's data sheets, FLOP/s; a device that is not here gets no mfu
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def flops_per_token(model: ModelConfig, open_fraction: float = 1.0, frozen: Collection[str] = ()) -> float:
    """Forward and backward FLOP of one token, recomputation not counted.

    6 per weight that multiplies: 2 forward, 2 for the gradient of what it multiplies, 2 for its own. A frozen weight
    needs no gradient of its own and counts 4, since gradients pass through it to what trains below. 12 per attended
    token and width of head.

    Args:
        open_fraction: L2A kinds: share of the queries that look back, the mean over all layers.
        frozen: names of the parameters that do not train.
    """
    attended = KINDS[model.attention.kind].attended(model, open_fraction)
    weights = sum((4.0 if name in frozen else 6.0) * size for name, size in multiplied_weights(model).items())
    return weights + 12.0 * model.num_layers * model.num_heads * head_dim(model) * attended


def multiplied_weights(model: ModelConfig) -> dict[str, int]:
    """How many weights of each large matrix multiply one token, by parameter name; those used twice count twice."""
    q, kv = (heads * head_dim(model) for heads in (model.num_heads, model.num_kv_heads or model.num_heads))
    looks = {"linear_qkv": model.hidden_size * (q + 2 * kv), "linear_proj": q * model.hidden_size}
    kind, found = KINDS[model.attention.kind], {}
    for layer in range(model.num_layers):
        prefix = f"decoder.layers.{layer}."
        second = kind.global_reads is not None and layer not in model.attention.closed_layers
        shared = second and kind.shared_projections
        for name, size in looks.items():
            found[f"{prefix}self_attention.{name}.weight"] = size * (2 if shared else 1)
            if second and not shared:
                found[f"{prefix}global_attention.{name}.weight"] = size
        found[f"{prefix}mlp.linear_fc1.weight"] = 2 * model.hidden_size * model.ffn_size
        found[f"{prefix}mlp.linear_fc2.weight"] = model.hidden_size * model.ffn_size
    output = "embedding.word_embeddings" if model.tie_embeddings else "output_layer"
    return found | {f"{output}.weight": model.vocab_size * model.hidden_size}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of the device, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in PEAK_FLOPS.items() if chip in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory of this process: of the GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _json_number(value):
    """JSON has no NaN and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


# figure of a record -> what its panel says, and its brightest value (None: the largest there is)
PANELS = {"open_fraction": ("Share of queries that look back", 1.0), "router_norm": ("Norm of the router", None)}


def gate_picture(records: list[dict]) -> Figure:
    """The gates of every layer (rows) over the logged steps (columns): open fraction, and norm where a router learns.

    Args:
        records: "step" and the figures of PANELS, each a list with one number a layer.
    """
    panels = [name for name in PANELS if name in records[-1]]
    figure = Figure(figsize=(8, 4 * len(panels)), layout="constrained")
    steps = [record["step"] for record in records]
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    for name, axes in zip(panels, figure.subplots(len(panels), squeeze=False).flat, strict=True):
        title, brightest = PANELS[name]
        by_layer = list(zip(*(record[name] for record in records), strict=True))
        layers = [number - 0.5 for number in range(len(by_layer) + 1)]  # from 0, as parameters are named
        figure.colorbar(axes.pcolormesh(edges, layers, by_layer, vmin=0, vmax=brightest))
        axes.set(xlabel="step", ylabel="layer", title=title)
        axes.yaxis.get_major_locator().set_params(integer=True)
    return figure


def _gates_of(record: dict) -> dict:
    return {name: record[name] for name in ("step", *PANELS) if name in record}


class _Screen:
    """stderr, or nothing once its terminal or pipe is closed: a run does not end for want of a reader."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class MetricsWriter:
    """Writes one JSON object a step, TensorBoard scalars every `log_interval` steps, and the progress line."""

    def __init__(self, metrics: Path, tensorboard: Path, *, first_step: int, steps: int, log_interval: int):
        self._metrics, self._tensorboard = metrics, tensorboard
        with written(metrics):
            self._file = open(metrics, "a")  # noqa: SIM115 - lives as long as the run
        with written(tensorboard):
            self._board = SummaryWriter(str(tensorboard), purge_step=first_step + 1)
        self._bar = tqdm(
            total=steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 20.0, file=_Screen(),
        )  # fmt: skip
        self._log_interval = log_interval
        self._gates = [_gates_of(one) for one in read_metrics(metrics) if "open_fraction" in one]
        self._drawn = 0  # step of the last picture

    def write(self, record: dict) -> None:
        """Append one step's record.

        Raises:
            UserError: the disk does not take it.
        """
        record = {name: _json_number(value) for name, value in record.items()}
        with written(self._metrics):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        with written(self._tensorboard):
            self._write_board(record)
        self._bar.set_postfix_str(f"loss {_short(record['loss'])} lr {record['lr']:.2e}", refresh=False)
        self._bar.update()

    def _write_board(self, record: dict) -> None:
        if record["step"] % self._log_interval == 0 or "heldout_loss" in record:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._scalar(name, value, record["step"])
        if "open_fraction" in record:
            self._gates.append(_gates_of(record))
        if "heldout_loss" in record:
            self._draw_gates()

    def _scalar(self, name: str, value: float | list[float], step: int) -> None:
        if isinstance(value, list):
            for layer, one in enumerate(value):
                self._board.add_scalar(f"{name}/layer_{layer:02d}", one, step)
        else:
            self._board.add_scalar(name, value, step)

    def _draw_gates(self) -> None:
        """Picture of the gates, layer x step: one in TensorBoard, that of the last step so far."""
        if self._gates and self._gates[-1]["step"] != self._drawn:
            self._drawn = self._gates[-1]["step"]
            self._board.add_figure("gates", gate_picture(self._gates), self._drawn)

    def say(self, sentence: str) -> None:
        """Print above the progress line."""
        self._bar.write(sentence, file=_Screen())

    def close(self) -> None:
        """Draw the gates, flush everything."""
        self._bar.close()
        with written(self._metrics):
            self._file.close()
        with written(self._tensorboard):
            self._draw_gates()
            self._board.close()
