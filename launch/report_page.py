"""One self-contained HTML page on one or several runs: figures, curves, gates, checkpoints and the recipe.

The curves are SVG whose lines of text take the page's colour, so that they can be read on a dark screen and on paper.
"""

import html
import io
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from launch.metrics import PANELS, gate_picture
from launch.report import read_records, unigram_entropy
from megatron_ext.checkpoint_files import complete_checkpoints, damage

INK = "#0b0b0c"  # stands for the page's own text colour in a picture
# told apart by most eyes, on white and on black
COLOURS = ("#2f86d6", "#e07b1a", "#2aa876", "#c44fa0", "#8a7bd8", "#b59a00")
WIDTH, HEIGHT = 7.2, 3.0  # inches of a curve
MOST_POINTS = 2000  # of a curve; more cannot be seen
STYLE = """
:root { color-scheme: light dark; --faint: #8884; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--faint); }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.5rem; }
svg { width: 100%; height: auto; } pre { overflow-x: auto; background: var(--faint); padding: 1rem; font-size: .85rem; }
figure { margin: 0; }
"""


@dataclass(frozen=True)
class Curve:
    """A figure of metrics.jsonl over tokens: title, axis with the unit, whether that is logarithmic or begins at 0."""

    key: str
    title: str
    axis: str
    logarithmic: bool = False
    from_zero: bool = False
    scale: float = 1.0


CURVES = (
    Curve("loss", "Loss", "nats per token"),
    Curve("grad_norm", "Gradient norm", "norm before clipping", logarithmic=True),
    Curve("lr", "Learning rate", "of AdamW"),
    Curve("tokens_per_second", "Speed", "thousand tokens per second", from_zero=True, scale=1e-3),
    Curve("mfu", "Model FLOP utilisation", "% of the peak", from_zero=True, scale=100.0),
    Curve("memory_gib", "Peak memory of rank 0", "GiB", from_zero=True),
    Curve("aux", "Penalty of open gates", "added to the loss"),
)


def write_page(runs: Sequence[Path], out: Path) -> None:
    """Write the page of some runs.

    Raises:
        UserError: a run without metrics of a step.
    """
    records = {run: read_records(run) for run in runs}
    names = ", ".join(run.name for run in runs)
    curves = [_curve(curve, records) for curve in CURVES if any(_points(one, curve.key) for one in records.values())]
    parts = [
        f"<h1>{html.escape(names)}</h1>",
        f"<div class='wide'>{_summary(records)}</div>",
        f"<h2>Curves</h2><div class='curves'>{''.join(curves)}</div>",
        *(_gates(run, one) for run, one in records.items()),
        *(_checkpoints(run) for run in runs),
        *(_recipe(run) for run in runs),
    ]
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width'><title>{html.escape(names)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page)


def _points(records: Sequence[dict], key: str) -> list[tuple[int, float]]:
    """Tokens and value of every step that has one, thinned out evenly."""
    found = [(record["tokens"], record[key]) for record in records if record.get(key) is not None]
    return _thinned(found)


def _thinned(found: list) -> list:
    return found[:: max(1, -(-len(found) // MOST_POINTS))]


def _summary(records: dict[Path, list[dict]]) -> str:
    rows: list[tuple[str, Callable[[list[dict]], str]]] = [
        ("steps", lambda one: f"{one[-1]['step']:,}"),
        ("tokens", lambda one: f"{one[-1]['tokens']:,}"),
        ("loss, mean of the last 10 steps", lambda one: f"{statistics.fmean(r['loss'] for r in one[-10:]):.4f}"),
        ("held-out loss", lambda one: _last(one, "heldout_loss", "{:.4f}")),
        ("tokens per second, median", lambda one: f"{statistics.median(r['tokens_per_second'] for r in one):,.0f}"),
        ("model FLOP utilisation", lambda one: _last(one, "mfu", "{:.1%}")),
        ("peak memory of rank 0", lambda one: f"{max(r['memory_gib'] for r in one):.1f} GiB"),
    ]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in records)
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{show(one)}</td>' for one in records.values())}</tr>" for name, show in rows
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _last(records: list[dict], key: str, form: str) -> str:
    return next((form.format(one[key]) for one in reversed(records) if one.get(key) is not None), "none measured")


def _curve(curve: Curve, records: dict[Path, list[dict]]) -> str:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=COLOURS)
    for run, one in records.items():
        points = _points(one, curve.key)
        if not points:
            continue
        tokens, values = zip(*points, strict=True)
        (line,) = axes.plot(tokens, [value * curve.scale for value in values], linewidth=1.2, label=run.name)
        if curve.key == "loss" and (held := _points(one, "heldout_loss")):
            label = f"{run.name}, held out"
            axes.plot(*zip(*held, strict=True), "o--", color=line.get_color(), markersize=4, linewidth=1, label=label)
    if curve.key == "loss" and (entropy := unigram_entropy(next(iter(records)))) is not None:
        axes.axhline(entropy, linestyle=":", color="grey", label="without context (unigram entropy)")
    axes.set(xlabel="tokens trained on", ylabel=curve.axis, title=curve.title)
    if curve.logarithmic:
        axes.set_yscale("log")
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(EngFormatter())
    if len(axes.get_lines()) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    return f"<figure>{_svg(figure, [axes])}</figure>"


def _gates(run: Path, records: list[dict]) -> str:
    measured = [record for record in records if any(name in record for name in PANELS)]
    if not measured:
        return ""
    figure = gate_picture(_thinned(measured))
    return f"<h2>Gates of {html.escape(run.name)}</h2><figure>{_svg(figure, figure.axes)}</figure>"


def _svg(figure: Figure, all_axes: Sequence[Axes]) -> str:
    """A picture as SVG without a background, whose ink is the page's."""
    figure.patch.set_alpha(0)
    for axes in all_axes:
        axes.patch.set_alpha(0)
        axes.tick_params(colors=INK, which="both")
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, axes.xaxis.offsetText, axes.yaxis.offsetText):
            text.set_color(INK)
        for spine in axes.spines.values():
            spine.set_color(INK)
        for mesh in axes.collections:
            mesh.set_rasterized(True)  # else a rectangle for every layer and step
        if not axes.collections:
            axes.grid(alpha=0.25)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "longpitch", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", dpi=150, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    return svg.replace(INK, "currentColor")


def _checkpoints(run: Path) -> str:
    rows = []
    for path in complete_checkpoints(run / "checkpoints"):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        state = html.escape(damage(path) or "whole")
        rows.append(f"<tr><td>{path.name}</td><td>{size / 2**20:,.1f} MiB</td><td>{state}</td></tr>")
    if not rows:
        return ""
    title = f"<h2>Checkpoints of {html.escape(run.name)}</h2>"
    return f"{title}<table><tr><th></th><th>size</th><th>files</th></tr>{''.join(rows)}</table>"


def _recipe(run: Path) -> str:
    path = run / "recipe.yaml"
    if not path.exists():
        return ""
    text = html.escape(path.read_text(errors="replace"))
    return f"<h2>Recipe of {html.escape(run.name)}</h2><pre>{text}</pre>"
