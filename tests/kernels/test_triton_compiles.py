"""Every kernel compiles for the GPUs that we know, into what their multiprocessors hold; none of them is needed for it.

The interpreter accepts programs that the compiler refuses, such as branches that give a name different shapes.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import kernels.triton_readout
import kernels.triton_rows
from tests.kernels.compile_only import SHARED_KIB, compile_case

HOPPER = [
    ("freesolo", {"D": 64, "G": 2, "retain": 64}),
    ("freesolo", {"D": 96, "G": 1, "retain": None, "top_k": 1}),
    ("read_cells", {"D": 64}),
    ("rows", {"D": 128, "window": 4095, "sparse": False, "deterministic": False, "hopper": True}),
    ("rows", {"D": 64, "window": None, "sparse": True, "deterministic": False, "hopper": True}),
    ("rows", {"D": 96, "window": None, "sparse": True, "deterministic": True}),
    ("rope", {}),
]
# the widest heads, which take most shared memory
WIDEST = [
    ("freesolo", {"D": 128, "G": 2, "retain": 64, "top_k": 1}),
    ("rows", {"D": 128, "window": 4095, "sparse": True, "deterministic": False}),
]
EXACT = ("rows", {"D": 128, "window": None, "sparse": False, "deterministic": True})
JOBS = [(90, *job) for job in HOPPER] + [
    (capability, *job) for capability in (80, 86, 89, 100, 120) for job in (*WIDEST, *([EXACT] * (capability == 86)))
]


@pytest.fixture(scope="module")
def compiled() -> dict[int, dict[str, int]]:
    """For each compute capability, the most shared memory that each kernel takes."""
    found: dict[int, dict[str, int]] = {capability: {} for capability in SHARED_KIB}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (capability, *_), shared in zip(JOBS, pool.map(compile_case, *zip(*JOBS, strict=True)), strict=True):
            for name, size in shared.items():
                found[capability][name] = max(size, found[capability].get(name, 0))
    return found


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit(compiled, capability):
    shared = compiled[capability]
    assert {"_window_bwd_key_kernel", "_read_bwd_kernel"} < shared.keys()
    assert "rows_bwd_key_kernel" in shared if capability == 90 else "_rows_bwd_key_kernel" in shared
    limit = SHARED_KIB[capability] * 1024
    assert max(shared.values()) <= limit, f"more shared memory than the {limit} bytes there are: {shared}"


@pytest.mark.parametrize(
    ("cell_size", "dtype", "kib", "step"),
    [(32, torch.bfloat16, 227, 64), (32, torch.bfloat16, 99, 64), (128, torch.bfloat16, 227, 64),
     (128, torch.bfloat16, 99, 16), (32, torch.float32, 99, 32), (128, torch.float32, 227, 32)],
)  # fmt: skip
def test_steps_of_the_readout_fit(cell_size, dtype, kib, step, monkeypatch):
    """What was measured: bf16 cells of 128 tokens take 145 KiB at 64 pairs, fp32 cells of 32 take 105."""
    monkeypatch.setattr(kernels.triton_readout, "shared_memory", lambda device: kib * 1024)
    assert kernels.triton_readout.backward_step(dtype, 128, cell_size, torch.device("cpu")) == step


@pytest.mark.parametrize(("hip", "capability", "hopper"), [(None, 9, True), (None, 8, False), ("7.0", 9, False)])
def test_amd_is_not_hopper(hip, capability, hopper, monkeypatch):
    """An MI300X says of itself that it is 9.4, and has neither Hopper's copy engine nor its products."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 4))
    assert kernels.triton_rows._is_hopper.__wrapped__(torch.device("cuda")) is hopper


def test_gluon_is_imported_where_it_is_used_only():
    folder = Path(kernels.triton_rows.__file__).parent
    named = {path.name for path in folder.rglob("*.py") if "gluon" in path.read_text()}
    assert named == {"triton_rows_hopper.py"}


def test_cells_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(kernels.triton_readout, "shared_memory", lambda device: 99 * 1024)
    with pytest.raises(ValueError, match=r"128 tokens of heads of 128 in torch.float32 do not fit the 99 KiB"):
        kernels.triton_readout.backward_step(torch.float32, 128, 128, torch.device("cpu"))
