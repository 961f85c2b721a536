"""Weights cut for tensor-parallel ranks and put together again."""

import pytest
import torch

from megatron_ext.weight_slices import MergedWeights, cut, merge

LAYER = "decoder.layers.3."
NAMES = {  # name -> shape of one of two ranks
    "embedding.word_embeddings.weight": (12, 8),
    f"{LAYER}self_attention.linear_qkv.weight": (12, 8),
    f"{LAYER}global_attention.linear_qkv.bias": (12,),
    f"{LAYER}self_attention.linear_proj.weight": (24, 4),
    f"{LAYER}mlp.linear_fc1.weight": (12, 8),
    f"{LAYER}mlp.linear_fc2.weight": (24, 4),
    f"{LAYER}self_attention.core_attention.alpha": (12,),
    f"{LAYER}self_attention.q_layernorm.weight": (24,),
    f"{LAYER}router.weight": (24, 8),
}


@pytest.mark.parametrize("name", NAMES)
def test_cut_and_merge(name):
    whole = torch.randn(24, 8) if len(NAMES[name]) == 2 else torch.randn(24)
    parts = [cut(name, whole, rank, 2) for rank in (0, 1)]
    assert [part.shape for part in parts] == [NAMES[name]] * 2
    assert torch.equal(MergedWeights([{name: part} for part in parts])[name], whole)
    assert torch.equal(cut(name, whole, 0, 1), whole) and torch.equal(merge(name, [whole]), whole)


def test_a_rank_has_its_part_of_gate_and_of_up():
    whole = torch.arange(8)[:, None]
    assert cut(f"{LAYER}mlp.linear_fc1.weight", whole, 1, 2)[:, 0].tolist() == [2, 3, 6, 7]


def test_what_does_not_divide_stays_whole():
    assert cut("output_layer.weight", torch.zeros(9, 2), 0, 2).shape == (9, 2)
    assert cut(f"{LAYER}mlp.linear_fc1.weight", torch.zeros(6, 2), 0, 2).shape == (6, 2)
