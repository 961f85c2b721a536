"""The training loop: from a checked recipe to a finished run, resuming by itself and stopping cleanly on a signal."""

import gc
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property, partial

import torch

from data_prep.batch import MicroBatch
from data_prep.cache import ShardFolder, open_shards
from data_prep.guard import check_manifest, read_manifest
from data_prep.heldout import EvalReader
from data_prep.host import host_folder
from data_prep.loader import TrainLoader
from launch import peers
from launch.failures import name_ranks
from launch.metrics import MetricsWriter, flops_per_token, memory_gib, peak_flops
from launch.run_directory import RunDirectory, written
from launch.stopping import Stop, StopNow, torchruns_patience, words
from megatron_ext import checkpoint, checkpoint_choice
from megatron_ext.engine import ModelInput, OptimizerSettings, PenaltySettings, StepResult, TrainEngine
from megatron_ext.model import LanguageModel, build_model, shared_tables, slice_context
from megatron_ext.parallel.collectives import barrier
from megatron_ext.parallel.layout import Layout, init_layout, pick_device
from megatron_ext.parallel.slices import own_slice, padded_length
from megatron_ext.sequence_context import Measured, RotationTables
from recipes.errors import UserError
from recipes.kinds import KINDS
from recipes.load import accumulation_steps, check_kernels, check_world, resolved
from recipes.schema import ModelConfig, Recipe, TrainConfig

SAMPLES_SAID, LAYERS_SAID = 16, 4  # in the sentence about a step that is not finite
# what may differ between a checkpoint and the run that continues it
NOT_THE_MODEL = ("init_from", "init_std")
PRECISION_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NOT_THE_ATTENTION = ("backend", "alpha_init", "leak_probability")


class TrainingError(UserError):
    """A run that had to stop; the last checkpoint is untouched."""


def model_facts(model: ModelConfig) -> dict:
    """What makes two models the same one, as complete.json keeps it."""
    facts = resolved(model)
    for key in NOT_THE_MODEL:
        del facts[key]
    for key in NOT_THE_ATTENTION:
        facts["attention"].pop(key, None)
    return facts


def precision_of(recipe: Recipe, device: torch.device) -> torch.dtype:
    """fp32 or bf16; `auto` is bf16 on a GPU."""
    bf16 = recipe.train.precision == "bf16" or (recipe.train.precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def changed_keys(then: dict, now: dict) -> str:
    """The keys of a recipe that have another value now, in one line."""
    then, now = _flat(then), _flat(now)
    keys = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
    return ", ".join(f"{key} {then.get(key)} -> {now.get(key)}" for key in keys)


def check_start(recipe: Recipe) -> None:
    """What a recipe alone does not tell: whether it fits the processes that were started, and their devices.

    Raises:
        RecipeError: the layout does not divide the processes, or the kernels of a GPU do not take the model's sizes.
    """
    check_world(recipe.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    on_gpu = pick_device(recipe.train.device).type == "cuda"
    check_kernels(recipe.model, on_gpu=on_gpu, context=recipe.parallel.context)


def penalty_settings(train: TrainConfig) -> PenaltySettings:
    """The penalty of open gates, with what the recipe leaves to the schedule filled in."""
    start = train.warmup_steps if train.gate_penalty_start is None else train.gate_penalty_start
    ramp = train.steps - start if train.gate_penalty_ramp is None else train.gate_penalty_ramp
    return PenaltySettings(
        weight=train.gate_penalty, start=start, ramp=ramp, per_token=train.gate_penalty_per == "token"
    )


def draw_model(recipe: Recipe, layout: Layout) -> LanguageModel:
    """This rank's part of the recipe's model, on the CPU, with the first weights that its seed draws."""
    torch.manual_seed(recipe.seed)
    return build_model(
        recipe.model,
        tensor=layout.tensor,
        context=layout.context,
        tensor_group=layout.tensor_group,
        dtype=precision_of(recipe, layout.device),
        recompute=recipe.train.recompute,
        fused=layout.device.type == "cuda",
    )


def optimizer_settings(recipe: Recipe) -> OptimizerSettings:
    """What the train section says of the optimization."""
    train = recipe.train
    return OptimizerSettings(
        steps=train.steps, lr=train.lr, min_lr=train.min_lr, warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay, beta1=train.beta1, beta2=train.beta2, eps=train.adam_eps, clip=train.clip,
        train_only=train.train_only, freeze=train.freeze,
        penalty=penalty_settings(train) if KINDS[recipe.model.attention.kind].gate else None,
    )  # fmt: skip


class Trainer:
    """One run: its engine, its data, its directory."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        # before any group exists: these raise the same sentence on every rank at once
        self.shards = self._open_shards(recipe.data.shards)
        self.streams = [self._open_shards(stream.shards) for stream in recipe.data.streams]
        manifest = self._check_shards()
        self.tokenizer_hash: str = manifest["tokenizer_hash"]
        self.heldout = recipe.train.eval_sequences > 0 and "heldout" in manifest["splits"]
        parallel = recipe.parallel
        check_start(recipe)
        self.layout = init_layout(
            tensor=parallel.tensor,
            context=parallel.context,
            device=recipe.train.device,
            timeout_seconds=parallel.timeout_seconds,
        )
        self.accumulation = accumulation_steps(recipe, self.layout.data)
        self.run = RunDirectory(recipe.run_dir, rank=self.layout.rank)
        self.seen_limit = min(checkpoint_choice.SEEN_LIMIT, parallel.timeout_seconds / 2)
        checkpoint_choice.check_shared(self.run.path, self.layout.rank, limit_seconds=self.seen_limit)
        self.resumed_from = checkpoint_choice.choose(
            self.run.checkpoints, self.layout, warn=self._warn, limit_seconds=self.seen_limit
        )
        self.step, self.tokens = 0, 0
        self.skipped = 0  # steps of the whole run that were not finite
        self.open_fraction = 1.0  # of the last logged step, the mean over layers; for the count of FLOP
        self.engine = self._build_engine()
        self.loader = self._open_loader()
        self.heldout_reader = self._open_heldout() if self.heldout else None
        client = self._resume()
        if client is not None:
            self.step, self.tokens = client["step"], client["tokens"]
            self.open_fraction = client.get("open_fraction", 1.0)  # these two are not in all checkpoints
            self.skipped = client.get("skipped", 0)
            self.loader.load_state_dict(client["data"])
            barrier()  # a rank that is done at once must not take away what another still attaches to
        self.saved_step = self.step  # of the last checkpoint
        self.micro_batch_seconds = 0.0  # in the last step
        self.stop = Stop(speaks=self.layout.rank == 0)
        self.stopping = 0  # why all ranks are about to stop, 0 while they are not

    # setting up

    def _warn(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)
        self.run.log.warning(sentence)

    def _open_shards(self, shards: str) -> ShardFolder:
        data = self.recipe.data
        limit = int(data.cache_gib * 2**30)
        return open_shards(shards, data.cache or host_folder(self.recipe.run_dir) / "cache", limit)

    def _check_shards(self) -> dict:
        """The manifest of `data.shards`; every folder must fit the model and have its tokenizer."""
        recipe, tokenizer = self.recipe, None
        for folder in (self.shards, *self.streams):
            manifest = check_manifest(
                folder.path,
                seq_length=recipe.model.seq_length,
                vocab_size=recipe.model.token_rows,
                tokenizer=recipe.data.tokenizer,
                expected_tokenizer=tokenizer,
            )
            tokenizer = manifest["tokenizer_hash"]
        return read_manifest(self.shards.path)

    def _check_same_tokenizer(self, checkpoint_path, facts: dict) -> None:
        if facts.get("tokenizer") not in (None, self.tokenizer_hash):
            raise checkpoint.CheckpointError(
                f"{checkpoint_path} was trained with another tokenizer than that of {self.shards.path}; prepare the "
                "text with that one, or start another run"
            )

    def _build_engine(self) -> TrainEngine:
        recipe, layout = self.recipe, self.layout
        facts = checkpoint.read_facts(self.resumed_from) if self.resumed_from else None
        self.universal = False
        if facts is not None:
            self._check_same_model(facts)
            self._check_same_tokenizer(self.resumed_from, facts)
            self._check_same_precision(facts)
            self.universal = checkpoint.needs_universal(facts, layout, recipe.parallel.zero_stage)
        dtype = precision_of(recipe, layout.device)
        model = draw_model(recipe, layout)
        origin = checkpoint.find(recipe.model.init_from) if recipe.model.init_from and facts is None else None
        if origin is not None:
            self._check_same_tokenizer(origin, checkpoint.read_facts(origin))
            checkpoint.load_weights(model, origin, recipe.model)
        train = recipe.train
        engine = TrainEngine(
            model,
            layout,
            optimizer_settings(recipe),
            zero_stage=recipe.parallel.zero_stage,
            dtype=dtype,
            micro_batch=train.micro_batch,
            accumulation=self.accumulation,
            loss_chunk=train.loss_chunk,
            fp32_accumulation=train.fp32_accumulation,
            load_universal=self.universal,
        )
        if origin is not None and dtype == torch.bfloat16:
            checkpoint.load_masters(engine, origin)
        if facts is not None and self.resumed_from is not None:
            if "trained" not in facts:
                self.run.log.warning(
                    "%s does not say what trained: train.freeze and train.train_only must be as they were",
                    self.resumed_from,
                )
            checkpoint.check_trained(self.resumed_from, facts, engine.trained)
        return engine

    def _check_same_precision(self, facts: dict) -> None:
        ours = PRECISION_NAMES[precision_of(self.recipe, self.layout.device)]
        if facts.get("precision", ours) != ours:
            raise checkpoint.CheckpointError(
                f"{self.resumed_from} was trained in {facts['precision']} and this run would go on in {ours}: set "
                f"train.precision={facts['precision']}, or start another run_dir with "
                f"model.init_from={self.resumed_from}"
            )

    def _check_same_model(self, facts: dict) -> None:
        saved, ours = _flat(facts["model"]), _flat(model_facts(self.recipe.model))
        for key in sorted(saved.keys() | ours.keys()):
            if saved.get(key) != ours.get(key):
                raise checkpoint.CheckpointError(
                    f"{self.resumed_from} is of another model: model.{key} is {saved.get(key)} there and "
                    f"{ours.get(key)} in the recipe; set it back or choose another run_dir"
                )

    def _open_loader(self) -> TrainLoader:
        recipe = self.recipe
        return TrainLoader(
            self.streams or self.shards,
            proportions=[stream.proportion for stream in recipe.data.streams] or None,
            global_batch=recipe.train.tokens_per_step // recipe.model.seq_length,
            micro_batch=recipe.train.micro_batch,
            seed=recipe.seed,
            replication=self.layout.tensor * self.layout.context,
            num_workers=recipe.data.num_workers,
            shuffle=recipe.data.shuffle,
            canonical_nodes=recipe.data.canonical_nodes,
            recall_beta=recipe.train.recall_beta,
            switch_beta=recipe.train.switch_beta,
            verify_hashes=recipe.data.verify_hashes,
            timeout_seconds=recipe.data.timeout_seconds,
            temp_dir=self.run.temp,
        )

    def _open_heldout(self) -> EvalReader:
        return EvalReader(
            self.shards.path,
            micro_batch=self.recipe.train.micro_batch,
            dp_rank=self.layout.data_rank,
            dp_size=self.layout.data,
            max_sequences=self.recipe.train.eval_sequences,
            scratch=self.loader.scratch,
        )

    def _resume(self) -> dict | None:
        if self.resumed_from is None:
            return None
        client = checkpoint.load(self.engine, self.resumed_from, universal=self.universal)
        place = {key: client[key] for key in ("step", "tokens", "data")}
        checkpoint_choice.check_alike(place, f"{self.resumed_from} has brought ranks to different places")
        self.run.log.info("resumed from %s%s", self.resumed_from, " through a universal checkpoint" * self.universal)
        saved = checkpoint.read_facts(self.resumed_from).get("recipe")
        if saved and (changes := changed_keys(saved, asdict(self.recipe))):
            self.run.log.info("the recipe holds where it is not the checkpoint's: %s", changes)
        return client

    # one step

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a micro-batch's tensor, where it lies."""
        ranks, block = self.layout.context, self.recipe.model.attention.query_block
        return own_slice(x, rank=self.layout.context_rank, ranks=ranks, query_block=block)

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the device, for which nothing waits: from pinned memory, behind what the device still does."""
        device = self.layout.device
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

    @cached_property
    def _tables(self) -> RotationTables | None:
        """The rotation tables of all micro-batches, if they have the same."""
        layout, model = self.layout, self.recipe.model
        tokens = padded_length(model.seq_length, layout.context, model.attention.query_block) // layout.context
        return shared_tables(model, start=layout.context_rank * tokens, tokens=tokens, device=layout.device)

    def model_input(self, batch: MicroBatch, *, measure: bool = False, step: int | None = None) -> ModelInput:
        """This rank's slice of a micro-batch, on its device.

        Its layers draw by the run's seed and `step`; without a step, outside training, as in every other run and in
        an exported model.
        """
        model = self.recipe.model
        tokens, labels, weights, doc_starts = (
            self._own(x) for x in (batch.tokens, batch.labels, batch.weights, batch.doc_starts)
        )
        context = slice_context(
            model,
            self._to_device(doc_starts) if model.attention.document_mask else doc_starts,
            start=self.layout.context_rank * tokens.shape[1],
            length=model.seq_length,
            tables=self._tables,
            measure=measure,
            seed=0 if step is None else self.recipe.seed,
            step=step or 0,
        )
        return ModelInput(self._to_device(tokens), self._to_device(labels), self._to_device(weights), context)

    def train_step(self) -> dict:
        """One optimizer step; returns its record for metrics.jsonl."""
        began = time.perf_counter()
        batches = [next(self.loader) for _ in range(self.accumulation)]
        weight = sum(self._own(batch.weights).double().sum().item() for batch in batches)
        measured: list[Measured] = []
        inputs, leave = self._inputs(batches, measured), partial(self._leave_if_told, self.step + 1)
        result = self.engine.train_step(inputs, weight=weight, between=leave)
        if not result.applied:
            self._not_finite(result, batches)
        self.loader.step_done()
        self.step += 1
        self.tokens += self.recipe.train.tokens_per_step
        seconds = time.perf_counter() - began
        self.micro_batch_seconds = seconds / self.accumulation
        return self._record(result, measured, seconds)

    def _inputs(self, batches: list[MicroBatch], measured: list[Measured]) -> Iterator[ModelInput]:
        """The micro-batches of a step, each brought to the device when it is asked for.

        What the layers measure of each is appended to `measured`.
        """
        measure = (self.step + 1) % self.recipe.train.log_interval == 0
        for batch in batches:
            one = self.model_input(batch, measure=measure, step=self.step)
            measured.append(one.context.measured)
            yield one

    def _record(self, result: StepResult, figures: list[Measured], seconds: float) -> dict:
        recipe, layout = self.recipe, self.layout
        speed = recipe.train.tokens_per_step / seconds
        peak = peak_flops(layout.device)
        measured = self._measured(figures)
        if "open_fraction" in measured:
            self.open_fraction = sum(measured["open_fraction"]) / len(measured["open_fraction"])
        flops = flops_per_token(recipe.model, self.open_fraction, self.engine.frozen)
        record = {
            "step": self.step,
            "loss": result.loss,
            **({"aux": result.aux} if self.engine.gates else {}),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": round(speed, 1),
            "mfu": round(flops * speed / layout.world / peak, 4) if peak else None,
            "memory_gib": round(memory_gib(layout.device), 3),
        }
        return record | measured

    def _measured(self, figures: list[Measured]) -> dict[str, list[float]]:
        """Each figure of the attention per layer, the mean over micro-batches and ranks."""
        layers = range(1, self.recipe.model.num_layers + 1)
        means = self.engine.mean_figures(figures)
        # one entry a layer: a layer that was pruned of its second look never looks back
        return {figure: [round(mean.get(layer, 0.0), 6) for layer in layers] for figure, mean in means.items()}

    def _not_finite(self, result: StepResult, batches: list[MicroBatch]) -> None:
        """Count the dropped step, or stop with the step, the ranks, the layers and the data."""
        self.skipped += 1
        ids = [sample for batch in batches for sample in batch.sample_ids]
        everyone = self.engine.find_non_finite(self._inputs(batches, []), ids[:SAMPLES_SAID])
        layer = everyone[self.layout.rank][0]
        self.run.log.warning("step %d is not finite here: %s, samples %s", self.step + 1, layer, ids)
        sentence = f"step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm} ({_findings(everyone)})"
        self.run.log.warning("not finite, weights unchanged: %s", sentence)
        if self.skipped > self.recipe.train.skip_nonfinite:
            raise TrainingError(
                f"{sentence}; the last checkpoint is untouched, train.skip_nonfinite allows "
                f"{self.recipe.train.skip_nonfinite} such steps"
            )

    # around the steps

    def evaluate(self) -> float:
        """Mean unweighted loss over the held-out sequences.

        Raises:
            StopNow: all ranks stop before they have measured it; not after the last step.
        """
        assert self.heldout_reader is not None
        return self.engine.evaluate(self._heldout_inputs(self.heldout_reader))

    def _heldout_inputs(self, reader: EvalReader) -> Iterator[ModelInput]:
        for number, batch in enumerate(reader):
            if number > 0 and self.step < self.recipe.train.steps:
                self._leave_if_told(self.step, self.accumulation + number)
            yield self.model_input(batch)

    def save(self) -> None:
        """Write a checkpoint of the state after the last finished step."""
        recipe = self.recipe
        facts = {
            "tokens": self.tokens,
            "tokenizer": self.tokenizer_hash,
            "layout": checkpoint.layout_facts(self.layout, recipe.parallel.zero_stage),
            "model": model_facts(recipe.model),
            "trained": self.engine.trained,
            "precision": PRECISION_NAMES[precision_of(recipe, self.layout.device)],
            "recipe": asdict(recipe),
        }
        client = {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.loader.state_dict(),
            "open_fraction": self.open_fraction,
            "skipped": self.skipped,
        }
        path = checkpoint.save(
            self.engine,
            self.run.checkpoints,
            step=self.step,
            facts=facts,
            client=client,
            keep=recipe.checkpoint.keep,
            limit_seconds=self.seen_limit,
        )
        self.run.log.info("saved %s", path)
        self.saved_step = self.step

    def must_stop(self, step: int, done: int) -> bool:
        """Whether any rank has been told to stop. Collective: all ranks must leave at the same place.

        Args:
            step, done: where this rank is: in which step, after how many of its micro-batches.
        """
        peers.mark(step, done)
        reason = self.layout.highest(self.stop.wanted())
        self.stopping = self.stopping or reason
        return self.stopping > 0

    def _leave_if_told(self, step: int, done: int) -> None:
        if self.must_stop(step, done):
            raise StopNow

    def due(self, interval: int) -> bool:
        """Whether something done every `interval` steps is due now; 0 is only at the end."""
        last = self.step >= self.recipe.train.steps
        return last or (interval > 0 and self.step % interval == 0)

    def close(self) -> None:
        """Let go of data, engine and directory; the process groups stay."""
        self.loader.close()
        self.engine.close()
        self.run.close()


def _findings(everyone: list[tuple[str, list[int]]]) -> str:
    """What each rank found, (layer, samples), alike layers together: as short for 1,024 ranks as for one."""
    said = []
    for layer in sorted({layer for layer, _ in everyone})[:LAYERS_SAID]:
        ranks = [rank for rank, found in enumerate(everyone) if found[0] == layer]
        samples = sorted({sample for rank in ranks for sample in everyone[rank][1]})
        more = " and more" * (len(samples) > SAMPLES_SAID)
        said.append(f"{name_ranks(ranks)}: {layer}, samples {samples[:SAMPLES_SAID]}{more}")
    return f"{'; '.join(said)}; logs/rank_N.log has each rank's"


def _flat(facts: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in facts.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@contextmanager
def short_collections() -> Iterator[None]:
    """Python's garbage collector looks only at objects that are made inside, not at all that was imported and built.

    Those are 600,000: looked through in the middle of a step, they cost each rank a third of a second, at another time
    than the others, which wait for it in their collectives.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train(recipe: Recipe) -> int:
    """Train until the recipe's last step, or a stop signal; returns the last finished step.

    The run directory decides whether this is a start or a continuation. Collective: every rank calls it.

    Raises:
        UserError: recipe, data, layout or checkpoint do not fit; nothing has been written over.
        TrainingError: a loss or gradient was not finite more often than the recipe allows.
        DataError: the shards are damaged.
        PeerError: another rank has failed, stopped or gone.
    """
    with peers.explained(recipe.parallel.timeout_seconds):
        trainer = Trainer(recipe)
        with trainer.stop.listening():
            try:
                with short_collections():
                    _loop(trainer)
            except KeyboardInterrupt as interrupt:
                raise TrainingError(
                    f"ended at once by a second Ctrl-C: {_what_is_kept(trainer)}; the same command goes on from there"
                ) from interrupt
            except BaseException:
                trainer.loader.abandon()
                raise
            finally:
                trainer.close()
    return trainer.step


def _what_is_kept(trainer: Trainer) -> str:
    return f"step {trainer.saved_step} is saved" if trainer.saved_step else "no step had been saved"


def _loop(trainer: Trainer) -> None:
    recipe, run, rank0 = trainer.recipe, trainer.run, trainer.layout.rank == 0
    if trainer.step >= recipe.train.steps:
        if rank0:
            print(f"{run.path}: already trained to step {trainer.step}; raise train.steps to go on")
        return
    writer = None
    if rank0:
        with written(run.path):
            run.rewind_metrics(trainer.step)
            run.write_recipe(recipe, step=trainer.step)
        train = recipe.train
        writer = MetricsWriter(
            run.metrics, run.tensorboard, first_step=trainer.step, steps=train.steps, log_interval=train.log_interval
        )
        if trainer.resumed_from:
            writer.say(f"resumed from {trainer.resumed_from} at step {trainer.step}")
    try:
        _steps(trainer, writer)
    finally:
        if writer:
            writer.close()


def _steps(trainer: Trainer, writer: MetricsWriter | None) -> None:
    train, interval = trainer.recipe.train, trainer.recipe.checkpoint.interval
    warned = False
    while trainer.step < train.steps and not trainer.stopping:
        try:
            record = trainer.train_step()
        except StopNow:
            break
        if trainer.heldout and trainer.due(train.eval_interval):
            with suppress(StopNow):
                record["heldout_loss"] = trainer.evaluate()
        if writer:
            writer.write(record)
        if not trainer.must_stop(trainer.step + 1, 0) and trainer.due(interval):
            began = time.perf_counter()
            trainer.save()
            if writer and not warned:
                warned = _warn_of_patience(writer, trainer.micro_batch_seconds, time.perf_counter() - began)
    if trainer.stopping and trainer.saved_step < trainer.step:
        trainer.save()
    if trainer.stopping and writer:
        writer.say(f"{words(trainer.stopping)}: {_what_is_kept(trainer)}; the same command goes on from there")


def _warn_of_patience(writer: MetricsWriter, micro_batch: float, save: float) -> bool:
    """Say so, once, if torchrun would kill the ranks while they save at its signal."""
    needed, patience = micro_batch + save, torchruns_patience()
    if needed > patience:
        writer.say(
            f"a signal to torchrun leaves the ranks {patience:.0f} s, but a micro-batch and a save took {needed:.0f}; "
            f"start it with --shutdown-timeout {math.ceil(2 * needed)}, or send the signal to the ranks themselves"
        )
    return needed > patience
