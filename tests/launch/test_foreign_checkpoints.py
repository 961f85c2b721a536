"""A checkpoint from somebody else runs nothing, whichever of its files holds a pickle that would."""

import re

import pytest
import torch

from megatron_ext.deepspeed_compat import UnreadableFile, data_only, read_data
from tests.distributed import run_ranks
from tests.launch.foreign_program import CLEAN, STAGES, MakesAFile

READINGS = ("weights", "resume", "convert", "converted", "converted states")


@pytest.fixture(scope="module")
def found(tmp_path_factory, shards) -> dict:
    """Every reading path at every ZeRO stage over every poisoned file, in one process."""
    return run_ranks("tests.launch.foreign_program", 1, str(tmp_path_factory.mktemp("foreign")), str(shards))


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_runs(found, reading, stage):
    if stage == 0 and reading.startswith("convert"):
        assert not any(case.startswith("convert") and "z0" in case for case in found)  # stage 0 needs no conversion
        return
    first, *rest = reading.split()
    cases = dict(found[" ".join([first, f"z{stage}", *rest])])
    assert cases.pop(CLEAN) == {"error": None, "ran": False}
    assert cases
    for file, result in cases.items():
        assert not result["ran"], file
        assert result["error"] and re.search(f"{re.escape(file)} names _?io.open, which no checkpoint", result["error"])
        assert "\n" not in result["error"]


def test_every_file_of_a_checkpoint_was_poisoned(found):
    for stage in STAGES:
        names = {file.rsplit("/")[-1].split("_rank_0")[-1] for file in found[f"resume z{stage}"]}
        assert {CLEAN, ".pt"} < names and any(name.endswith("model_states.pt") for name in names)
        assert stage == 0 or any(name.endswith("optim_states.pt") for name in names)


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"module": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(UnreadableFile, match=rf"^{file} cannot be read \(.*\); restore it, or remove"):
        read_data(file, map_location="cpu", mmap=True)
    with pytest.raises(FileNotFoundError):
        read_data(tmp_path / "none.pt")


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", ""])
@pytest.mark.parametrize("place", ["module", "shapes", "mappings"])
def test_no_parameter_is_called_like_a_path(tmp_path, name, place):
    """A conversion makes a folder for every parameter of the files that it reads."""
    states = {
        "module": {"module": {name: torch.ones(1)}},
        "shapes": {"module": {"a": torch.ones(1)}, "param_shapes": [{"a": torch.Size([1]), name: torch.Size([1])}]},
        "mappings": {"optimizer_state_dict": {"param_slice_mappings": [{"layer.weight": 1}, {name: 1}]}},
    }
    file = tmp_path / "state.pt"
    torch.save(states[place], file)
    with data_only(names=True), pytest.raises(UnreadableFile, match="which is no name of a parameter"):
        torch.load(file)


def test_torch_load_is_as_before_afterwards(tmp_path):
    before, allowed, file = torch.load, torch.serialization.get_safe_globals(), tmp_path / "state.pt"
    torch.save({"extra": MakesAFile(tmp_path / "ran")}, file)
    with pytest.raises(UnreadableFile), data_only(mapped=True):
        torch.load(file, weights_only=False)
    assert torch.load is before and set(torch.serialization.get_safe_globals()) == set(allowed)
    assert not (tmp_path / "ran").exists()


def test_what_other_libraries_allow_is_refused(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"path": tmp_path}, file)
    with torch.serialization.safe_globals([type(tmp_path)]):  # as megatron-core does
        assert torch.load(file) == {"path": tmp_path}
        with pytest.raises(UnreadableFile, match="names pathlib"):
            read_data(file)
        with pytest.raises(UnreadableFile, match="names pathlib"), data_only():
            torch.load(file)
