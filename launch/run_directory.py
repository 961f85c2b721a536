"""The folder of one run: recipe, metrics, TensorBoard, checkpoints, logs, and the lock that keeps two jobs apart."""

import fcntl
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import orjson
from transformers import PreTrainedTokenizerFast

from data_prep.cache import open_shards
from data_prep.guard import DataError, read_manifest
from data_prep.host import host_folder
from data_prep.tokenizer import document_bos
from recipes.errors import UserError
from recipes.load import read_model, read_value, save_recipe
from recipes.schema import ModelConfig, Recipe

PACKAGES = ("torch", "deepspeed", "megatron-core", "mosaicml-streaming", "omegaconf")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Inside, an error of the disk becomes a sentence that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}); free space, or see to the disk, and the same "
            "command goes on from the last checkpoint"
        ) from error


class _LogFile(logging.FileHandler):
    """A log for want of which no run ends: what it cannot take is said once on the screen."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.said:
            self.said = True
            why = sys.exc_info()[1]
            print(f"{self.baseFilename} could not be written ({why}); the run goes on without it", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # tries again what could not be written
            super().close()


class RunDirectory:
    """Paths of a run, and what is done to them when it starts and resumes. Only rank 0 writes, but for its own log."""

    def __init__(self, path: str | Path, *, rank: int):
        self.path, self.rank = Path(path), rank
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.temp = host_folder(self.path).with_suffix(".job")
        self._lock = None
        with written(self.path):
            self.logs.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                self.checkpoints.mkdir(exist_ok=True)
                self._take_lock()
            self.log = self._open_log()

    def _take_lock(self) -> None:
        # held by the open file: a killed process leaves no lock behind
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - lives as long as the run
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not shared with forked children
        except OSError as error:
            raise UserError(f"{self.path}: another job is training here; stop it or choose another run_dir") from error

    def _open_log(self) -> logging.Logger:
        log = logging.getLogger(f"longpitch.run.{self.path}.{self.rank}")
        log.setLevel(logging.INFO)
        log.propagate = False
        handler = _LogFile(self.logs / f"rank_{self.rank}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
        return log

    def write_recipe(self, recipe: Recipe, *, step: int) -> None:
        """Keep the resolved recipe with versions and git state; a changed one leaves its predecessor beside it."""
        path, aside = self.path / "recipe.yaml", self.path / "recipe.yaml.partial"
        save_recipe(recipe, aside, python=platform.python_version(), **_versions(), git=_git_state())
        if path.exists() and path.read_text() != aside.read_text():
            path.rename(self.path / f"recipe.before_step_{step}.yaml")
        aside.rename(path)

    def rewind_metrics(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which will be trained again; they are kept in logs/."""
        if not self.metrics.exists():
            return
        kept, dropped = [], []
        content = self.metrics.read_bytes()
        for line in content.splitlines():
            record = _record(line)
            (kept if record is not None and record["step"] <= step else dropped).append(line + b"\n")
        if b"".join(kept) == content:
            return
        with open(self.logs / "replaced_metrics.jsonl", "ab") as file:
            file.writelines(dropped)
        aside = self.metrics.with_suffix(".partial")
        aside.write_bytes(b"".join(kept))
        aside.rename(self.metrics)

    def close(self) -> None:
        """Release the log and the lock."""
        for handler in list(self.log.handlers):
            handler.close()
            self.log.removeHandler(handler)
        if self._lock is not None:
            self._lock.close()


def read_metrics(path: Path) -> list[dict]:
    """The metrics of a run, one dict a step, without a line that a kill cut off or a disk damaged."""
    return [record for line in path.read_bytes().splitlines() if (record := _record(line)) is not None]


def model_of(run: Path) -> ModelConfig:
    """The model section of the recipe that a run directory keeps."""
    return read_model(run / "recipe.yaml")


def find_tokenizer(run: Path) -> Path:
    """Where the tokenizer of a run lies: in the run directory itself (an import), else beside its shards."""
    own = run / "tokenizer"
    if own.is_dir():
        return own
    beside = find_shards(run) / "tokenizer"
    if not beside.is_dir():
        raise UserError(f"{run}: neither {own} nor {beside} exists; copy its tokenizer to one of them")
    return beside


def find_bos(run: Path, tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The token that begins the documents of a run, None where nothing does: what its shards say.

    Without shards (an import, or they have gone) what `prep` would decide for the tokenizer.
    """
    if read_value(run / "recipe.yaml", "data.shards") is not None:
        with suppress(DataError):
            return read_manifest(find_shards(run)).get("bos_id")
    return document_bos(tokenizer, str(run), read_value(run / "recipe.yaml", "data.add_bos"))


def find_shards(run: Path, named: str | None = None) -> Path:
    """The folder of shards that a run trained on, or the one that is `named` instead."""
    recipe = run / "recipe.yaml"
    shards = named or read_value(recipe, "data.shards")
    if shards is None:
        raise UserError(f"{recipe} names no data.shards; give data.shards=FOLDER, or add it there")
    return open_shards(shards, read_value(recipe, "data.cache") or host_folder(run) / "cache").path


def _record(line: bytes) -> dict | None:
    """A line of metrics.jsonl, None where it is none: whatever bytes it holds."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _versions() -> dict[str, str]:
    return {name.replace("-", "_"): version(name) for name in PACKAGES}


def _git_state() -> str:
    """Commit of the code, with a mark for uncommitted changes; 'unknown' outside a checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
