"""From Hugging Face into a sharded training run and out again: no tensor is lost, and no value.

Two ranks that share the state (ZeRO-1 and 3), or the weights themselves (tensor parallel, with ZeRO 0, 1 and 3).
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.heldout import EvalReader
from launch.conversion import export_model, import_model
from launch.evaluate import evaluate
from launch.run_directory import model_of
from megatron_ext.weights import StoredWeights
from recipes.load import resolved
from tests.launch.hugging_face_models import FAMILIES, attention_of, write_model
from tests.launch.runs import Found, run_jobs

FROZEN = r"train.freeze=['mlp\.']"
WINDOW = "model.attention.window=9"
PADDED = "model.vocab_size=320"
# name -> family, kind, overrides of the import
IMPORTS = {
    "dense qwen3": ("qwen3-wide-heads", "dense", [PADDED]),
    "dense qwen2": ("qwen2-tied", "dense", [PADDED]),
    "dense llama": ("llama", "dense", []),
    "l2a qwen2": ("qwen2-tied", "l2a", [WINDOW, PADDED]),
    "l2a qwen2.5": ("qwen2.5-untied", "l2a", [WINDOW, "model.attention.rope_base=5e6"]),  # 5e5 in the source
    "drawn qwen3": ("qwen3-wide-heads", "context_free", [WINDOW]),
    "cells qwen2": ("qwen2-tied", "l2a_freesolo", attention_of("l2a_freesolo", window=9)),
    "l2a pruned": ("qwen3-wide-heads", "l2a", [WINDOW, "model.attention.closed_layers=[1]"]),
}
# what is trained, ZeRO stage, tensor-parallel ranks
MOVED = [
    ("dense qwen3", 3, 1), ("l2a qwen2.5", 3, 1), ("l2a pruned", 3, 1), ("l2a qwen2", 1, 1),
    ("l2a qwen2", 0, 2), ("l2a qwen2", 1, 2), ("dense llama", 3, 2),
    ("drawn qwen3", 1, 1), ("cells qwen2", 3, 1),
]  # fmt: skip
# and what runs without learning, in which precision
STILL = [
    ("dense qwen3", 3, 1, "fp32"), ("l2a pruned", 3, 1, "bf16"), ("l2a qwen2", 0, 1, "bf16"),
    ("l2a qwen2", 1, 1, "bf16"), ("dense qwen2", 2, 1, "bf16"), ("l2a qwen2", 1, 2, "fp32"),
    ("l2a qwen2", 3, 2, "bf16"),
]  # fmt: skip
NEW_LOOK = ("dense qwen2", 2, 1, "bf16")  # becomes an L2A model only when its training starts


def run_name(*case) -> str:
    """Of a case in MOVED or STILL; also its run directory."""
    return "-".join(map(str, case)).replace(" ", "-")


def settings_of(run: Path) -> list[str]:
    """Overrides that give a recipe the model of an imported run, at the length of the shards."""
    model = resolved(model_of(run)) | {"seq_length": 80}
    attention = model.pop("attention")
    flat = {f"model.{key}": value for key, value in model.items()}
    flat |= {f"model.attention.{key}": value for key, value in attention.items()}
    return [f"{key}={'null' if value is None else value}" for key, value in flat.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> dict:
    """Imported models trained on two ranks in one launch, for three steps or with learning rate 0."""
    folder = tmp_path_factory.mktemp("trained")
    imported = {}
    for name, (family, kind, overrides) in IMPORTS.items():
        source = write_model(folder / name, FAMILIES[family])
        imported[name] = import_model(source, folder / f"{name}-imported", kind, overrides)
    still = ["train.lr=0", "train.min_lr=0", "train.steps=1"]
    moved = ["train.steps=4", "train.recall_beta=0"]
    jobs = []
    for case in sorted([*MOVED, *STILL], key=lambda case: case[2]):  # those of one layout side by side
        name, stage, tensor, *precision = case
        layout = [f"parallel.zero_stage={stage}", f"parallel.tensor={tensor}", f"data.shards={shards}"]
        settings = [*settings_of(imported[name]), *layout, f"run_dir={folder / run_name(*case)}", FROZEN]
        settings += [*still, f"train.precision={precision[0]}"] if precision else moved
        if case == NEW_LOOK:
            settings.append("model.attention.kind=l2a")
        jobs.append({"name": run_name(*case), "settings": settings})
    return Found(run_jobs(folder, 2, jobs) | {"folder": folder})


def export(trained: dict, case: tuple, tmp_path: Path) -> Path:
    return export_model(trained["folder"] / run_name(*case), tmp_path / "out")


@pytest.mark.parametrize("case", STILL, ids=lambda case: run_name(*case))
def test_start_weights_come_back_bit_for_bit(trained, tmp_path, case):
    """In a bf16 run too: the optimizer starts from full precision, and only what is frozen is rounded."""
    name, stage, _, precision = case
    got, want = StoredWeights(export(trained, case, tmp_path)), StoredWeights(trained["folder"] / name)
    assert {key for key in got if "global_" not in key and "router" not in key} == set(want)
    for key, value in got.items():
        original = key.replace("global_attn", "self_attn").replace("global_layernorm", "input_layernorm")
        start = torch.zeros_like(value) if "router" in key else want[original]
        if precision == "bf16" and (".mlp." in key or stage == 0):
            start = start.bfloat16().to(value.dtype)
        assert value.numel() > 0 and torch.equal(value, start), key


def test_stage_0_starts_from_full_precision_too(trained):
    """Its checkpoint has the weights as they trained, and beside them the optimizer's copies."""
    folder = trained["folder"]
    state = folder / run_name(*next(case for case in STILL if case[1] == 0)) / "checkpoints/step_1/state"
    groups = torch.load(state / "mp_rank_00_model_states.pt", weights_only=False)["optimizer"]["fp32_groups"]
    masters = [master for group in groups for master in group]
    want = StoredWeights(folder / "l2a qwen2")
    for key in ("model.layers.1.self_attn.o_proj.weight", "model.layers.0.input_layernorm.weight"):
        assert not torch.equal(want[key], want[key].bfloat16().float())
        same = [master for master in masters if master.shape == want[key].shape and torch.equal(master, want[key])]
        assert len(same) == 2, key  # the second attention starts as a copy of the first


@pytest.mark.parametrize("case", MOVED, ids=lambda case: run_name(*case))
def test_trained_weights_give_transformers_the_same_loss(trained, shards, tmp_path, case):
    found = trained[run_name(*case)]
    assert found["losses"][-1] < found["losses"][0]
    measured = evaluate(trained["folder"] / run_name(*case), sequences=4, device="cpu")
    assert measured.loss == pytest.approx(found["heldout"], rel=1e-5)
    with mock.patch("torch.load", wraps=torch.load) as load:
        folder = export(trained, case, tmp_path)
    # a file that is not mapped would be in memory as a whole
    assert load.call_args_list and all(call.kwargs["mmap"] for call in load.call_args_list)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    assert case[0] != "l2a qwen2.5" or model.config.rope_theta == 5e6
    if hasattr(model.config, "closed_layers"):
        assert all(layer.router.weight.any() for layer in model.model.layers if hasattr(layer, "router"))
    for layer in model.model.layers:
        if "cells" in case[0]:
            readout = layer.global_attn.readout
            assert (readout.alpha != 1).all() and (readout.gain != 1).all()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in EvalReader(shards, micro_batch=2, max_sequences=4):
            nll = torch.nn.functional.cross_entropy(
                model(batch.tokens).logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
            )
            weights = batch.weights.flatten()
            sums += torch.stack(((nll * weights).double().sum(), weights.double().sum()))
    assert (sums[0] / sums[1]).item() == pytest.approx(found["heldout"], rel=1e-5)


def test_constants_of_the_cells_must_be_the_recipes(trained, tmp_path):
    case = next(case for case in MOVED if case[0] == "cells qwen2")
    recipe = trained["folder"] / run_name(*case) / "recipe.yaml"
    whole = recipe.read_text()
    recipe.write_text(whole.replace("sigma: 3.0", "sigma: 4.0"))
    with pytest.raises(ValueError, match=r"core_attention.sigma is 3.0, and 4.0 in the recipe; set it back"):
        export(trained, case, tmp_path)
    recipe.write_text(whole)
