"""What a run says of itself: the FLOP behind mfu, and the picture of its gates."""

from dataclasses import replace
from io import BytesIO

import matplotlib.image
import pytest
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.metrics import MetricsWriter, flops_per_token, gate_picture, multiplied_weights
from megatron_ext.model import weight_shapes
from recipes.kinds import ATTENTION_KINDS
from recipes.schema import AttentionConfig, ModelConfig

MODEL = ModelConfig(
    num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=12, ffn_size=48, vocab_size=64, seq_length=200,
    qkv_bias=True, attention=AttentionConfig(window=19),
)  # fmt: skip
QKV, PROJ, MLP, EMBEDDING = 32 * 8 * 12, 32 * 4 * 12, 3 * 32 * 48, 64 * 32


def model(kind: str, closed: list[int] | None = None, **changes) -> ModelConfig:
    """A model of three layers."""
    return replace(MODEL, attention=replace(MODEL.attention, kind=kind, closed_layers=closed or []), **changes)


# floating-point operations


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_all_matrices_of_the_model_are_counted(alone, kind, tied):
    case = model(kind, [1] if kind == "l2a" else None, tie_embeddings=tied)
    matrices = {name: shape.numel() for name, shape in weight_shapes(case).items() if len(shape) == 2}
    matrices = {name: size for name, size in matrices.items() if not name.endswith("router.weight")}
    if not tied:
        del matrices["embedding.word_embeddings.weight"]  # looked up, not multiplied
    if kind == "l2a_shared":
        matrices = {name: size * (2 if "self_attention" in name else 1) for name, size in matrices.items()}
    assert multiplied_weights(case) == matrices


def test_flops_by_hand():
    """6 a weight, 12 an attended token and width: all weights train here."""
    weights = 3 * (2 * (QKV + PROJ) + MLP) + EMBEDDING
    assert flops_per_token(model("l2a"), 0.25) == 6 * weights + 12 * 3 * 48 * (20 + 0.25 * 100)
    assert flops_per_token(model("dense")) == 6 * (weights - 3 * (QKV + PROJ)) + 12 * 3 * 48 * 100


def test_frozen_weights_have_no_gradient_of_their_own():
    """As the paper trains: MLP and embeddings stand still, and save a third of what they cost."""
    mlp = {f"decoder.layers.{layer}.mlp.linear_fc{part}.weight" for layer in range(3) for part in (1, 2)}
    frozen = mlp | {"embedding.word_embeddings.weight", "decoder.layers.0.input_layernorm.weight"}
    saved = flops_per_token(model("l2a")) - flops_per_token(model("l2a"), frozen=frozen)
    assert saved == 2 * (3 * MLP + EMBEDDING)
    untied = model("l2a", tie_embeddings=False)
    assert flops_per_token(untied) - flops_per_token(untied, frozen=frozen) == 2 * 3 * MLP


# TensorBoard

# logged unevenly
GATES = [
    {"step": 4, "open_fraction": [1.0, 0.75], "router_norm": [0.0, 0.5]},
    {"step": 8, "open_fraction": [0.5, 0.25], "router_norm": [1.0, 2.0]},
    {"step": 20, "open_fraction": [0.0, 0.9], "router_norm": [1.5, 0.25]},
]


@pytest.fixture
def board(tmp_path) -> EventAccumulator:
    """What TensorBoard reads of a run of 20 steps that went on in a second process after step 8."""
    for first, last in ((0, 8), (8, 20)):
        paths = tmp_path / "metrics.jsonl", tmp_path / "board"
        writer = MetricsWriter(*paths, first_step=first, steps=20, log_interval=4)
        for step in range(first + 1, last + 1):
            gates = next((one for one in GATES if one["step"] == step), {})
            writer.write({"step": step, "loss": 0.5 * step, "lr": 1e-3} | gates)
        writer.close()
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    return found


def test_gates_are_scalars_by_layer(board):
    for figure in ("open_fraction", "router_norm"):
        for layer in (0, 1):
            points = board.Scalars(f"{figure}/layer_{layer:02d}")
            want = [(one["step"], pytest.approx(one[figure][layer])) for one in GATES]
            assert [(point.step, point.value) for point in points] == want
    assert [point.step for point in board.Scalars("loss")] == [4, 8, 12, 16, 20]


def test_gates_are_drawn_layer_by_step(board):
    """Each logged step is a column and each layer a row, and a pixel there has the colour of its value."""
    image = board.Images("gates")[-1]
    assert image.step == 20
    pixels = matplotlib.image.imread(BytesIO(image.encoded_image_string), format="png")[..., :3]
    figure = gate_picture(GATES)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert canvas.get_width_height() == (pixels.shape[1], pixels.shape[0])
    for axes, name, brightest in zip(figure.axes, ("open_fraction", "router_norm"), (1.0, 2.0), strict=False):
        assert axes.collections[0].get_array().shape == (2, 3)
        for one in GATES:
            for layer, value in enumerate(one[name]):
                x, y = axes.transData.transform((one["step"], layer))
                found = pixels[pixels.shape[0] - 1 - int(y), int(x)]
                assert found == pytest.approx(colormaps["viridis"](value / brightest)[:3], abs=0.02), (one, layer)


def test_gates_without_a_router_are_drawn_too():
    figure = gate_picture([{"step": 1, "open_fraction": [0.2, 0.3, 0.4]}])
    assert figure.axes[0].collections[0].get_array().shape == (3, 1) and len(figure.axes) == 2  # and its colour bar
