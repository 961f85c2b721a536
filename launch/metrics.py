"""What a run tells about itself, from rank 0: metrics.jsonl, TensorBoard and one progress line."""

import json
import math
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from launch.run_directory import read_metrics
from megatron_ext.model import head_dim
from recipes.schema import L2A_KINDS, ModelConfig

# dense bf16 of the vendor's data sheets, FLOP/s; a device that is not here gets no mfu
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def flops_per_token(model: ModelConfig, open_fraction: float = 1.0) -> float:
    """Forward and backward FLOP of one token: 6 per weight that multiplies, 12 per attended token and width.

    Args:
        open_fraction: L2A kinds: share of the queries that look back, the mean over all layers.
    """
    width = head_dim(model)
    kv_heads = model.num_kv_heads or model.num_heads
    attention = model.attention
    # a second look has its own multiplications by q, k, v and o, where it was not pruned
    looks = 1 + (attention.kind in L2A_KINDS) * (1 - len(attention.closed_layers) / model.num_layers)
    projections = looks * model.hidden_size * width * (2 * model.num_heads + 2 * kv_heads)
    per_layer = projections + 3 * model.hidden_size * model.ffn_size
    weights = model.num_layers * per_layer + model.vocab_size * model.hidden_size
    window = min(attention.window + 1, model.seq_length / 2)
    attended = {
        "dense": model.seq_length / 2,
        "swa": window,
        "freesolo": window + attention.top_k * attention.cell_size,
        "freesolo_l": window + attention.top_k * attention.cell_size,
        "l2a": window + open_fraction * model.seq_length / 2,
        "l2a_shared": window + open_fraction * model.seq_length / 2,
        "context_free": window + attention.open_probability * model.seq_length / 2,
        "l2a_freesolo": window + open_fraction * attention.top_k * attention.cell_size,
    }[attention.kind]
    return 6.0 * weights + 12.0 * model.num_layers * model.num_heads * width * attended


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


def gate_picture(gates: list[tuple[int, list[float]]]) -> Figure:
    """The open fraction of every layer (rows) over the logged steps (columns), as brightness from 0 to 1."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps, by_step = zip(*gates, strict=True)
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    layers = [number + 0.5 for number in range(len(by_step[0]) + 1)]
    image = axes.pcolormesh(edges, layers, list(zip(*by_step, strict=True)), vmin=0, vmax=1)
    axes.set(xlabel="step", ylabel="layer", title="Share of queries that look back")
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image)
    return figure


class MetricsWriter:
    """Writes one JSON object a step, TensorBoard scalars every `log_interval` steps, and the progress line."""

    def __init__(self, metrics: Path, tensorboard: Path, *, first_step: int, steps: int, log_interval: int):
        self._file = open(metrics, "a")  # noqa: SIM115 - lives as long as the run
        self._board = SummaryWriter(str(tensorboard), purge_step=first_step + 1)
        self._bar = tqdm(
            total=steps, initial=first_step, unit="step", desc="train", dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 20.0,
        )  # fmt: skip
        self._log_interval, self._last = log_interval, time.perf_counter()
        self._gates = [(one["step"], one["open_fraction"]) for one in read_metrics(metrics) if "open_fraction" in one]
        self._drawn = 0  # step of the last picture

    def elapsed(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def write(self, record: dict) -> None:
        """Append one step's record."""
        record = {name: _json_number(value) for name, value in record.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if record["step"] % self._log_interval == 0 or "heldout_loss" in record:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._scalar(name, value, record["step"])
        if "open_fraction" in record:
            self._gates.append((record["step"], record["open_fraction"]))
        if "heldout_loss" in record:
            self._draw_gates()
        self._bar.set_postfix_str(f"loss {_short(record['loss'])} lr {record['lr']:.2e}", refresh=False)
        self._bar.update()

    def _scalar(self, name: str, value: float | list[float], step: int) -> None:
        if isinstance(value, list):
            for layer, one in enumerate(value, start=1):
                self._board.add_scalar(f"{name}/layer_{layer:02d}", one, step)
        else:
            self._board.add_scalar(name, value, step)

    def _draw_gates(self) -> None:
        """Picture of the open fraction, layer x step: one in TensorBoard, that of the last step so far."""
        if self._gates and self._gates[-1][0] != self._drawn:
            self._drawn = self._gates[-1][0]
            self._board.add_figure("open_fraction", gate_picture(self._gates), self._gates[-1][0])

    def say(self, sentence: str) -> None:
        """Print above the progress line."""
        self._bar.write(sentence, file=sys.stderr)

    def close(self) -> None:
        """Draw the gates, flush everything."""
        self._draw_gates()
        self._bar.close()
        self._board.close()
        self._file.close()
