"""The `longpitch convert` commands; what they do is in `launch/conversion.py`."""

from pathlib import Path
from typing import Annotated

import typer

from recipes.schema import ATTENTION_KINDS

app = typer.Typer(no_args_is_help=True, help="Hugging Face models in and out; pruned models.")

OutPath = Annotated[Path, typer.Option("--out", help="folder to make; must not exist", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="for example model.vocab_size=152576", show_default=False),
]


@app.command("import", epilog="Example: longpitch convert import --from Qwen2.5-7B --attention l2a --out models/7b")
def import_command(
    source: Annotated[Path, typer.Option("--from", help="folder of a Hugging Face model", show_default=False)],
    out: OutPath,
    attention: Annotated[str, typer.Option(help=" | ".join(ATTENTION_KINDS))] = "dense",
    overrides: Overrides = None,
) -> None:
    """Read a Qwen2, Qwen2.5, Qwen3 or Llama model; its attention becomes the kind you name."""
    from launch.conversion import import_model

    made = import_model(source, out, attention, overrides or [])
    typer.echo(f"wrote {made}; use it as `base: {made}/recipe.yaml`, or as model.init_from={made}")


@app.command("export", epilog="Example: longpitch convert export --from runs/l2a --out hf/l2a --dtype bf16")
def export_command(
    run: Annotated[Path, typer.Option("--from", help="run directory, or one checkpoint in it", show_default=False)],
    out: OutPath,
    dtype: Annotated[str, typer.Option(help="stored | fp32 | bf16")] = "stored",
    max_positions: Annotated[
        int | None, typer.Option(help="max_position_embeddings; default: the recipe's seq_length", min=1)
    ] = None,
    shard_mib: Annotated[int, typer.Option(help="largest size of one file", min=1)] = 1024,
) -> None:
    """Write a model that transformers loads: config.json, safetensors, tokenizer files."""
    from launch.conversion import export_model

    made = export_model(run, out, dtype=dtype, max_positions=max_positions, shard_bytes=shard_mib << 20)
    typer.echo(f"wrote {made}")
