"""One optimizer step over ZeRO-sharded state, with a loss that is the mean over all tokens of all ranks.

DeepSpeed averages gradients over data x context ranks and divides the loss by the accumulation steps; a loss of
sum(w * nll) / (sum of w over every rank and micro-batch) therefore enters multiplied by both. The penalty of L2A's
gates enters inside the layers, past that division, so it is multiplied by the ranks only.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_ext import deepspeed_compat
from megatron_ext.model import LanguageModel
from megatron_ext.parallel.collectives import all_reduce, gather_objects, group_size, world_group
from megatron_ext.parallel.layout import Layout
from megatron_ext.router import Router
from megatron_ext.sequence_context import Measured, SequenceContext
from recipes.errors import UserError


@dataclass
class ModelInput:
    """One micro-batch of this rank: its slice of every sequence."""

    tokens: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B, T] int64
    weights: torch.Tensor  # [B, T] fp32, 0 where there is nothing to predict
    context: SequenceContext


@dataclass
class StepResult:
    """What one optimizer step reports; equal on every rank."""

    loss: float  # sum w*nll / sum w over all ranks and micro-batches
    grad_norm: float  # before clipping
    lr: float
    aux: float  # the penalty of open gates, as it entered the loss; not part of `loss`
    applied: bool  # False: loss or gradient was not finite and the weights are unchanged


@dataclass(frozen=True)
class PenaltySettings:
    """lambda * mean over sequences of [mean over gated layers of the sum over tokens of p^2], p from L2A's gates."""

    weight: float  # lambda, once it has grown
    start: int  # steps without penalty
    ramp: int  # steps from there on over which it grows linearly
    per_token: bool  # True: the mean over a sequence's tokens in place of their sum


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, warm-up then cosine, clipping; which parameters train."""

    steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float
    train_only: list[str]
    freeze: list[str]
    penalty: PenaltySettings | None = None


def penalty_at(step: int, settings: PenaltySettings) -> float:
    """lambda of step `step` (the first is 0): 0 for `start` steps, then up to `weight` in `ramp` equal stairs."""
    return settings.weight * min(1.0, max(0, step + 1 - settings.start) / max(1, settings.ramp))


def lr_at(step: int, settings: OptimizerSettings) -> float:
    """Learning rate of step `step` (the first is 0): linear up to lr in the warm-up, cosine to min_lr at the end.

    A step that was skipped counts like any other, here and in `penalty_at`.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    span = max(1, settings.steps - 1 - settings.warmup_steps)
    part = min(1.0, (step - settings.warmup_steps) / span)
    return settings.min_lr + 0.5 * (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * part))


def freeze_parameters(model: nn.Module, patterns: list[str], train_only: Sequence[str] = ()) -> list[str]:
    """Switch off the gradient of every parameter whose name matches one of the regular expressions `patterns`.

    With `train_only`, also of every parameter whose name matches none of those. Returns the names that do not train.

    Raises:
        UserError: a pattern that matches nothing, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, given in (("freeze", patterns), ("train_only", train_only)):
        for pattern in given:
            if not any(re.search(pattern, name) for name in names):
                raise UserError(f"train.{key} pattern {pattern!r} matches no parameter; one of them is {names[0]!r}")

    def matches(name: str, expressions: Sequence[str]) -> bool:
        return any(re.search(expression, name) for expression in expressions)

    frozen = [n for n in names if matches(n, patterns) or (train_only and not matches(n, train_only))]
    if len(frozen) == len(names):
        raise UserError(f"train.freeze {patterns} freezes every parameter that trains; nothing is left to train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return frozen


def _decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay is for this parameter: matrices only."""
    return parameter.dim() >= 2


def _optimizer(model: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if _decays(p)], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if not _decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr_at(0, settings),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=device.type == "cuda",
    )


class TrainEngine:
    """A model, its optimizer and DeepSpeed's ZeRO, stepped one global batch at a time."""

    def __init__(
        self,
        model: LanguageModel,
        layout: Layout,
        settings: OptimizerSettings,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        micro_batch: int,
        accumulation: int,
        loss_chunk: int,
        fp32_accumulation: bool = True,
        load_universal: bool = False,
    ):
        self.layout, self.settings, self.zero_stage = layout, settings, zero_stage
        self.accumulation, self.loss_chunk = accumulation, loss_chunk
        self.frozen = frozenset(freeze_parameters(model, settings.freeze, settings.train_only))  # names
        self.gates = sum(isinstance(module, Router) for module in model.modules())  # pruned layers have none
        # in the order in which DeepSpeed lays their state out; shapes of this tensor-parallel rank's parts
        self.trained = {
            name: {"shape": list(parameter.shape), "decays": _decays(parameter)}
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        model.to(layout.device)
        optimizer = _optimizer(model, settings, layout.device)
        constants = ("weight_decay", "betas", "eps")
        self._constants = [{key: group[key] for key in constants} for group in optimizer.param_groups]
        config = deepspeed_compat.ds_config(
            zero_stage=zero_stage,
            dtype=dtype,
            micro_batch=micro_batch,
            accumulation=accumulation,
            clip=settings.clip,
            fp32_accumulation=fp32_accumulation,
            load_universal=load_universal,
        )
        self.deepspeed = deepspeed_compat.initialize(model, optimizer, config, layout.device)
        deepspeed_compat.register_output_weight(model, zero_stage)
        self.model = model

    def _totals(self, *values: torch.Tensor) -> list[float]:
        return all_reduce(torch.stack(values), self.layout.data_context_group, "loss").tolist()

    def _loss(self, batch: ModelInput, forward: Callable) -> torch.Tensor:
        return forward(batch.tokens, batch.context, batch.labels, batch.weights, loss_chunk=self.loss_chunk)

    def train_step(
        self, batches: Iterable[ModelInput], *, weight: float, between: Callable[[int], None] = lambda done: None
    ) -> StepResult:
        """Forward, backward and update over `accumulation` micro-batches.

        Args:
            batches: each is taken when the one before it is done, so that they need not lie on the device together.
            weight: sum of the weights of all of them.
            between: called after each micro-batch but the last with how many are done. What it raises ends the step;
                the weights are as before it, and such an engine can be saved.
        """
        self.deepspeed.train()
        step = self.deepspeed.global_steps  # with the skipped ones
        lr = self._set_constants(step)
        (weight_sum,) = self._totals(torch.tensor(weight, dtype=torch.float64, device=self.layout.device))
        penalty_weight = 0.0
        ranks = group_size(self.layout.data_context_group)
        scale = ranks * self.accumulation / max(weight_sum, 1e-12)
        loss_sum, penalty_sum = torch.zeros(2, dtype=torch.float64, device=self.layout.device)
        for number, batch in zip(range(1, self.accumulation + 1), batches, strict=True):
            penalty_weight = self._penalty_weight(batch, step)
            batch.context.penalty_scale = penalty_weight * ranks
            loss = self._loss(batch, self.deepspeed)
            loss_sum += loss.detach().double()
            penalty_sum += sum(batch.context.penalties.values())
            if number == self.accumulation and self.zero_stage == 0:
                deepspeed_compat.fill_missing_gradients(self.model)
            # 0 * loss is 0, and NaN where the loss is not finite: the gradient then is NaN too, and nothing is updated
            self.deepspeed.backward(loss * (scale + 0 * loss.detach()))
            if number < self.accumulation:
                self.deepspeed.step()
                between(number)
        loss_sum, penalty_sum = self._totals(loss_sum, penalty_sum)
        mean_loss = loss_sum / max(weight_sum, 1e-12)
        grad_norm, applied = self._update()
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            aux=penalty_weight * penalty_sum,
            applied=applied and math.isfinite(mean_loss),
        )

    def _set_constants(self, step: int) -> float:
        """Give the optimizer the recipe's constants and the rate of this step; returns the rate."""
        lr = lr_at(step, self.settings)
        groups = [constants | {"lr": lr} for constants in self._constants]
        deepspeed_compat.set_constants(self.deepspeed, groups, clip=self.settings.clip)
        return lr

    def _penalty_weight(self, batch: ModelInput, step: int) -> float:
        """The weight that each sum of p^2 has in this step's loss."""
        penalty = self.settings.penalty
        if penalty is None:
            return 0.0
        sequences = batch.tokens.shape[0] * self.accumulation * self.layout.data
        tokens = batch.context.length if penalty.per_token else 1
        return penalty_at(step, penalty) / (sequences * max(self.gates, 1) * tokens)

    def _update(self) -> tuple[float, bool]:
        """Clip and apply. A non-finite gradient leaves the weights as they are: ZeRO sees to it, stage 0 we do."""
        if self.zero_stage == 0:
            norm = deepspeed_compat.stage0_grad_norm(self.model, self.layout.tensor_group)
            if not math.isfinite(norm):
                deepspeed_compat.drop_step(self.deepspeed)
                return norm, False
            self.deepspeed.step()
            return norm, True
        skipped = self.deepspeed.skipped_steps
        self.deepspeed.step()
        norm = self.deepspeed.get_global_grad_norm()
        assert norm is not None  # after a step
        norm = float(norm)
        return norm, self.deepspeed.skipped_steps == skipped and math.isfinite(norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[ModelInput]) -> float:
        """Mean loss over `batches` of every rank; each rank brings the same number of them."""
        self.deepspeed.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.layout.device)
        for batch in batches:
            loss = self._loss(batch, self.deepspeed)
            sums += torch.stack((loss.double(), batch.weights.double().sum()))
        all_reduce(sums, self.layout.data_context_group, "loss")
        return (sums[0] / sums[1]).item() if sums[1] > 0 else math.nan

    def mean_figures(self, measured: list[Measured]) -> dict[str, dict[int, float]]:
        """Each figure that the layers measured, by layer: the mean over micro-batches and ranks. Collective.

        Args:
            measured: of each micro-batch of this rank, the same figures of the same layers on all of them.
        """
        means = {}
        for figure in measured[0]:
            layers = sorted(measured[0][figure])
            values = torch.stack([torch.stack([one[figure][n] for n in layers]) for one in measured])
            sums, counts = all_reduce(values.sum(dim=0), world_group(), "metrics").unbind(-1)
            means[figure] = dict(zip(layers, (sums / counts.clamp(min=1)).tolist(), strict=True))
        return means

    def find_non_finite(self, batches: Iterable[ModelInput], samples: list[int]) -> list[tuple[str, list[int]]]:
        """For every rank the first module whose output is not finite, and the `samples` that it brings. Collective."""
        return gather_objects((self._first_non_finite(batches), samples), "findings")

    @torch.no_grad()
    def _first_non_finite(self, batches: Iterable[ModelInput]) -> str:
        """Name of the first module of this rank whose output is not finite, or where else to look. Collective."""
        found: list[str] = []

        def look(name: str):
            def hook(_module, _inputs, output):
                first = output[0] if isinstance(output, tuple) else output
                if not found and isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
                    found.append(name)

            return hook

        hooks = [module.register_forward_hook(look(name)) for name, module in self.model.named_modules() if name]
        try:
            losses = [self._loss(batch, self.deepspeed) for batch in batches]
        finally:
            for hook in hooks:
                hook.remove()
        if found:
            return found[0]
        return "the gradient" if all(torch.isfinite(loss) for loss in losses) else "the loss"

    def close(self) -> None:
        """Release what DeepSpeed holds (hooks, partitioned parameters)."""
        self.deepspeed.destroy()
