"""The learning rate follows warm-up and cosine to its last step, and freezing says what it cannot do."""

import math
from dataclasses import replace

import pytest
from torch import nn

from megatron_ext.engine import OptimizerSettings, PenaltySettings, freeze_parameters, lr_at, penalty_at

SETTINGS = OptimizerSettings(
    steps=101, lr=4e-4, min_lr=4e-5, warmup_steps=20, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=1.0,
    train_only=[], freeze=[],
)  # fmt: skip


def rates(**changes) -> list[float]:
    """The rate of every step."""
    settings = replace(SETTINGS, **changes)
    return [lr_at(step, settings) for step in range(settings.steps)]


def test_warmup_is_linear_and_every_step_moves_the_weights():
    found = rates()
    assert found[:20] == pytest.approx([4e-4 * k / 20 for k in range(1, 21)])
    assert found[0] == pytest.approx(2e-5)


def test_peak_is_lr():
    found = rates()
    assert max(found) == found[19] == found[20] == 4e-4


def test_last_step_is_min_lr():
    assert rates()[-1] == pytest.approx(4e-5, rel=1e-12)


def test_cosine_between():
    """Step 60 is half way from step 20 to step 100, step 40 a quarter."""
    found = rates()
    assert found[60] == pytest.approx((4e-4 + 4e-5) / 2)
    assert found[40] == pytest.approx(4e-5 + 3.6e-4 * (1 + math.sqrt(0.5)) / 2)
    assert all(a > b for a, b in zip(found[20:], found[21:], strict=False))


def test_steps_after_the_last_keep_min_lr():
    """The scheduler asks once more after the last step."""
    assert lr_at(101, SETTINGS) == lr_at(500, SETTINGS) == pytest.approx(4e-5)


def test_without_warmup():
    found = rates(warmup_steps=0)
    assert found[0] == 4e-4 and found[-1] == pytest.approx(4e-5)


def test_one_step():
    assert rates(steps=1, warmup_steps=0) == [4e-4]


def test_constant_rate():
    assert rates(min_lr=4e-4, warmup_steps=0) == pytest.approx([4e-4] * 101)


def model() -> nn.ModuleDict:
    """Four parameters: embed.weight, body.weight, body.bias, head.weight."""
    return nn.ModuleDict({"embed": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3, bias=False)})


def trained(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_freezes_what_matches():
    module = model()
    assert freeze_parameters(module, ["^embed", r"\.bias$"]) == ["embed.weight", "body.bias"]
    assert trained(module) == ["body.weight", "head.weight"]


def test_nothing_to_freeze():
    module = model()
    assert freeze_parameters(module, []) == []
    assert len(trained(module)) == 4


def test_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match=r"train\.freeze pattern '\^bod\$' matches no parameter.*'embed\.weight'"):
        freeze_parameters(model(), ["^embed", "^bod$"])


def test_everything_frozen():
    with pytest.raises(ValueError, match="nothing is left to train"):
        freeze_parameters(model(), ["weight", "bias"])


@pytest.mark.parametrize("patterns", [["^bod$"], ["weight", "bias"]])
def test_refusal_leaves_the_model_as_it_was(patterns):
    module = model()
    with pytest.raises(ValueError):
        freeze_parameters(module, patterns)
    assert len(trained(module)) == 4


def test_only_what_matches_trains():
    module = model()
    assert freeze_parameters(module, [], [r"^body", r"^head"]) == ["embed.weight"]
    assert freeze_parameters(module, [r"\.bias$"], [r"^body"]) == ["embed.weight", "body.bias", "head.weight"]
    assert trained(module) == ["body.weight"]


@pytest.mark.parametrize(("freeze", "train_only"), [([], ["^bod$"]), (["body"], ["body"])])
def test_train_only_that_trains_nothing(freeze, train_only):
    with pytest.raises(ValueError, match="matches no parameter|nothing is left to train"):
        freeze_parameters(model(), freeze, train_only)


def test_penalty_is_zero_in_the_warm_up_and_whole_at_the_last_step():
    found = [penalty_at(step, PenaltySettings(weight=8.0, start=4, ramp=16, per_token=False)) for step in range(20)]
    assert found[:4] == [0.0] * 4
    assert found[4:] == pytest.approx([0.5 * k for k in range(1, 17)])


def test_penalty_stays_whole_after_its_ramp():
    settings = PenaltySettings(weight=2.0, start=0, ramp=4, per_token=False)
    assert [penalty_at(step, settings) for step in (0, 3, 4, 100)] == [0.5, 2.0, 2.0, 2.0]
    assert penalty_at(0, PenaltySettings(weight=2.0, start=0, ramp=0, per_token=False)) == 2.0
