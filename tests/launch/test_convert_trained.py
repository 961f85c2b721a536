"""From Hugging Face into a sharded training run and out again: no tensor is lost, and no value.

Two ranks that share the state (ZeRO-1 and 3), or the weights themselves (tensor parallel, with ZeRO 0, 1 and 3).
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.heldout import EvalReader
from launch.conversion import export_model, import_model
from launch.run_directory import model_of
from megatron_ext.weights import StoredWeights
from tests.distributed import run_ranks
from tests.launch.hugging_face_models import FAMILIES, write_model

FROZEN = r"train.freeze=['mlp\.']"
WINDOW = "model.attention.window=9"
# name -> family, kind, overrides of the import, ZeRO stage, tensor-parallel ranks; those of one layout side by side
CASES = {
    "dense qwen3": ("qwen3-wide-heads", "dense", ["model.vocab_size=320"], 3, 1),
    "l2a qwen2.5": ("qwen2.5-untied", "l2a", [WINDOW], 3, 1),
    "l2a pruned": ("qwen3-wide-heads", "l2a", [WINDOW, "model.attention.closed_layers=[1]"], 3, 1),
    "l2a z1": ("qwen2-tied", "l2a", [WINDOW, "model.vocab_size=320"], 1, 1),
    "l2a tp2 z0": ("qwen2-tied", "l2a", [WINDOW, "model.vocab_size=320"], 0, 2),
    "l2a tp2 z1": ("qwen2-tied", "l2a", [WINDOW, "model.vocab_size=320"], 1, 2),
    "dense tp2 z3": ("llama", "dense", [], 3, 2),
}
STILL = ("dense qwen3", "l2a pruned", "l2a z1", "l2a tp2 z1")  # of which a run without learning is made besides


def settings_of(run: Path) -> list[str]:
    """Overrides that give a recipe the model of an imported run, at the length of the shards."""
    model = asdict(model_of(run)) | {"seq_length": 80}
    attention = model.pop("attention")
    flat = {f"model.{key}": value for key, value in model.items()}
    flat |= {f"model.attention.{key}": value for key, value in attention.items()}
    return [f"{key}={'null' if value is None else value}" for key, value in flat.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> dict:
    """Imported models trained on two ranks in one launch: `still` with learning rate 0, `moved` for three steps."""
    folder = tmp_path_factory.mktemp("trained")
    jobs = []
    for name, (family, kind, overrides, stage, tensor) in CASES.items():
        source = write_model(folder / name, FAMILIES[family])
        run = import_model(source, folder / f"{name}-imported", kind, overrides)
        layout = [f"parallel.zero_stage={stage}", f"parallel.tensor={tensor}"]
        common = [*settings_of(run), f"data.shards={shards}", *layout, FROZEN]
        still = [f"run_dir={folder / name}-still", "train.lr=0", "train.min_lr=0", "train.steps=1"]
        moved = [f"run_dir={folder / name}-moved", "train.steps=4", "train.recall_beta=0"]
        if name in STILL:
            jobs += [{"name": f"{name}-still", "settings": [*common, *still]}]
        jobs += [{"name": f"{name}-moved", "settings": [*common, *moved]}]
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return run_ranks("tests.launch.train_program", 2, str(path)) | {"folder": folder}


def export(trained: dict, name: str, tmp_path: Path) -> Path:
    return export_model(trained["folder"] / name, tmp_path / "out")


@pytest.mark.parametrize("name", STILL)
def test_start_weights_come_back_bit_for_bit(trained, tmp_path, name):
    got, want = StoredWeights(export(trained, f"{name}-still", tmp_path)), StoredWeights(trained["folder"] / name)
    assert {key for key in got if "global_" not in key and "router" not in key} == set(want)
    for key, value in got.items():
        original = key.replace("global_attn", "self_attn").replace("global_layernorm", "input_layernorm")
        assert value.numel() > 0
        assert not value.any() if "router" in key else torch.equal(value, want[original]), key


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_give_transformers_the_same_loss(trained, shards, tmp_path, name):
    found = trained[f"{name}-moved"]
    assert found["losses"][-1] < found["losses"][0]
    folder = export(trained, f"{name}-moved", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    if hasattr(model.config, "closed_layers"):
        assert all(layer.router.weight.any() for layer in model.model.layers if layer.has_global)
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in EvalReader(shards, micro_batch=2, max_sequences=4):
            nll = torch.nn.functional.cross_entropy(
                model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
            )
            weights = batch.weights.flatten()
            sums += torch.stack(((nll * weights).double().sum(), weights.double().sum()))
    assert (sums[0] / sums[1]).item() == pytest.approx(found["heldout"], rel=1e-5)
