"""Read the held-out split for evaluation: in order, the same number of batches on every rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from streaming import LocalDataset

from data_prep.batch import MicroBatch, collate, filling
from data_prep.guard import WAY_OUT, DataError, Split, check_masks, check_split, split_facts
from data_prep.host import once_per_host
from data_prep.scratch import Scratch
from recipes.errors import UserError


class EvalReader:
    """The first sequences of a split as micro-batches of one data-parallel rank, as often as it is iterated.

    Sequence i is read by rank (i // micro_batch) % dp_size. A rank that has run out of sequences yields filling of
    zero weight, so that every rank runs the same number of forwards.

    Args:
        shards: folder written by `prepare`; the sequences are those of its subfolder `split`.
        micro_batch: sequences of one forward.
        dp_rank, dp_size: this rank among those that read different sequences.
        max_sequences: read at most so many over all ranks; None reads all.
        recall_beta, switch_beta: as for training; 0 gives the plain loss.
        verify_hashes: check the shards' hashes too, not only their sizes and sample counts.
        scratch: this job's folder on the host, if there are several ranks: one of a host checks for all of them.

    Attributes:
        seq_length: tokens of a sequence.
        num_sequences: read over all ranks.
    """

    def __init__(
        self,
        shards: str | Path,
        *,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        max_sequences: int | None = None,
        split: str = "heldout",
        recall_beta: float = 0.0,
        switch_beta: float = 0.0,
        verify_hashes: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        if micro_batch < 1 or not 0 <= dp_rank < dp_size:
            raise UserError(f"no batches for micro_batch {micro_batch} and data-parallel rank {dp_rank} of {dp_size}")
        checked = _checked(Path(shards) / split, verify_hashes, scratch)
        check_masks(checked, recall_beta, switch_beta)
        self.seq_length = checked.seq_length
        limit = checked.num_sequences if max_sequences is None else max_sequences
        self.num_sequences = min(limit, checked.num_sequences)
        self._folder, self._betas = checked.folder, (recall_beta, switch_beta)
        self._micro_batch, self._dp_rank, self._dp_size = micro_batch, dp_rank, dp_size
        self._dataset = LocalDataset(str(checked.folder))

    def __len__(self) -> int:
        """Batches of this rank, the same on every rank."""
        return -(-self.num_sequences // (self._micro_batch * self._dp_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        for number in range(len(self)):
            first = (number * self._dp_size + self._dp_rank) * self._micro_batch
            ids = range(first, min(first + self._micro_batch, self.num_sequences))
            rows = [collate([self._read(i)], *self._betas) for i in ids]
            rows += [filling(self.seq_length)] * (self._micro_batch - len(rows))
            yield MicroBatch(**{name: _stack([row[name] for row in rows]) for name in rows[0]})

    def _read(self, sequence: int) -> dict[str, Any]:
        try:
            return self._dataset[sequence] | {"id": sequence}
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"sequence {sequence} of {self._folder} cannot be read ({error}); {WAY_OUT}") from error


def _checked(folder: Path, verify_hashes: bool, scratch: Scratch | None) -> Split:
    def check() -> dict[str, Any]:
        return split_facts(check_split(folder, verify_hashes=verify_hashes))

    if scratch is None:
        return Split(**check())
    return Split(**once_per_host(scratch.folder, f"heldout {folder.absolute()} {verify_hashes}", check))


def _stack(parts: list[Any]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else sum(parts, [])
