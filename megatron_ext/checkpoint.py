"""Checkpoints that are complete or absent: what a run saves and loads, and how one of another layout of GPUs is read.

DeepSpeed writes the files; `checkpoint_files` says which of them count, `checkpoint_choice` from which a run goes on.
"""

import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_ext import deepspeed_compat, deepspeed_files
from megatron_ext.checkpoint_choice import SEEN_LIMIT, comes, on_rank_0
from megatron_ext.checkpoint_files import (
    MARK,
    TAG,
    WEIGHTS,
    CheckpointError,
    make_room,
    mark_complete,
    newest_whole,
    publish,
    read_facts,
    remove_old,
    sync,
)
from megatron_ext.checkpoint_files import find as find
from megatron_ext.engine import TrainEngine
from megatron_ext.model import LanguageModel
from megatron_ext.parallel.collectives import barrier, gather_objects, group_rank, group_size
from megatron_ext.parallel.layout import Layout
from megatron_ext.weight_slices import MergedWeights, cut
from megatron_ext.weights import SHARD_BYTES, ShardWriter, StoredWeights
from recipes.kinds import KINDS
from recipes.schema import ModelConfig

CONVERSION_LIMIT = 6 * 3600.0  # seconds; a conversion reads and writes the whole training state in one process
POLL_SECONDS = 0.5


def save(
    engine: TrainEngine,
    folder: Path,
    *,
    step: int,
    facts: dict,
    client: dict,
    keep: int,
    limit_seconds: float = SEEN_LIMIT,
) -> Path:
    """Write the training state of every rank as `folder/step_N` and drop all but the `keep` newest. Collective.

    Args:
        facts: JSON-able description that a later run compares itself with; goes into complete.json.
        client: anything picklable that `load` hands back; the same on every rank.
        limit_seconds: after which a file that a rank has written must be there for rank 0.

    Raises:
        CheckpointError: a file could not be written, or rank 0 does not see it; what was there before stays.
    """
    rank, target = engine.layout.rank, folder / f"step_{step}"
    partial = on_rank_0(lambda: make_room(folder, step), rank)
    if partial is None:
        return target
    reports = gather_objects(_write(engine, partial, client))

    def finish() -> None:
        _check_written(partial, reports, limit_seconds)
        counted = {"files": [report["files"] for report in reports], "held": [report["held"] for report in reports]}
        publish(partial, target, {"step": step} | facts | counted)
        remove_old(folder, keep)

    try:
        on_rank_0(finish, rank)
    except CheckpointError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            shutil.rmtree(partial, ignore_errors=True)  # its space is needed
        newest = newest_whole(folder)[0]
        kept = f"{newest} is still there" if newest else "there is no other checkpoint"
        raise CheckpointError(f"step {step} is not saved: {error}; {kept}") from error
    return target


def _write(engine: TrainEngine, partial: Path, client: dict) -> dict:
    """Write this rank's files into `partial`; what it wrote, what it holds, and what went wrong."""
    layout = engine.layout
    with deepspeed_files.written_files(engine.deepspeed) as written:
        engine.deepspeed.save_checkpoint(str(partial), tag=TAG, client_state=client, save_latest=False)
        written.save(_random_state(layout.device), str(partial / f"random_rank_{layout.rank}.pt"))
    return {
        "files": {os.path.relpath(path, partial): size for path, size in written.sizes.items()},
        "held": _held(engine),
        "error": written.error,
        "host": socket.gethostname(),
    }


def _check_written(partial: Path, reports: list[dict], limit_seconds: float) -> None:
    """Refuse a checkpoint of which rank 0 does not see what every rank has written."""
    for rank, report in enumerate(reports):
        if report["error"]:
            raise CheckpointError(f"rank {rank} on {report['host']}: {report['error']}; free space, or see to the disk")
    for rank, report in enumerate(reports):
        for name, size in report["files"].items():
            file = partial / name
            if not comes(lambda: file.exists() and file.stat().st_size == size, limit_seconds):  # noqa: B023
                raise CheckpointError(
                    f"{file}, {size} bytes, was written by rank {rank} on {report['host']} and is not there for rank 0 "
                    f"on {socket.gethostname()}; choose a run_dir on a disk that all nodes share"
                )


def _held(engine: TrainEngine) -> list[int]:
    return deepspeed_files.held_by_rank(
        engine.deepspeed, engine.model, zero_stage=engine.zero_stage, group=engine.layout.data_context_group
    )


def save_weights(
    checkpoint: Path, weights: Iterable[tuple[str, torch.Tensor]], facts: dict, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a checkpoint that holds weights only: what `load_weights` reads and no run can resume. One process.

    Args:
        weights: names and tensors, taken one at a time.
        facts: "model", as of every checkpoint, and whatever else complete.json shall keep.
        shard_bytes: the most that waits in memory to be written, and the size of one file.
    """
    writer = ShardWriter(checkpoint / WEIGHTS, shard_bytes=shard_bytes)
    for name, tensor in weights:
        writer.add(name, tensor)
    writer.close()
    for path in [*(checkpoint / WEIGHTS).iterdir(), checkpoint / WEIGHTS]:
        sync(path)
    whole = {"world": 1, "tensor": 1, "context": 1, "zero_stage": 0, "weights_only": True}
    mark_complete(checkpoint, {"step": 0, "tokens": 0, "layout": whole} | facts)


def _random_state(device: torch.device) -> dict:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None}


def layout_facts(layout: Layout, zero_stage: int) -> dict:
    """The part of complete.json that decides how a checkpoint can be read."""
    return {"world": layout.world, "tensor": layout.tensor, "context": layout.context, "zero_stage": zero_stage}


def needs_universal(facts: dict, layout: Layout, zero_stage: int) -> bool:
    """Whether a checkpoint with `facts` must be converted before this layout can load it.

    Raises:
        CheckpointError: no way leads from that layout to this one.
    """
    saved = facts["layout"]
    if saved.get("weights_only"):
        raise CheckpointError(
            "run_dir holds a checkpoint of weights only, from which no run can go on: name it as model.init_from and "
            "choose another run_dir"
        )
    if saved["tensor"] != layout.tensor:
        raise CheckpointError(
            f"it was saved with parallel.tensor {saved['tensor']} and this run has {layout.tensor}; set it back"
        )
    if saved["zero_stage"] != zero_stage and {saved["zero_stage"], zero_stage} != {1, 2}:
        raise CheckpointError(
            f"it was saved with parallel.zero_stage {saved['zero_stage']}, which stage {zero_stage} "
            "cannot read (1 and 2 read each other's): set it back"
        )
    return zero_stage > 0 and (saved["world"], saved["zero_stage"]) != (layout.world, zero_stage)


def load(engine: TrainEngine, checkpoint: Path, *, universal: bool) -> dict:
    """Restore the training state of every rank; returns what `save` got as `client`.

    Args:
        universal: what `needs_universal` said, and what the engine was built with.
    """
    layout = engine.layout
    converted = universal_form(checkpoint, rank=layout.rank) if universal else None
    if converted is not None:
        path, client = deepspeed_compat.load_universal(engine.deepspeed, checkpoint, converted.name)
    else:
        path, client = deepspeed_compat.load_checkpoint(engine.deepspeed, checkpoint, TAG)
    if path is None:
        raise CheckpointError(f"{checkpoint}: DeepSpeed found nothing to load there; remove the folder and start again")
    if converted is not None:
        deepspeed_compat.restore_frozen_and_buffers(
            engine.model, checkpoint / TAG, zero_stage=engine.zero_stage, tensor_group=layout.tensor_group
        )
        barrier()
        if layout.rank == 0:
            (converted / MARK).unlink()  # first: half a conversion must not count
            shutil.rmtree(converted, ignore_errors=True)
    else:
        _restore_random_state(checkpoint / f"random_rank_{layout.rank}.pt", layout.device)
    _check_held(engine, checkpoint, universal=universal)
    return client


def universal_form(checkpoint: Path, *, rank: int, limit_seconds: float = CONVERSION_LIMIT) -> Path:
    """The folder with the universal form of a checkpoint, which rank 0 makes. Collective.

    That may last longer than any collective waits, so the other ranks look for a file meanwhile. A finished conversion
    outlives a run that dies before it has read it.

    Raises:
        CheckpointError: rank 0 failed, or is not done after `limit_seconds`; its own error is raised on rank 0.
    """
    target = checkpoint / (TAG + deepspeed_compat.UNIVERSAL_SUFFIX)
    mark, failure = target / MARK, checkpoint / f"{target.name}.failed"
    if rank == 0:
        failure.unlink(missing_ok=True)
        if not mark.exists():
            shutil.rmtree(target, ignore_errors=True)
    barrier()
    if rank == 0:
        if not mark.exists():
            _convert(checkpoint, target, failure)
    else:
        _wait_for(mark, failure, limit_seconds)
    barrier()
    return target


def _convert(checkpoint: Path, target: Path, failure: Path) -> None:
    try:
        deepspeed_compat.convert_to_universal(checkpoint, TAG)
        for path in [*target.rglob("*"), target]:
            sync(path)
        mark_complete(target, {})
    except BaseException as error:
        failure.write_text(f"{type(error).__name__}: {error}")
        raise


def _wait_for(mark: Path, failure: Path, limit_seconds: float) -> None:
    end = time.monotonic() + limit_seconds
    while not mark.exists():
        if failure.exists():
            raise CheckpointError(f"{mark.parent}: rank 0 could not convert the checkpoint ({failure.read_text()})")
        if time.monotonic() > end:
            raise CheckpointError(
                f"{mark.parent}: rank 0 has not converted the checkpoint after {limit_seconds:g} s; is the folder on "
                "a shared disk?"
            )
        time.sleep(POLL_SECONDS)


def _restore_random_state(path: Path, device: torch.device) -> None:
    if not path.exists():  # stage 0 on more ranks than saved
        return
    state = deepspeed_compat.read_data(path)
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def _check_held(engine: TrainEngine, checkpoint: Path, *, universal: bool) -> None:
    """Refuse to go on when what the ranks hold now is not what was saved. Collective.

    Every rank knows what it held then. In another layout the optimizer's parts are cut elsewhere, and only their sum
    must be the same: that of the first tensor-parallel rank, since of what all of those hold alike one is converted.
    """
    layout, held = engine.layout, gather_objects(_held(engine))
    saved = read_facts(checkpoint).get("held")
    way_out = "is that one folder for all ranks? restore it, or remove it to go on from the one before"
    tensor = layout.tensor
    if saved is not None and universal:
        then, now = (sum(one[0] for one in each[::tensor]) % 2**64 for each in (saved, held))
        if then != now:
            raise CheckpointError(f"{checkpoint}: the state that was loaded is not the one that was saved; {way_out}")
    elif saved is not None:
        wanted = saved if len(saved) == len(held) else [saved[rank % tensor] for rank in range(len(held))]
        wrong = [rank for rank, (then, now) in enumerate(zip(wanted, held, strict=True)) if then != now]
        if wrong:
            raise CheckpointError(f"{checkpoint}: rank {wrong[0]} has loaded another state than was saved; {way_out}")
    if engine.zero_stage < 3 and any(one[1] != held[rank % tensor][1] for rank, one in enumerate(held)):
        raise CheckpointError(f"{checkpoint}: ranks have loaded different weights from it; {way_out}")


def check_trained(checkpoint: Path, facts: dict, trained: dict) -> None:
    """Refuse a checkpoint whose state is of other parameters than those that train now: ZeRO tells them by place only.

    Args:
        facts: of the checkpoint; where they do not say what trained, nothing is checked.
        trained: `TrainEngine.trained`.
    """
    saved = facts.get("trained", trained)
    more, less = ([name for name in a if name not in b] for a, b in ((trained, saved), (saved, trained)))
    other = [name for name in saved if name in trained and saved[name] != trained[name]]
    if more or less:
        name, was, now = (more[0], "frozen", "trains") if more else (less[0], "trained", "is frozen")
        what = f"{name} was {was} in it and {now} in the recipe"
        count = len(more) + len(less) - 1
        what += f" (and {count} more differ)" if count else ""
    elif other:
        what = f"{other[0]} is {saved[other[0]]} in it and {trained[other[0]]} here"
    elif list(saved) != list(trained):
        what = "it holds its parameters in another order; use the versions that recipe.yaml names"
    else:
        return
    raise CheckpointError(
        f"{checkpoint}: {what}; set train.freeze and train.train_only back, or start another run_dir with "
        f"model.init_from={checkpoint}"
    )


# what two models must have in common for the one's weights to mean the same in the other, whatever the attention
SAME_DECODER = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "norm_eps",
                "qkv_bias", "qk_norm", "tie_embeddings")  # fmt: skip
FREESOLO_CONSTANTS = tuple(f".core_attention.{part}" for part in ("alpha", "gain", "sigma", "lam"))


@torch.no_grad()
def load_weights(model: LanguageModel, checkpoint: Path, config: ModelConfig) -> None:
    """Fill a model (not sharded yet; this tensor-parallel rank's part of it) with the weights of any checkpoint.

    What another kind of attention lacks keeps its start value (alpha and gain; the router, when the checkpoint is of no
    L2A kind), and L2A's second attention and its norm then start as copies of the first. Nothing else may be missing or
    left over: same shapes do not make the same model.

    Args:
        config: what `model` was built from.

    Raises:
        CheckpointError: another decoder, other constants, or weights that are missing, left over or of another shape.
    """
    saved_model = read_facts(checkpoint)["model"]
    _check_same_decoder(checkpoint, saved_model, config)
    ranks = {"rank": group_rank(model.tensor_group), "ranks": group_size(model.tensor_group)}
    state, ours = stored_weights(checkpoint), model.state_dict()
    left = sorted(name for name in state if name not in ours and not name.endswith(FREESOLO_CONSTANTS))
    if left:
        raise CheckpointError(
            f"{checkpoint} has {left[0]}{f' and {len(left) - 1} more' * (len(left) > 1)}, for which this model has no "
            "place; check model.attention (kind, closed_layers) and tie_embeddings"
        )
    gates_are_new = KINDS[saved_model["attention"]["kind"]].gate is None
    for name, own in ours.items():
        if own is None:
            continue
        saved = _start_of(name, state, gates_are_new)
        saved = None if saved is None else cut(name, saved, **ranks)
        _check_fit(checkpoint, name, own, saved, gates_are_new)
        if saved is not None:
            own.copy_(saved)


def _start_of(name: str, state: Mapping[str, torch.Tensor], gates_are_new: bool) -> torch.Tensor | None:
    """What a weight starts as: itself, or the first attention's where a second look is new."""
    saved = state.get(name)
    if saved is None and gates_are_new:
        first = name.replace(".global_attention.", ".self_attention.")
        saved = state.get(first.replace(".global_layernorm.", ".input_layernorm."))
    return saved


def load_masters(engine: TrainEngine, checkpoint: Path) -> None:
    """After `load_weights` into a bf16 model: give the optimizer's fp32 copies what that rounded away.

    Frozen weights have no such copy. Read one by one, so that nobody holds the model in fp32.
    """
    state = stored_weights(checkpoint)
    gates_are_new = KINDS[read_facts(checkpoint)["model"]["attention"]["kind"]].gate is None
    group = engine.layout.tensor_group
    ranks = {"rank": group_rank(group), "ranks": group_size(group)}

    def wide() -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for name, parameter in engine.model.named_parameters():
            saved = _start_of(name, state, gates_are_new) if parameter.requires_grad else None
            if saved is not None and saved.dtype != torch.bfloat16:
                yield parameter, cut(name, saved, **ranks)

    deepspeed_compat.set_masters(
        engine.deepspeed, wide(), zero_stage=engine.zero_stage, group=engine.layout.data_context_group
    )


def _check_same_decoder(checkpoint: Path, saved: dict, config: ModelConfig) -> None:
    def facts(model: dict) -> dict:
        heads, width = model["num_heads"], model["hidden_size"]
        return model | {
            "num_kv_heads": model["num_kv_heads"] or heads,
            "head_dim": model["head_dim"] or width // heads,
        }

    theirs, ours = facts(saved), facts(asdict(config))
    for key in SAME_DECODER:
        if theirs[key] != ours[key]:
            raise CheckpointError(
                f"{checkpoint} is of another model: model.{key} is {theirs[key]} there and {ours[key]} here; set it so"
            )


def stored_weights(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """The weights of a checkpoint by name: fp32 after ZeRO 1-3, else as stored. Each is put together when asked for."""
    layout = read_facts(checkpoint)["layout"]
    if layout.get("weights_only"):
        return StoredWeights(checkpoint / WEIGHTS)
    stage, ranks = layout["zero_stage"], range(layout["tensor"])
    return MergedWeights([deepspeed_compat.consolidated_weights(checkpoint, TAG, stage, rank) for rank in ranks])


def _check_fit(checkpoint: Path, name: str, own: torch.Tensor, saved: torch.Tensor | None, gates_are_new: bool) -> None:
    if saved is None:
        if name.endswith(FREESOLO_CONSTANTS) or (gates_are_new and name.endswith(".router.weight")):
            return
        raise CheckpointError(f"{checkpoint} is of another model: it has no {name}; check the model section")
    if saved.shape != own.shape:
        raise CheckpointError(
            f"{checkpoint} is of another model: {name} is {list(saved.shape)} there and {list(own.shape)} here; "
            "check the model section"
        )
    if name.endswith((".sigma", ".lam")) and not torch.equal(saved.to(own.dtype), own.cpu()):
        raise CheckpointError(
            f"{checkpoint}: {name} is {saved[0].item()} there and {own[0].item()} in the recipe; set model.attention so"
        )
