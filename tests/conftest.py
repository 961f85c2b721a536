"""Every test starts from the same seed, and memory that kernels/ leaves unwritten is never zero by luck."""

import os
import sys
from pathlib import Path
from unittest import mock

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


@pytest.fixture(scope="module")
def alone():
    """Groups of one process, which megatron-core's layers ask for; yields their `Layout`."""
    from megatron_ext.parallel.layout import init_layout, leave_layout  # most tests do without megatron-core

    with mock.patch.dict(os.environ):
        os.environ.pop("RANK", None)
        yield init_layout(tensor=1, context=1, device="cpu", timeout_seconds=60)
        leave_layout()
