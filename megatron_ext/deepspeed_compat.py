"""What DeepSpeed needs to be told, or repaired, to train megatron-core models: everything of that kind is here.

Checked against deepspeed 0.19 with megatron-core 0.16 and 0.19. Each function says which fault it removes. DeepSpeed is
imported inside the functions: it looks for its accelerator at import, before a recipe could say `device: cpu`.
"""

import argparse
import contextlib
import io
import logging
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_ext.model import LanguageModel
from megatron_ext.parallel.collectives import Group, all_reduce, group_rank, group_size
from recipes.errors import UserError

UNIVERSAL_SUFFIX = "_universal"


class UnreadableFile(UserError):
    """A file of a checkpoint that is damaged, or holds what no checkpoint of ours does; the message names it."""


class ModelParallelUnit:
    """The groups of a run under the names that DeepSpeed asks for.

    "Data parallel" is data x context parallel here: gradients are summed and ZeRO shards over both. A partial adapter
    fails late: the universal checkpoint asks for the tensor and pipeline names, clipping for the model names.
    """

    get_data_parallel_group = staticmethod(lambda: parallel_state.get_data_parallel_group(with_context_parallel=True))
    get_data_parallel_rank = staticmethod(lambda: parallel_state.get_data_parallel_rank(with_context_parallel=True))
    get_data_parallel_world_size = staticmethod(
        lambda: parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    )
    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_src_rank = staticmethod(parallel_state.get_tensor_model_parallel_src_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_pipeline_model_parallel_group = staticmethod(parallel_state.get_pipeline_model_parallel_group)
    get_pipeline_model_parallel_rank = staticmethod(parallel_state.get_pipeline_model_parallel_rank)
    get_pipeline_model_parallel_world_size = staticmethod(parallel_state.get_pipeline_model_parallel_world_size)


def _import_deepspeed(device: torch.device):
    """DeepSpeed for this device, with only its errors on the screen: it prints a dozen INFO lines per rank."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def avoid_compiler_on_cpu() -> None:
    """Without this, the first `initialize` on a CPU compiles an extension: 29 s, or an error without a compiler."""
    import deepspeed.ops as ops

    compatible = getattr(ops, "__compatible_ops__", None)
    if isinstance(compatible, dict):
        compatible["deepspeed_shm_comm"] = False


def prepare_for_checkpoints(model: nn.Module) -> None:
    """Make the model's state convertible to a universal checkpoint.

    The converter asks for a version mark, fails when a pattern fits no trained parameter, and calls `.float()` on every
    entry of the state dict, where megatron-core leaves `_extra_state: None`.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def that_fit(*patterns: str) -> list[str]:
        return [pattern for pattern in patterns if any(re.match(pattern, name) for name in trained)]

    info = {
        "universal_checkpoint_version": 0.2,
        "tp_replicated_parameter_patterns": that_fit(
            r".*layernorm\.weight$", r".*core_attention\.gain$", r".*router\.weight$"
        ),
        "parameter_with_row_parallelism_patterns": that_fit(r".*linear_proj\.weight$", r".*linear_fc2\.weight$"),
    }
    model.universal_checkpoint_info = info  # pyright: ignore[reportArgumentType] - DeepSpeed looks for it there
    model.register_state_dict_post_hook(_drop_none_extra_state)


def _drop_none_extra_state(_module: nn.Module, state: dict, prefix: str, _metadata) -> None:
    for key in [key for key, value in state.items() if key.endswith("_extra_state") and value is None]:
        del state[key]


def ds_config(
    *,
    zero_stage: int,
    dtype: torch.dtype,
    micro_batch: int,
    accumulation: int,
    clip: float,
    fp32_accumulation: bool,
    load_universal: bool = False,
) -> dict:
    """DeepSpeed's configuration of a run. bf16 gradients are communicated in fp32.

    Args:
        fp32_accumulation: the gradients of a step's micro-batches are summed in fp32 in a bf16 run too.
    """
    wide = fp32_accumulation and dtype == torch.bfloat16 and accumulation > 1  # of one there is no sum
    # stage 1 reduces such sums through a buffer of fp32: half of DeepSpeed's elements keep it at the 1 GB of bf16
    bucket = {"reduce_bucket_size": 250_000_000} if wide and zero_stage == 1 else {}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero_stage} | bucket,
        "data_types": {"grad_accum_dtype": "fp32" if wide else None},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
        "checkpoint": {"load_universal": load_universal},
    }


def initialize(model: nn.Module, optimizer, config: dict, device: torch.device):
    """`deepspeed.initialize` with our groups; returns the engine."""
    deepspeed = _import_deepspeed(device)
    if device.type == "cpu":
        avoid_compiler_on_cpu()
    prepare_for_checkpoints(model)
    stage, wide = config["zero_optimization"]["stage"], config["data_types"]["grad_accum_dtype"] is not None
    if wide and stage == 0:  # DeepSpeed refuses the key there; the sums are torch's
        config = config | {"data_types": {}}
    with _own_optimizer_of_stage_1() if wide and stage == 1 else contextlib.nullcontext():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=ModelParallelUnit())
    if config["bf16"]["enabled"] and stage == 0:
        _undo_trial_step(engine.optimizer)
    if wide and stage == 0:
        for parameter in filter(lambda one: one.requires_grad, model.parameters()):
            parameter.grad_dtype = torch.float32
    return engine


@contextlib.contextmanager
def _own_optimizer_of_stage_1() -> Iterator[None]:
    """With fp32 sums of bf16 gradients DeepSpeed gives stage 1 another optimizer, with checkpoints of another kind.

    That of stages 1 and 2 can do it as well.
    """
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    choose = DeepSpeedEngine._do_optimizer_sanity_check
    DeepSpeedEngine._do_optimizer_sanity_check = lambda self, basic_optimizer: ZERO_OPTIMIZATION
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = choose


def fill_missing_gradients(model: nn.Module) -> None:
    """Before a step's last backward: zeros for what has no gradient yet, where DeepSpeed would make bf16 ones.

    That fails at stage 0, where fp32 sums of bf16 gradients lie in the parameters.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None and parameter.grad_dtype != parameter.dtype:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _undo_trial_step(optimizer) -> None:
    """Stage 0 in bf16 allocates AdamW's state by a step with zero gradients, which decays the weights and is counted.

    The first real update would be too short by the bias correction of a second step.
    """
    optimizer.optimizer.state.clear()
    optimizer.refresh_fp32_params()


def set_constants(engine, groups: list[dict], *, clip: float) -> None:
    """Give the optimizer its constants, at every step: loading a checkpoint puts those of the checkpoint there.

    Args:
        groups: for each group of parameters, in its order, the values by their names in torch's optimizer.
        clip: largest gradient norm, 0 for none; where the optimizer clips by itself.
    """
    for group, constants in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(constants)
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = clip


def stage0_grad_norm(model: nn.Module, tensor_group: Group) -> float:
    """Global gradient norm, which stage 0 does not report; called after the last backward of a step.

    Parameters that every tensor-parallel rank holds alike count once.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for parameter in model.parameters():
        shared = not getattr(parameter, "tensor_model_parallel", False)
        if parameter.grad is not None and not (shared and group_rank(tensor_group) > 0):
            total += parameter.grad.double().square().sum()
    return all_reduce(total, tensor_group, "grad_norm").sqrt().item()


@torch.no_grad()
def set_masters(engine, values: Iterable[tuple[nn.Parameter, torch.Tensor]], *, zero_stage: int, group: Group) -> None:
    """Set this rank's part of the fp32 copies that the optimizer keeps of bf16 parameters.

    DeepSpeed makes them from the bf16 parameters, however the model was built.

    Args:
        values: parameters that train, each with its whole value in a wider dtype.
        group: the ranks that share the state.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    whole = {}  # stage 0: parameter -> its copy
    if zero_stage == 0:
        for low, high in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            whole |= dict(zip(map(id, low), high, strict=True))
    for parameter, value in values:
        if zero_stage == 0:
            whole[id(parameter)].copy_(value)
        elif zero_stage < 3:
            safe_set_full_fp32_param(parameter, value)
        else:  # DeepSpeed's own function for whole values forgets that the last rank's part is padded
            with_parts: Any = parameter  # DeepSpeed attaches this rank's
            size = with_parts.ds_tensor.numel()
            padded = nn.functional.pad(value.flatten(), (0, size * group_size(group) - value.numel()))
            safe_set_local_fp32_param(parameter, padded.narrow(0, size * group_rank(group), size))


@contextlib.contextmanager
def _known(classes: Iterable[type]) -> Iterator[None]:
    """Files may hold objects of `classes` besides tensors and plain values, and none that other libraries allow."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)


def read_data(file: str | Path, *, known: Iterable[type] = (), read: Callable | None = None, **options: Any) -> Any:
    """torch.load of tensors and plain values; a pickle of anything else is refused and nothing of it runs.

    Args:
        known: classes that the file may hold besides.
        read: torch.load as it is outside `data_only`; None: as it is now.

    Raises:
        UnreadableFile: the file is damaged or holds something else.
    """
    try:
        with _known(known):
            settings: dict[str, Any] = options | {"weights_only": True}
            return (read or torch.load)(file, **settings)
    except (OSError, MemoryError, torch.OutOfMemoryError, UnreadableFile):
        raise
    except Exception as error:
        # the tools read through links of ours
        raise UnreadableFile(_why_unreadable(os.path.realpath(file), error)) from error


@contextlib.contextmanager
def data_only(*, mapped: bool = False, names: bool = False) -> Iterator[None]:
    """Inside, torch.load is `read_data`, whoever calls it, and knows the three classes that DeepSpeed stores.

    DeepSpeed reads whatever a pickle holds, and so runs what the author of a checkpoint wants. Its conversion must stay
    in this process: a worker of its own would not know of this.

    Args:
        mapped: files are mapped into memory instead of read.
        names: parameters whose names are paths are refused; a conversion calls folders by their names.
    """
    # unnamed, DeepSpeed looks for an accelerator and says so on the screen
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known, read = (LossScaler, ZeroStageEnum, fragment_address), torch.load

    def load(file, map_location=None, **options):
        options |= {"mmap": True} if mapped else {}
        state = read_data(file, known=known, read=read, map_location=map_location, **options)
        if names:
            _check_names(file, state)
        return state

    torch.load = load
    try:
        yield
    finally:
        torch.load = read


def _why_unreadable(file: str, error: Exception) -> str:
    named = re.search(r"(?:GLOBAL|[Bb]locklisted module) ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and named:
        return (
            f"{file} names {named[1]}, which no checkpoint of Longpitch holds and which could be a program; nothing of "
            "the file was used: take the checkpoint anew from where it was trained"
        )
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{file} cannot be read ({first_line}); restore it, or remove the checkpoint that it belongs to"


def _check_names(file: str | Path, state: Any) -> None:
    """Refuse a parameter whose name is a path: a conversion makes folders that are called as parameters are."""
    if not isinstance(state, dict):
        return
    named = [state.get("module"), state.get("param_shapes")]
    named.append((state.get("optimizer_state_dict") or {}).get("param_slice_mappings"))
    for part in named:
        for entry in part if isinstance(part, list) else [part]:
            for name in entry or ():
                if not re.fullmatch(r"\w[\w.-]*", str(name)):
                    raise UnreadableFile(f"{file} has a parameter called {name!r}, which is no name of a parameter")


def load_checkpoint(engine, checkpoint: Path, tag: str) -> tuple[str | None, dict]:
    """`engine.load_checkpoint` that runs nothing of what the files hold.

    Raises:
        UnreadableFile: a file is damaged or holds anything else than a checkpoint of ours.
    """
    with data_only():
        return engine.load_checkpoint(str(checkpoint), tag=tag)


def convert_to_universal(checkpoint: Path, tag: str) -> str:
    """Convert `checkpoint/tag` for another layout of GPUs (one process does it); returns the new tag."""
    from deepspeed.checkpoint import ds_to_universal

    target = checkpoint / (tag + UNIVERSAL_SUFFIX)
    options = argparse.Namespace(
        input_folder=str(checkpoint / tag),
        output_folder=str(target),
        num_extract_workers=1,  # no process besides this one, see `data_only`
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(io.StringIO()), data_only(names=True):
        ds_to_universal.main(options)
    return target.name


def load_universal(engine, checkpoint: Path, tag: str) -> tuple[str | None, dict]:
    """`engine.load_checkpoint` of a converted checkpoint, with a fault of stage 3 mended.

    It gives all parameters one and the same step counter, which AdamW then advances once for each of them.
    """
    loaded = load_checkpoint(engine, checkpoint, tag)
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state
    for state in states.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    return loaded


def restore_frozen_and_buffers(model: nn.Module, folder: Path, *, zero_stage: int, tensor_group: Group) -> None:
    """A universal load restores what the optimizer holds and silently nothing else: read the rest ourselves.

    Args:
        model: the module inside the engine.
        folder: the tag folder with the `*model_states.pt` files of the checkpoint.
        zero_stage: the stage of the checkpoint and of the run.
    """
    import deepspeed

    wanted = {name for name, p in model.named_parameters() if not p.requires_grad}
    mp_rank = f"mp_rank_{group_rank(tensor_group):02d}"
    if zero_stage < 3:
        file = folder / f"{mp_rank}_model_states.pt"
        state = read_data(file, map_location="cpu", mmap=True)["module"]
    else:
        files = sorted(
            folder.glob(f"zero_pp_rank_*_{mp_rank}_model_states.pt"),
            key=lambda path: int(path.name.split("_")[3]),
        )
        parts = [read_data(file, map_location="cpu", mmap=True) for file in files]
        state = {name: parts[0]["module"][name] for name in parts[0]["buffer_names"]}
        for name, shape in (parts[0]["frozen_param_shapes"] or {}).items():
            flat = torch.cat([part["frozen_param_fragments"][name].flatten() for part in parts])
            state[name] = flat[: shape.numel()].view(shape)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.copy_(state[name])
        for name, parameter in model.named_parameters():
            if name in wanted:
                with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=zero_stage == 3):
                    parameter.copy_(state[name])


def register_output_weight(model: LanguageModel, zero_stage: int) -> None:
    """ZeRO-3 gathers a weight for the module that owns it; tell it that the model itself multiplies by the output's."""
    if zero_stage == 3:
        import deepspeed

        deepspeed.zero.register_external_parameter(model, model.output_weight())


def drop_step(engine) -> None:
    """End a step of stage 0 without an update, counted as DeepSpeed counts the steps that the other stages skip."""
    engine.zero_grad()
    engine.micro_steps += 1
    engine.global_steps += 1
    engine.skipped_steps += 1


class _GatheredWeights(Mapping[str, torch.Tensor]):
    """Weights that DeepSpeed gathers from the files of all ranks, each when it is asked for; `plain` has the others."""

    def __init__(self, lazy: dict, plain: dict[str, torch.Tensor]):
        self._weights = plain | lazy

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def consolidated_weights(checkpoint: Path, tag: str, zero_stage: int, tensor_rank: int) -> Mapping[str, torch.Tensor]:
    """Weights and buffers of a tensor-parallel rank on the CPU: fp32 from the shards of all its data-parallel ranks.

    Stage 0 has them as they trained, and so has every stage those that are frozen. DeepSpeed's own tool takes all files
    of a folder for those of one tensor-parallel rank, and forgets the frozen weights of stage 1.
    """
    rank, plain = f"mp_rank_{tensor_rank:02d}", {}
    if zero_stage < 3:
        file = checkpoint / tag / f"{rank}_model_states.pt"
        state = read_data(file, map_location="cpu", mmap=True)["module"]
        plain = {name: value for name, value in state.items() if value is not None}
    if zero_stage == 0:
        return plain
    # mapped: the tool would otherwise read the model states of all ranks, and keep them
    silence = (contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()))
    with tempfile.TemporaryDirectory() as folder, silence[0], silence[1], data_only(mapped=True):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        (Path(folder) / tag).mkdir()
        for file in (checkpoint / tag).glob(f"*{rank}_*.pt"):
            (Path(folder) / tag / file.name).symlink_to(file.absolute())
        lazy = get_fp32_state_dict_from_zero_checkpoint(folder, tag=tag, lazy_mode=True)
    assert lazy is not None
    return _GatheredWeights(lazy, plain)
