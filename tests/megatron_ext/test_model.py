"""The model obeys causality and document borders bit by bit, and its loss is that of its logits."""

import gc
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.rope import rope_tables
from megatron_ext.model import LanguageModel, slice_context
from recipes.kinds import ATTENTION_KINDS, L2A_KINDS
from recipes.schema import ModelConfig
from tests.megatron_ext.parity_program import MODEL, build, config
from tests.numerics import RTOL, assert_close

LENGTHS = (1, 2, 7, 137)  # of the packed documents
BORDERS = (1, 3, 4, 5, 15, 16, 17, 20, 31, 32, 33, 48, 63, 64, 65, 69)  # cells of 4, query blocks of 16, 70 tokens


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(MODEL.token_rows, shape)


def logits_of(
    model: LanguageModel, case: ModelConfig, tokens: torch.Tensor, starts=None, *, penalty: float = 0.0
) -> torch.Tensor:
    """Logits of whole sequences; `starts` is the first position of each token's document."""
    starts = torch.zeros_like(tokens) if starts is None else starts
    context = slice_context(case, starts, start=0, length=tokens.shape[1])
    context.penalty_scale = penalty
    return model(tokens, context)


def watch_gates(model: LanguageModel) -> list[torch.Tensor]:
    """Which gates [T, B] open in the runs of `model` from now on, layer by layer; empty for kinds without gates."""
    seen: list[torch.Tensor] = []
    for layer in model.decoder.layers:
        if hasattr(layer, "router"):
            layer.router.register_forward_hook(lambda _module, _inputs, gates: seen.append(gates.is_open))
    return seen


def gradients(model: LanguageModel, scalar: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(scalar, parameters), strict=True))


# documents


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """All documents in one sequence, and where each token's document starts."""
    lengths = torch.tensor(LENGTHS)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return random_tokens(1, sum(LENGTHS)), starts[None]


def document_case(kind: str, **changes) -> ModelConfig:
    case = config(kind, sum(LENGTHS), 20, True)
    return replace(case, attention=replace(case.attention, **changes))


@pytest.mark.parametrize(
    ("kind", "leak"),
    [("dense", 0.0), ("swa", 0.0), ("l2a", 0.0), ("l2a", 1.0), ("l2a_shared", 0.5), ("context_free", 0.0)],
)
def test_packed_documents_equal_each_alone(alone, kind, leak):
    """With L2A's penalty in the gradient, some gates open and some closed, and with layers that leak."""
    case = document_case(kind, leak_probability=leak)
    model = build(case, alone)
    tokens, starts = packed()
    d_logits = torch.randn(1, tokens.shape[1], MODEL.token_rows, dtype=torch.float64)
    open_gates = watch_gates(model)
    together = logits_of(model, case, tokens, starts, penalty=0.02)
    assert len(open_gates) == (MODEL.num_layers if kind in L2A_KINDS else 0)
    assert all(0.1 < gates.double().mean() < 0.9 for gates in open_gates)
    alone_logits = [logits_of(model, case, document, penalty=0.02) for document in tokens.split(LENGTHS, dim=1)]
    apart = torch.cat(alone_logits, dim=1)
    assert_close("logits", together, apart, rtol=RTOL[torch.float64])
    want = gradients(model, (apart * d_logits).sum())
    for name, got in gradients(model, (together * d_logits).sum()).items():
        assert_close(name, got, want[name], rtol=RTOL[torch.float64])


@pytest.mark.parametrize("kind", ["dense", "swa", "l2a"])
def test_without_the_mask_documents_see_each_other(alone, kind):
    case = document_case(kind, document_mask=False)
    model = build(case, alone)
    tokens, starts = packed()
    together = logits_of(model, case, tokens, starts)
    apart = [logits_of(model, case, document) for document in tokens.split(LENGTHS, dim=1)]
    first, *later = together.split(LENGTHS, dim=1)
    assert_close("first document", first, apart[0], rtol=RTOL[torch.float64])
    for got, want in zip(later, apart[1:], strict=True):
        assert (got - want).norm() > 1e-2 * want.norm()


@pytest.mark.parametrize("kind", ["dense", "swa"])
def test_positions_that_run_on_differ_by_rounding_only(alone, kind):
    """RoPE sees differences of positions: without a restart the tables differ, and the logits by their rounding."""
    case = document_case(kind, restart_positions=False)
    model = build(case, alone)
    tokens, starts = packed()
    together = logits_of(model, case, tokens, starts)
    apart = torch.cat([logits_of(model, case, document) for document in tokens.split(LENGTHS, dim=1)], dim=1)
    assert not torch.equal(together[:, -137:], apart[:, -137:])
    assert_close("logits", together, apart, rtol=1e-5)


@pytest.mark.parametrize("restart", [True, False])
def test_positions_of_documents(restart):
    _, starts = packed()
    context = slice_context(document_case("swa", restart_positions=restart), starts, start=0, length=147)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]) if restart else torch.arange(147)
    for got, want in zip((context.rope_cos, context.rope_sin), rope_tables(positions, 12, 10_000.0), strict=True):
        assert torch.equal(got.reshape(147, 6), want)


# causality


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_suffix_does_not_reach_back(alone, kind, border):
    """Logits before the border and all gradients of the loss there keep their bits when the tokens after it change.

    L2A's but for rounding (2e-16 seen): the tokens decide how many queries look back, hence the shapes of its matmuls.
    """

    def assert_same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if kind in L2A_KINDS:
            assert_close(name, got, want, rtol=1e-14)
        else:
            assert torch.equal(got, want), name

    case = config(kind, 70, 9, False)
    model = build(case, alone)
    tokens = random_tokens(2, 70)
    changed = tokens.clone()
    changed[:, border:] = (tokens[:, border:] + torch.randint(1, 64, (2, 70 - border))) % 64
    labels, weights = random_tokens(2, 70), torch.rand(2, 70).double()
    weights[:, border:] = 0
    found = []
    for text in (tokens, changed):
        context = slice_context(case, torch.zeros_like(text), start=0, length=70)
        loss = model(text, context, labels, weights, loss_chunk=33)
        found.append((logits_of(model, case, text).detach(), {"loss": loss.detach()} | gradients(model, loss)))
    (logits, grads), (changed_logits, changed_grads) = found
    assert_same("logits", logits[:, :border], changed_logits[:, :border])
    assert not torch.allclose(logits[:, border], changed_logits[:, border])
    for name in grads:
        assert_same(name, grads[name], changed_grads[name])


@pytest.mark.parametrize(
    ("kind", "reaches"), [("swa", False), ("freesolo", True), ("freesolo_l", True), ("dense", True)]
)
def test_who_looks_beyond_the_window(alone, kind, reaches):
    """Two layers with a window of 3 look 6 tokens back; cells and dense attention further."""
    case = config(kind, 70, 3, False)
    model = build(case, alone)
    tokens = random_tokens(1, 70)
    changed = tokens.clone()
    changed[:, :40] = (tokens[:, :40] + 1) % 64
    before, after = logits_of(model, case, tokens), logits_of(model, case, changed)
    assert torch.equal(before[:, 46:], after[:, 46:]) is not reaches
    assert not torch.equal(before[:, 45], after[:, 45])


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_rows_of_a_batch_are_independent(alone, kind):
    case = config(kind, 70, 9, False)
    model = build(case, alone)
    tokens = random_tokens(2, 70)
    both = logits_of(model, case, tokens)
    for row in (0, 1):
        assert_close(f"row {row}", both[row : row + 1], logits_of(model, case, tokens[row : row + 1]), rtol=1e-9)


@pytest.mark.parametrize("length", [1, 3, 15, 17])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_short_sequences(alone, kind, length):
    """Shorter than a cell or a query block: FreeSolo has nothing to read, so it is its window branch."""
    case = config(kind, 70, 20, False)
    case = replace(case, attention=replace(case.attention, gate_threshold=0.0))  # every gate open
    model = build(case, alone)
    out = logits_of(model, case, random_tokens(2, length))
    assert out.shape == (2, length, MODEL.token_rows)
    gradient = gradients(model, out.square().sum())
    assert all(value.isfinite().all() for value in gradient.values())
    for name in gradient:
        if name.endswith("alpha"):
            assert (gradient[name] == 0).all() == (length <= 16)


# loss


class _Storages(TorchDispatchMode):
    """Follows the memory of every operator's result."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return results

    def living_bytes(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


@pytest.mark.parametrize("kind", ["dense", "freesolo_l", "l2a"])
def test_backward_frees_what_it_computed_again(alone, kind):
    """Memory falls from layer to layer; nothing waits for the garbage collector (megatron-core 0.19's layers did)."""
    case = replace(config(kind, 64, 20, False), num_layers=5)
    model = build(case, alone, recompute=True)
    tokens, storages, living = random_tokens(1, 64), _Storages(), []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: living.append(storages.living_bytes()))
        layer.mlp.register_forward_pre_hook(lambda *_: living.append(storages.living_bytes()))
    gc.collect()
    gc.disable()
    try:
        with storages:
            context = slice_context(case, torch.zeros_like(tokens), start=0, length=64)
            loss = model(tokens, context, tokens, torch.ones(1, 64, dtype=torch.float64))
            loss.backward()
    finally:
        gc.enable()
    again = living[-5:]  # when each layer's MLP is computed again, from the last layer to the first
    grads = sum(p.grad.nbytes for p in model.decoder.layers[0].parameters() if p.grad is not None)
    assert again[-1] < again[0] + 4 * grads


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_loss_is_that_of_the_logits(alone, kind, tied):
    case = replace(config(kind, 70, 9, False), tie_embeddings=tied)
    model = build(case, alone)
    tokens, labels = random_tokens(2, 70), random_tokens(2, 70)
    weights = torch.rand(2, 70).double() * (torch.rand(2, 70) < 0.7)
    nll = -logits_of(model, case, tokens).log_softmax(dim=-1).gather(2, labels[..., None]).squeeze(2)
    want = (nll * weights).sum()
    context = slice_context(case, torch.zeros_like(tokens), start=0, length=70)
    got = model(tokens, context, labels, weights, loss_chunk=33)
    assert_close("loss", got, want, rtol=RTOL[torch.float64])
    want_gradients = gradients(model, want)
    for name, gradient in gradients(model, got).items():
        assert_close(name, gradient, want_gradients[name], rtol=RTOL[torch.float64])
