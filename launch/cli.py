"""The `longpitch` command: parses, calls, and turns every error into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong use (recipe or command line). Imports are inside the commands so that `--help` and
errors in a recipe do not wait for torch.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from launch import failures
from launch.cluster import commands as cluster
from launch.convert import ModelOverrides
from launch.convert import app as convert_app
from launch.overrides import check_changes
from launch.processes import expect_one_process, expect_torchrun_or_one
from recipes.errors import UserError
from recipes.load import RecipeError, load_recipe

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(convert_app, name="convert")

RecipePath = Annotated[Path, typer.Argument(help="YAML file, for example recipes/quickstart.yaml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Changes to the recipe, for example train.steps=100", show_default=False
    ),
]
RunPath = Annotated[Path, typer.Argument(help="run directory, or one checkpoint in it", show_default=False)]


@app.callback()
def _about(context: typer.Context) -> None:
    """Train and extend long-context language models with FreeSolo and L2A attention on many GPUs."""
    if context.invoked_subcommand == "train":
        expect_torchrun_or_one()
    elif context.invoked_subcommand != "bench":
        expect_one_process(context.invoked_subcommand or "")


@app.command(
    epilog="Example: longpitch prep recipes/quickstart.yaml data.shards=runs/shards "
    "'data.sources=[{path: kernels, suffixes: [.py]}]'"
)
def prep(
    recipe: Annotated[Path | None, typer.Argument(help="YAML file", show_default=False)] = None,
    overrides: Overrides = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="prove that a finished folder is whole", show_default=False)
    ] = None,
) -> None:
    """Turn the recipe's corpora into token shards with a manifest; a killed run goes on by the same command."""
    if verify is not None and recipe is None:
        from data_prep.verify import verify as prove

        found = prove(verify)
        typer.echo(f"{verify}: whole, {found['sequences']} sequences, {found['tokens']} tokens, {found['bytes']} bytes")
        return
    if recipe is None or verify is not None:
        raise RecipeError("prep takes a recipe, or --verify and a folder that prep has written")
    loaded = load_recipe(recipe, overrides)
    from data_prep.prep import prepare

    with _said_when_interrupted("what is done is kept, and the same command goes on from there"):
        made = prepare(loaded.data, seq_length=loaded.model.seq_length, vocab_size=loaded.model.token_rows)
    typer.echo(str(made))


@app.command(
    epilog="Example: torchrun --nproc-per-node 8 -m launch train recipes/freesolo_340m.yaml parallel.context=8"
)
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train, or go on from the newest complete checkpoint of the run directory.

    One process by itself, or every process of a torchrun job. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C stop after the
    micro-batch, save the last whole step and exit 0; so do ranks whose torchrun is gone.
    """
    loaded = load_recipe(recipe, overrides)
    failures.note_run_directory(loaded.run_dir)
    with _said_when_interrupted("no step was being trained, and nothing is lost"):
        from launch.train import train as run
        from megatron_ext.parallel.layout import leave_layout

        run(loaded)
        leave_layout()  # NCCL's threads would keep the process from ending


@app.command(epilog='Example: longpitch generate runs/quickstart/whole --prompt "def main(" --tokens 64')
def generate(
    run: RunPath,
    prompt: Annotated[list[str], typer.Option(help="text to go on from; may be given several times")],
    tokens: Annotated[int, typer.Option(help="tokens to add", min=1)] = 32,
    overrides: ModelOverrides = None,
) -> None:
    """Continue prompts greedily with the weights of a run."""
    check_changes(run, overrides, length=True)
    from launch.generate import greedy

    for text in greedy(run, prompt, tokens, overrides):
        typer.echo(text + "\n" + "-" * 20)


@app.command("eval", epilog="Example: longpitch eval runs/l2a model.attention.gate_threshold=0.7")
def evaluate(
    run: RunPath,
    sequences: Annotated[int, typer.Option(help="held-out sequences to measure on, at most", min=1)] = 32,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    overrides: ModelOverrides = None,
) -> None:
    """Held-out loss of a run, and how often each layer looks back; the gates' threshold may be moved."""
    check_changes(run, overrides, shards=True)
    from launch.evaluate import evaluate as measure

    found = measure(run, sequences=sequences, device=device, overrides=overrides)
    for layer, share in found.open_fraction.items():
        typer.echo(f"layer {layer:3d}: gate open for {share:7.2%}")
    typer.echo(f"loss on {found.tokens:,} held-out tokens: {found.loss:.4f}")


@app.command(epilog="Example: longpitch report runs/quickstart/whole runs/quickstart/broken --out report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="page to write: .html holds everything, .png the losses alone", show_default=True)
    ] = Path("report.html"),
) -> None:
    """Show one or several runs on a page: figures, curves, gates, checkpoints, recipes."""
    if out.suffix not in (".html", ".png"):
        raise RecipeError(f"--out is {out}; give a name that ends in .html or .png")
    if out.suffix == ".png":
        from launch.report import draw_losses as write
    else:
        from launch.report_page import write_page as write
    write(runs, out)
    typer.echo(f"wrote {out}")


app.command(epilog="Example: longpitch launch recipes/freesolo_340m.yaml --nodes 2 --gpus 8 --hosts hosts.txt")(
    cluster.launch
)
app.command(hidden=True)(cluster.node)
app.command(hidden=True)(cluster.chain)

bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def _about_bench(context: typer.Context) -> None:
    """Time our parts beside others', in one run on one machine."""
    if context.invoked_subcommand == "step":
        expect_torchrun_or_one()
    else:
        expect_one_process(f"bench {context.invoked_subcommand}")


def _need_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("this bench needs an NVIDIA GPU and torch sees none")


@bench.command("freesolo", epilog="Example: longpitch bench freesolo --out bench.json")
def freesolo_bench(
    out: Annotated[Path | None, typer.Option(help="JSON file to write besides", show_default=False)] = None,
) -> None:
    """Time and memory of FreeSolo's operator beside SDPA, for 4K to 256K tokens."""
    _need_gpu()
    from launch.bench.freesolo import bench_freesolo

    bench_freesolo(json_path=out)


@bench.command("l2a", epilog="Example: longpitch bench l2a --out bench.json")
def l2a_bench(
    out: Annotated[Path | None, typer.Option(help="JSON file to write besides", show_default=False)] = None,
) -> None:
    """Time and memory of L2A's sparse-query and window attention beside SDPA, for 4K to 128K tokens."""
    _need_gpu()
    from launch.bench.l2a import bench_l2a

    bench_l2a(json_path=out)


@bench.command("prep", epilog="Example: longpitch bench prep --out prep.json")
def prep_bench(
    out: Annotated[Path | None, typer.Option(help="JSON file to write besides", show_default=False)] = None,
    mib: Annotated[int, typer.Option(help="text to tokenize, MiB", min=1)] = 48,
) -> None:
    """Time tokenizing, reading shards, starting with 10,000 shards and resuming among 1 M samples, on this machine."""
    from launch.bench.prep import bench_prep

    bench_prep(json_path=out, mib=mib)


@bench.command("step", epilog="Example: longpitch bench step recipes/freesolo_340m.yaml --micro-batch 8")
def step_bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="attention kind to time; default: dense, dense-fa2 and the recipe's own")
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="sequences a step", min=1)] = 8,
    steps: Annotated[int, typer.Option(help="timed steps", min=1)] = 10,
) -> None:
    """Tokens a second of a recipe's whole training step beside dense attention's, and where the time goes.

    Under torchrun with the recipe's parallel layout; parallel.context=1 for one GPU.
    """
    loaded = load_recipe(recipe, overrides)
    _need_gpu()
    from launch.bench.step import bench_step
    from megatron_ext.parallel.layout import leave_layout

    baselines = ["dense"] if loaded.parallel.context > 1 else ["dense", "dense-fa2"]
    bench_step(
        loaded,
        tuple(kind or dict.fromkeys([*baselines, loaded.model.attention.kind])),
        micro_batch=micro_batch,
        steps=steps,
    )
    leave_layout()


def main() -> None:
    """Entry point of the console script and of `python -m launch`."""
    _keep_quiet()
    try:
        app()
    except Exception as error:
        _end(failures.report(error))


@contextlib.contextmanager
def _said_when_interrupted(what: str) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says what is kept."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise UserError(f"stopped by Ctrl-C; {what}") from interrupt


def _end(code: int) -> NoReturn:
    """Exit; at once when this is one rank of several: leaving a group in order waits for peers that may hang."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        sys.stdout.flush()
        sys.stderr.flush()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)
    sys.exit(code)


def _keep_quiet() -> None:
    """Silence what libraries say at import on every rank; errors still come through."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of a library that is compiled for the first time
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found" on a CPU
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # GPTModel is to be renamed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


if __name__ == "__main__":
    main()
