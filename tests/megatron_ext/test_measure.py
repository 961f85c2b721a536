"""What a layer's figures cost: a few small operations, whatever the length, and no look of the host at the device."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.model import slice_context
from tests.megatron_ext.parity_program import MODEL, build, config

VIEWS = {"aten::detach", "aten::slice.Tensor", "aten::view", "aten::alias"}


class Launches(TorchDispatchMode):
    """Counts the operations that would launch something on a GPU."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() not in VIEWS:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["freesolo_l", "l2a", "l2a_freesolo"])
@pytest.mark.parametrize("length", [70, 250])
def test_measuring_takes_a_few_small_launches_a_layer(alone, kind, length):
    case = config(kind, length, 20, False)
    model = build(case, alone)
    tokens = torch.randint(MODEL.token_rows, (1, length))
    names = {}
    for measure in (False, True):
        context = slice_context(case, torch.zeros_like(tokens), start=0, length=length, measure=measure)
        with torch.no_grad(), Launches() as seen:
            model(tokens, context)
        names[measure] = seen.names
    figures = {"freesolo_l": 1, "l2a": 2, "l2a_freesolo": 3}[kind]  # retained; open and norm; all three
    assert len(context.measured) == figures
    more = Counter(names[True]) - Counter(names[False])
    shared = figures  # numbers that all layers of a micro-batch count
    assert more.total() <= shared + 2 * figures * MODEL.num_layers, more
    assert not more["aten::_local_scalar_dense"]
