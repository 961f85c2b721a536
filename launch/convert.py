"""The `longpitch convert` commands; what they do is in `launch/conversion.py`."""

from pathlib import Path
from typing import Annotated

import typer

from launch.overrides import check_changes
from recipes.kinds import ATTENTION_KINDS, KINDS
from recipes.load import read_model

app = typer.Typer(no_args_is_help=True, help="Hugging Face models in and out; pruned models.")

OutPath = Annotated[Path, typer.Option("--out", help="folder to make; must not exist", show_default=False)]
ModelOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="for example model.attention.gate_threshold=0.7", show_default=False),
]


@app.command("import", epilog="Example: longpitch convert import --from Qwen2.5-7B --attention l2a --out models/7b")
def import_command(
    source: Annotated[Path, typer.Option("--from", help="folder of a Hugging Face model", show_default=False)],
    out: OutPath,
    attention: Annotated[str, typer.Option(help=" | ".join(ATTENTION_KINDS))] = "dense",
    overrides: ModelOverrides = None,
) -> None:
    """Read a Qwen2, Qwen2.5, Qwen3 or Llama model; its attention becomes the kind you name."""
    from launch.conversion import import_model

    made = import_model(source, out, attention, overrides or [])
    typer.echo(f"wrote {made}; use it as `base: {made}/recipe.yaml`, or as model.init_from={made}")
    if "window" in KINDS[attention].keys:
        window = read_model(made / "recipe.yaml").attention.window
        typer.echo(f"its window is {window} tokens; model.attention.window=N sets another, here and in a recipe")


@app.command("export", epilog="Example: longpitch convert export --from runs/l2a --out hf/l2a --dtype bf16")
def export_command(
    run: Annotated[Path, typer.Option("--from", help="run directory, or one checkpoint in it", show_default=False)],
    out: OutPath,
    dtype: Annotated[str, typer.Option(help="stored | fp32 | bf16")] = "stored",
    max_positions: Annotated[
        int | None, typer.Option(help="max_position_embeddings; default: the recipe's seq_length", min=1)
    ] = None,
    shard_mib: Annotated[int, typer.Option(help="largest size of one file", min=1)] = 1024,
    overrides: ModelOverrides = None,
) -> None:
    """Write a model that transformers loads: config.json, safetensors, tokenizer files."""
    check_changes(run, overrides, length=True)
    from launch.conversion import export_model

    made = export_model(
        run, out, dtype=dtype, max_positions=max_positions, shard_bytes=shard_mib << 20, overrides=overrides
    )
    typer.echo(f"wrote {made}")


@app.command("prune", epilog="Example: longpitch convert prune --min-closed 0.95 --stats runs/l2a --out models/pruned")
def prune_command(
    run: Annotated[Path, typer.Option("--stats", help="L2A run; its held-out shards are read", show_default=False)],
    out: OutPath,
    min_closed: Annotated[float, typer.Option(help="share of tokens for which a layer's gate is closed")] = 0.95,
    sequences: Annotated[int, typer.Option(help="held-out sequences to measure on, at most", min=1)] = 32,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda")] = "auto",
    overrides: ModelOverrides = None,
) -> None:
    """Leave out the second attention of layers whose gate is hardly ever open, and say what that saves."""
    check_changes(run, overrides, shards=True)
    from launch.prune import prune

    found = prune(run, out, min_closed=min_closed, sequences=sequences, device=device, overrides=overrides)
    for layer, share in found.open_fraction.items():
        typer.echo(f"layer {layer:3d}: gate open for {share:7.2%}{'   pruned' * (layer in found.closed_layers)}")
    typer.echo(
        f"wrote {out}\n"
        f"loss on {found.tokens:,} held-out tokens: {found.loss_before:.4f} -> {found.loss_after:.4f}\n"
        f"KV cache in bf16: {found.bytes_before:,} -> {found.bytes_after:,} bytes per token "
        f"({1 - found.bytes_after / found.bytes_before:.0%} less), and {found.window_bytes:,} for the windows as before"
    )
