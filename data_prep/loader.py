"""Feed training: an endless, resumable stream of this rank's micro-batches from a split of shards.

The order of sequences depends on the split, the seed, the epoch, the global batch and `canonical_nodes` only: any
number of ranks, workers or context- and tensor-parallel replicas sees the same global batches. mosaicml-streaming
does the ordering and the reading; what is added is that every failure becomes one error on every rank, and that only
steps which finished count, whatever has been read ahead.
"""

import atexit
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any, Self

import torch
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.dataset import _ShardState
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from data_prep.batch import MicroBatch, collate
from data_prep.cache import ShardFolder
from data_prep.guard import WAY_OUT, DataError, Split, check_masks, check_split, split_facts
from data_prep.host import once_per_host
from data_prep.prefetch import Prefetcher
from data_prep.scratch import Scratch, remove_segments
from recipes.errors import UserError
from recipes.schema import DataConfig, TrainConfig

# bytes: an address of a Unix socket has at most 107, of which multiprocessing's own names take 32
LONGEST_TEMPORARY_FOLDER = 75
FETCHES = 5  # times a shard is fetched again that the cache's limit took away meanwhile
READ_AHEAD = 2  # micro-batches that wait for the training step
SHUFFLE = "py1e"  # the library's name for moving sequences within a window, so that few shards are open at a time


class TrainLoader:
    """Micro-batches of this rank, forever, epoch after epoch.

    Ranks are read from RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as torchrun sets them; unset, the process is alone.
    With WORLD_SIZE > 1 the caller has initialised torch.distributed, and all ranks construct the loader together
    (the library holds a barrier).

    A training step takes `micro_batches_per_step` batches, then calls `step_done()`:

        with TrainLoader(shards, global_batch=8, micro_batch=1, seed=1234) as loader:
            loader.load_state_dict(state)              # optional, before the first batch
            for step in range(steps):
                for _ in range(loader.micro_batches_per_step):
                    batch = next(loader)
                loader.step_done()
            state = loader.state_dict()

    Args:
        shards: folder written by `prepare`, or several, or as `open_shards` gave them; the sequences are those of the
            subfolder `split` of each.
        proportions: of the sequences of each folder, where there are several; scaled to sum to 1. None of an epoch's
            sequences is repeated: the folder that has the fewest for its proportion decides how long an epoch is.
        global_batch: sequences of one optimizer step over all ranks.
        micro_batch: sequences of one forward on one rank.
        seed: of the shuffle.
        replication: consecutive ranks that receive the same sequences (context x tensor parallel size).
        num_workers: reading processes of this rank; 0 reads in a thread.
        canonical_nodes: fixes the order for any number of nodes; one of the two numbers must divide the other.
        recall_beta, switch_beta: a label weighs 1 + recall_beta * recall + switch_beta * switch.
        verify_hashes: check the shards' hashes too, not only their sizes and sample counts.
        timeout_seconds: a batch that takes longer to arrive is an error.
        temp_dir: folder for this job's lock files, the same on all ranks of a host and used by no other running job,
            best on the host's own disk (`host_folder`); a subfolder per host is made in it, and removed when the last
            rank closes. None: a new folder under the system's temporary folder (single process only).

    Attributes:
        seq_length: tokens of a sequence.
        num_sequences: in the split.
        samples_per_epoch: the largest multiple of the global batch (and of canonical_nodes) in the split.
        micro_batches_per_step: of this rank.
        dp_rank, dp_size: this rank among those that receive different sequences.
        scratch: this job's folder on the host, which an EvalReader may share.

    Raises:
        UserError: the numbers do not fit each other, the split is smaller than one global batch, or reading processes
            find no temporary folder with a path short enough for their sockets.
        DataError: the split is damaged.
    """

    def __init__(
        self,
        shards: str | Path | ShardFolder | Sequence[str | Path | ShardFolder],
        *,
        global_batch: int,
        micro_batch: int,
        seed: int,
        proportions: Sequence[float] | None = None,
        split: str = "train",
        replication: int = 1,
        num_workers: int = DataConfig.num_workers,
        shuffle: bool = DataConfig.shuffle,
        canonical_nodes: int = DataConfig.canonical_nodes,
        recall_beta: float = TrainConfig.recall_beta,
        switch_beta: float = TrainConfig.switch_beta,
        verify_hashes: bool = DataConfig.verify_hashes,
        timeout_seconds: float = DataConfig.timeout_seconds,
        temp_dir: str | Path | None = None,
    ) -> None:
        _check_sockets(num_workers)
        self.dp_rank, self.dp_size = _ranks(replication, temp_dir)
        self.micro_batches_per_step = _micro_batches_per_step(global_batch, micro_batch, self.dp_size)
        self._folders = _folders(shards, proportions)
        self._global_batch, self._timeout = global_batch, timeout_seconds
        self._epoch, self._samples = 0, 0  # position after the last finished step
        self._taken, self._total_taken = 0, 0  # micro-batches of the step in progress, and since the start
        self._prefetcher: Prefetcher | None = None
        self._closed = False
        self.scratch = Scratch(temp_dir)
        try:
            self._splits = [_check(self.scratch, folder, split, verify_hashes) for folder in self._folders]
            for one in self._splits:
                check_masks(one, recall_beta, switch_beta)
            self.seq_length = _common_length(self._splits)
            self.num_sequences = sum(one.num_sequences for one in self._splits)
            self._shares = _shares(proportions, self._splits)
            self.samples_per_epoch = _samples_per_epoch(self._splits, self._shares, global_batch, canonical_nodes)
            self._fingerprint = self._order(seed, shuffle, canonical_nodes)
            self._dataset = self._open(micro_batch, replication)
            self._dataloader = StreamingDataLoader(
                self._dataset,
                batch_size=micro_batch,
                num_workers=num_workers,
                collate_fn=partial(collate, recall_beta=recall_beta, switch_beta=switch_beta),
                persistent_workers=num_workers > 0,
                worker_init_fn=_leave_process_group,
                multiprocessing_context="fork" if num_workers else None,  # workers only read; seconds less to start
                generator=torch.Generator(),  # else every epoch would draw from the training's own generator
            )
        except BaseException:
            self.scratch.close()
            raise

    def _order(self, seed: int, shuffle: bool, canonical_nodes: int) -> dict[str, Any]:
        """All that the order of sequences depends on."""
        return {
            "index_hash": "+".join(one.index_hash for one in self._splits),
            "proportions": [round(share, 9) for share in self._shares],
            "seq_length": self.seq_length,
            "seed": seed,
            "global_batch": self._global_batch,
            "shuffle": SHUFFLE if shuffle else "none",
            "canonical_nodes": canonical_nodes,
        }

    def _open(self, micro_batch: int, replication: int) -> "_Sequences":
        order = self._fingerprint
        if order["seed"] < 0:
            raise UserError(f"seed is {order['seed']}; give a number of at least 0")
        # the library warns at every epoch that positions must not be counted by rank; they are not
        logging.getLogger("streaming.base.dataset").setLevel(logging.ERROR)
        with self.scratch.own_names():
            dataset = _Sequences(
                streams=self._streams(),
                batch_size=micro_batch,
                epoch_size=self.samples_per_epoch,
                shuffle=order["shuffle"] != "none",
                shuffle_algo=SHUFFLE,
                shuffle_seed=order["seed"],
                num_canonical_nodes=order["canonical_nodes"],
                replication=replication,
            )
        dataset.folders = self._folders
        nodes, canonical_nodes = dataset._parallel_rank_world.num_nodes, order["canonical_nodes"]
        if nodes % canonical_nodes and canonical_nodes % nodes:
            raise UserError(f"data.canonical_nodes {canonical_nodes} and {nodes} nodes: one must divide the other")
        if dataset._unique_rank_world.is_local_leader:
            self.scratch.note_segments(dataset._shm_prefix_int)
        return dataset

    def _streams(self) -> list[Stream]:
        if len(self._splits) == 1:
            return [Stream(local=str(self._splits[0].folder))]
        pairs = zip(self._splits, self._shares, strict=True)
        return [Stream(local=str(one.folder), proportion=share) for one, share in pairs]

    @property
    def _place(self) -> str:
        return " + ".join(str(one.folder) for one in self._splits)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch of this rank; a DataError if none arrives."""
        if self._closed:
            raise RuntimeError("the loader is closed; make a new one")
        try:
            batch = self._fetch()
        except Exception as error:
            self.close()
            where = f"{self._place}: micro-batch {self._total_taken} since the start did not arrive"
            raise DataError(f"{where}: {_reason(error)}") from error
        self._taken += 1
        self._total_taken += 1
        return batch

    def _fetch(self) -> MicroBatch:
        if self._prefetcher is None:
            self._prefetcher = self._read_epoch(self._samples)
        try:
            return self._prefetcher.next()
        except StopIteration:
            # not before this batch is asked for: the ranks of a host wait for each other at the start of an epoch
            self._prefetcher = self._read_epoch(0)
            return self._prefetcher.next()

    def _read_epoch(self, samples_done: int) -> Prefetcher:
        steps = (self.samples_per_epoch - samples_done) // self._global_batch
        make_iterator = partial(_epoch, self._dataloader, steps * self.micro_batches_per_step)
        return Prefetcher(make_iterator, depth=READ_AHEAD, timeout_seconds=self._timeout)

    def step_done(self) -> None:
        """Count one global batch as consumed: call it after the optimizer step that used it."""
        if self._taken != self.micro_batches_per_step:
            raise RuntimeError(f"a step took {self._taken} micro-batches instead of {self.micro_batches_per_step}")
        self._taken = 0
        self._samples += self._global_batch
        if self._samples == self.samples_per_epoch:
            self._epoch, self._samples = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Position after the last finished step, the same on every rank: epoch, samples_in_epoch, fingerprint."""
        return {"epoch": self._epoch, "samples_in_epoch": self._samples, "fingerprint": dict(self._fingerprint)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, on any number of ranks, replicas or workers; before the first batch.

        Raises:
            UserError: the state belongs to other data or another order; the message names what differs.
        """
        if self._prefetcher is not None:
            raise RuntimeError("load_state_dict comes before the first batch")
        then, now = state["fingerprint"], self._fingerprint
        differing = [f"{key} (then {then.get(key)}, now {now[key]})" for key in now if then.get(key) != now[key]]
        if differing:
            raise UserError(
                f"the data position of the checkpoint does not fit {self._place}: {', '.join(differing)};"
                " set them back, or start a new run from the checkpoint's weights"
            )
        self._epoch, self._samples = state["epoch"], state["samples_in_epoch"]
        self._dataset.load_state_dict(
            {
                "epoch": self._epoch,
                "sample_in_epoch": self._samples,
                "num_canonical_nodes": now["canonical_nodes"],
                "shuffle_seed": now["seed"],
            }
        )

    def close(self) -> None:
        """Stop reading and remove this job's temporary files; the loader cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._dataset.stop()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if isinstance(self._dataloader._iterator, _MultiProcessingDataLoaderIter):
            self._dataloader._iterator._shutdown_workers()
        self._dataset.release()
        self.scratch.close()

    def abandon(self) -> None:
        """`close`, where the job has failed: the rank that should remove the shared memory may be stopped or dead."""
        prefix = self._dataset._shm_prefix_int
        self.close()
        remove_segments(prefix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Sequences(StreamingDataset):
    """The library's dataset for shards on local disks, where a missing file is an error, or comes by our own cache.

    The library would mark a missing shard as being downloaded, and every other rank would wait for it.
    """

    folders: list[ShardFolder]  # of the streams

    def get_item(self, sample_id: int, retry: int = 0) -> dict[str, Any]:
        number, index = self.spanner[sample_id]
        shard = self.shards[number]
        try:
            for _ in range(FETCHES):
                try:
                    return shard[index] | {"id": sample_id}
                except FileNotFoundError:  # evicted between reading ahead and reading
                    if not self._fetch(number):
                        raise
            raise UserError("it was evicted again and again; raise data.cache_gib")
        except DataError:
            raise
        except (OSError, ValueError, IndexError) as error:
            path = os.path.join(shard.dirname, shard.raw_data.basename)
            raise DataError(f"sequence {sample_id} of shard {path} cannot be read ({error})") from error

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        with contextlib.suppress(DataError):  # whoever reads the shard tries again, and says what is wrong
            self._fetch(shard_id)
        self._shard_states[shard_id] = _ShardState.LOCAL  # reading it tells whether it is there

    def _fetch(self, shard_id: int) -> bool:
        """Have a shard in the cache; False if its folder has no other place it could come from."""
        folder = self.folders[int(self.stream_per_shard[shard_id])]
        if folder.url is None:
            return False
        shard = self.shards[shard_id]
        stated = {"basename": shard.raw_data.basename, "bytes": shard.raw_data.bytes, "hashes": shard.raw_data.hashes}
        folder.fetch(Path(shard.dirname).name, stated)
        return True

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from super().__iter__()
        if self._event.is_set():  # the library ends an epoch without a word when one of its threads fails
            raise DataError("a reading thread failed")

    def stop(self) -> None:
        """End the library's own threads, which wait for this event."""
        if hasattr(self, "_event"):
            self._event.set()
            self._executor.shutdown(wait=False)

    def release(self) -> None:
        """Give back the shared memory now; the library would keep it, and the files open, to the end of the process."""
        scalars = (self._next_epoch.arr, self._cache_usage.arr, self._shared_barrier._arr)
        arrays = (self._shard_states, self._shard_access_times, *scalars)
        segments = [self._locals_shm, *(array.shm for array in arrays), getattr(self, "_resume_shm", None)]
        for segment in filter(None, segments):
            with contextlib.suppress(BufferError):  # a thread that is stuck still looks at it
                segment.cleanup()
                atexit.unregister(segment.cleanup)


def _leave_process_group(_worker: int) -> None:
    """A signal to the rank and its children, as torchrun and a terminal send, is the rank's to obey."""
    os.setpgid(0, 0)


def _epoch(dataloader: StreamingDataLoader, expected: int) -> Iterator[MicroBatch]:
    """The micro-batches of one epoch, or of what is left of it; ending early is an error."""
    received = 0
    for fields in dataloader:
        received += 1
        yield MicroBatch(**fields)
    if received != expected:
        raise DataError(f"the epoch ended after {received} of {expected} micro-batches")


def _reason(error: Exception) -> str:
    """One line for what stopped the reading, with the way out; an error from a worker carries a whole traceback."""
    text = (str(error).strip() or repr(error)).splitlines()[-1]
    if isinstance(error, TimeoutError):
        return f"{text}; see whether another rank or the file system has stopped, or raise data.timeout_seconds"
    if isinstance(error, DataError):
        return f"{text.removeprefix('data_prep.guard.DataError: ')}; {WAY_OUT}"
    return f"{type(error).__name__}: {text}; start the run again to resume from its last checkpoint"


def _ranks(replication: int, temp_dir: str | Path | None) -> tuple[int, int]:
    """This process's data-parallel rank and their number, from the variables that torchrun sets."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not {"RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        raise UserError(f"WORLD_SIZE is {world_size} but RANK or LOCAL_WORLD_SIZE is not set; start with torchrun")
    if world_size > 1 and temp_dir is None:
        raise UserError(f"the {world_size} ranks need a temp_dir that they share; name a folder of this job")
    if replication < 1 or world_size % replication:
        raise UserError(f"{world_size} ranks do not divide by tensor x context parallel size {replication}")
    return int(os.environ.get("RANK", 0)) // replication, world_size // replication


def _micro_batches_per_step(global_batch: int, micro_batch: int, dp_size: int) -> int:
    if min(global_batch, micro_batch) < 1 or global_batch % (dp_size * micro_batch):
        raise UserError(
            f"a global batch of {global_batch} sequences does not divide by {dp_size} data-parallel ranks"
            f" x micro_batch {micro_batch}; change train.tokens_per_step or train.micro_batch"
        )
    return global_batch // (dp_size * micro_batch)


def _check_sockets(num_workers: int) -> None:
    """Refuse a temporary folder in which reading processes could not make the sockets that pass their batches on.

    Without this nothing arrives, and only data.timeout_seconds ends the job.
    """
    folder = tempfile.gettempdir()
    if num_workers and len(os.fsencode(folder)) > LONGEST_TEMPORARY_FOLDER:
        raise UserError(
            f"the path of the temporary folder {folder} takes {len(os.fsencode(folder))} bytes, and the sockets of"
            f" data.num_workers {num_workers} allow {LONGEST_TEMPORARY_FOLDER}; set TMPDIR to a shorter one,"
            " or data.num_workers to 0"
        )


def _folders(shards: Any, proportions: Sequence[float] | None) -> list[ShardFolder]:
    several = list(shards) if isinstance(shards, Sequence) and not isinstance(shards, str) else [shards]
    folders = [one if isinstance(one, ShardFolder) else ShardFolder(Path(one).absolute()) for one in several]
    paths = [folder.path for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError(f"data.streams names one folder twice ({', '.join(map(str, paths))}); add its proportions up")
    if len(proportions or [1.0] * len(folders)) != len(folders) or any(share <= 0 for share in proportions or ()):
        raise UserError(f"data.streams needs a proportion above 0 for each of its folders, not {proportions}")
    return folders


def _check(scratch: Scratch, folder: ShardFolder, split: str, verify_hashes: bool) -> Split:
    """The split, checked by one rank of this host for all of them, which raise the same sentence if it is damaged."""

    def check() -> dict[str, Any]:
        if folder.url is None:
            return split_facts(check_split(folder.path / split, verify_hashes=verify_hashes))
        folder.check_originals(split)  # hashes are checked as shards arrive
        return split_facts(check_split(folder.path / split, has_shards=False))

    return Split(**once_per_host(scratch.folder, f"{split} {folder.url} {folder.path} {verify_hashes}", check))


def _common_length(splits: Sequence[Split]) -> int:
    lengths = {one.seq_length for one in splits}
    if len(lengths) > 1:
        raise UserError(f"data.streams mixes sequences of {sorted(lengths)} tokens; prepare them of one length")
    return lengths.pop()


def _shares(proportions: Sequence[float] | None, splits: Sequence[Split]) -> list[float]:
    parts = proportions or [one.num_sequences for one in splits]
    return [part / sum(parts) for part in parts]


def _samples_per_epoch(
    splits: Sequence[Split], shares: Sequence[float], global_batch: int, canonical_nodes: int
) -> int:
    """Sequences of an epoch: whole global batches only, since the library would repeat some to fill the last one."""
    if canonical_nodes < 1:
        raise UserError(f"data.canonical_nodes is {canonical_nodes}; give a number of at least 1")
    unit = lcm(global_batch, canonical_nodes)
    available = splits[0].num_sequences
    if len(splits) > 1:  # one less, as shares are rounded up or down to whole sequences
        available = min(int((one.num_sequences - 1) / share) for one, share in zip(splits, shares, strict=True))
    if available < unit:
        raise UserError(
            f"{splits[0].folder} has {available} sequences but one global batch (times canonical nodes) needs"
            f" {unit}; prepare more text, or lower train.tokens_per_step"
        )
    return available // unit * unit
