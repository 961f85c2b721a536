"""Sums of bits do not depend on how tensors are cut, and tell any two states apart; writers keep their errors."""

import itertools

import pytest
import torch

from megatron_ext import deepspeed_files
from megatron_ext.deepspeed_files import WrittenFiles, sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_sum_of_bits(dtype, monkeypatch):
    """Against the definition, with parts that do not divide the tensor."""
    monkeypatch.setattr(deepspeed_files, "SUMMED", 7)
    whole = (torch.randn(40) * 3).to(dtype)
    raw, size = whole.view(torch.uint8).tolist(), whole.element_size()
    words = (bytes(raw[start : start + size]) for start in range(0, len(raw), size))
    want = sum(int.from_bytes(word, "little", signed=True) for word in words) % 2**64
    assert sum_of_bits([whole]) == want
    assert sum_of_bits([whole.view(5, 8)[:, :3], whole.view(5, 8)[:, 3:], whole[:0]]) == want
    scalars = [each for each in whole]  # noqa: C416 - tensors of no dimension
    assert sum_of_bits(scalars) == want


def test_sum_of_bits_sees_the_smallest_change():
    state = torch.randn(1000)
    changed = [state.clone() for _ in range(3)]
    changed[0][17] = torch.nextafter(state[17], torch.tensor(torch.inf))
    changed[1][0] = -state[0]
    changed[2][5] = 0
    sums = [sum_of_bits([each]) for each in (state, *changed)]
    assert all(a != b for a, b in itertools.combinations(sums, 2))


def test_a_writer_keeps_its_first_error_and_writes_no_more(tmp_path):
    written = WrittenFiles(None)
    written.save({"a": torch.zeros(3)}, str(tmp_path / "first"))
    written.save({"a": torch.zeros(3)}, str(tmp_path / "absent" / "second"))
    written.save({"a": torch.zeros(3)}, str(tmp_path / "third"))
    assert written.sizes == {str(tmp_path / "first"): (tmp_path / "first").stat().st_size}
    assert written.error == f"{tmp_path}/absent/second could not be written (No such file or directory)"
    assert not (tmp_path / "third").exists()
