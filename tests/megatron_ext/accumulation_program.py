"""Rank program: gradients of a bf16 step of many micro-batches at every ZeRO stage, beside the same step in fp32.

Argument: RESULT. Per case "STAGE MICRO_BATCHES SUMS": the mean over parameters of the relative error of the gradient
(RMS), and the bytes per trained parameter that its sums hold before the last backward. And "STAGE dropped": whether a
step has the same gradients after one that was not finite.
"""

import gc
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - the filter comes first

from megatron_ext.engine import ModelInput, OptimizerSettings, StepResult, TrainEngine  # noqa: E402
from megatron_ext.model import build_model, slice_context  # noqa: E402
from megatron_ext.parallel.collectives import all_reduce  # noqa: E402
from megatron_ext.parallel.layout import Layout, init_layout, leave_layout  # noqa: E402
from recipes.schema import AttentionConfig, ModelConfig  # noqa: E402

STAGES = (0, 1, 2, 3)
MANY, FEW = 64, 4
MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=128, seq_length=24,
    tie_embeddings=False, attention=AttentionConfig(kind="swa", window=12),
)  # fmt: skip
SETTINGS = OptimizerSettings(
    steps=4, lr=0.0, min_lr=0.0, warmup_steps=0, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.0,
    train_only=[], freeze=[r"layers\.0\.mlp"],
)  # fmt: skip


def micro_batch(number: int, layout: Layout) -> ModelInput:
    """Two random sequences of a micro-batch of this rank."""
    generator = torch.Generator().manual_seed(1000 * layout.data_rank + number)
    tokens, labels = (torch.randint(MODEL.vocab_size, (2, MODEL.seq_length), generator=generator) for _ in range(2))
    weights = torch.rand(2, MODEL.seq_length, generator=generator)
    context = slice_context(MODEL, torch.zeros_like(tokens), start=0, length=MODEL.seq_length)
    return ModelInput(tokens, labels, weights, context)


def step(engine: TrainEngine, batches: list[ModelInput]) -> StepResult:
    """One step over them."""
    return engine.train_step(batches, weight=sum(batch.weights.double().sum().item() for batch in batches))


def gradients(engine: TrainEngine, count: int) -> tuple[dict[str, torch.Tensor], int]:
    """Whole gradients of a step by name, and the bytes that their sums held before its last backward."""
    from deepspeed.utils import safe_get_full_grad

    found, held, update, backward = {}, [], engine._update, engine.deepspeed.backward
    waiting = iter(range(count - 1, -1, -1))  # micro-batches that come after this one

    def look(*args):
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                whole = parameter.grad if engine.zero_stage == 0 else safe_get_full_grad(parameter)
                found[name] = whole.float().clone()
        return update(*args)

    def count_bytes(loss):
        if next(waiting) in (0, count - 1):
            held.append(tensor_bytes(engine))
        return backward(loss)

    engine._update, engine.deepspeed.backward = look, count_bytes
    step(engine, [micro_batch(number, engine.layout) for number in range(count)])
    return found, held[-1] - held[0] + kept_buffers(engine)


def kept_buffers(engine: TrainEngine) -> int:
    """Bytes of the sums that are there from the start: stage 3 has one buffer for its part."""
    return engine.deepspeed.optimizer.grad_partitions_flat_buffer.nbytes if engine.zero_stage == 3 else 0


def tensor_bytes(engine: TrainEngine) -> int:
    """Bytes of all storages that are alive, without the buffers of DeepSpeed's default size that wait to be reduced."""
    gc.collect()
    storages, seen = {}, [parameter.grad for parameter in engine.model.parameters()]  # else known to torch only
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    del seen
    return sum(size for size in storages.values() if size < 2**28)


def engine_of(layout: Layout, stage: int, count: int, dtype: torch.dtype, wide: bool, *, unused: bool = False):
    """The same weights, rounded to bf16, in either dtype; with a parameter that never has a gradient, or without."""
    torch.manual_seed(3)
    model = build_model(replace(MODEL), dtype=torch.float32).bfloat16().to(dtype)
    if unused:
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=dtype)))
    return TrainEngine(
        model, layout, SETTINGS, zero_stage=stage, dtype=dtype, micro_batch=2, accumulation=count, loss_chunk=64,
        fp32_accumulation=wide,
    )  # fmt: skip


def same_after_a_dropped_step(layout: Layout, stage: int) -> bool:
    """Whether nothing of a step that was not applied is left in the next one's sums."""
    steps = []
    for dropped in (False, True):
        engine = engine_of(layout, stage, FEW, torch.bfloat16, True, unused=stage == 0)
        if dropped:
            batches = [micro_batch(number, layout) for number in range(FEW)]
            batches[1].weights[0, 3] = torch.nan
            assert not step(engine, batches).applied
        steps.append(gradients(engine, FEW)[0])
        engine.close()
    return all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def main(result: str) -> None:
    """Measure all cases; rank 0 writes them."""
    layout = init_layout(tensor=1, context=1, device="cpu", timeout_seconds=60.0)
    found = {}
    for count in (1, MANY):
        exact, _ = gradients(engine_of(layout, 1, count, torch.float32, True), count)
        trained = sum(value.numel() for value in exact.values())
        for stage in STAGES:
            for wide in (True, False):
                engine = engine_of(layout, stage, count, torch.bfloat16, wide)
                got, held = gradients(engine, count)
                assert got.keys() == exact.keys()
                errors = [((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact]
                total = all_reduce(torch.tensor([held / trained]), layout.data_context_group, "test").item()
                sums = "fp32" if wide else "bf16"
                found[f"{stage} {count} {sums}"] = [sum(errors) / len(errors), total / layout.world]
                engine.close()
    found |= {f"{stage} dropped": same_after_a_dropped_step(layout, stage) for stage in STAGES}
    if layout.rank == 0:
        Path(result).write_text(json.dumps(found))
    leave_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
