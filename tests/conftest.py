"""Every test starts from the same seed, and memory that kernels/ leaves unwritten is never zero by luck."""

import sys
from pathlib import Path

import pytest
import torch

KERNELS = str(Path(__file__).resolve().parents[1] / "kernels")

with torch.device("meta"):  # torch notes here which functions obey a device: later it would note the poisoned ones
    torch.empty(0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill what code under kernels/ gets from `torch.empty` and its kin with NaN, or the largest integer."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate):
    def allocate_poisoned(*args, **kwargs):
        memory = allocate(*args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith(KERNELS) and memory.dtype is not torch.bool:
            memory.fill_(torch.nan if memory.is_floating_point() else torch.iinfo(memory.dtype).max)
        return memory

    return allocate_poisoned
