"""How tensor-parallel ranks cut each weight: put together for whoever needs it whole, and cut again for a rank."""

import re
from collections.abc import Iterator, Mapping

import torch

# pattern of a name -> the dimension that is cut, and how many matrices lie one above the other in it
CUT = {
    r"(word_embeddings|output_layer)\.weight$": (0, 1),
    r"\.linear_qkv\.(weight|bias)$": (0, 1),  # kv group by kv group, so that a rank's rows are its groups
    r"\.linear_fc1\.weight$": (0, 2),  # gate, then up: a rank has its part of each
    r"\.core_attention\.(alpha|sigma|lam)$": (0, 1),
    r"\.(linear_proj|linear_fc2)\.weight$": (1, 1),
}


def _how(name: str) -> tuple[int, int] | None:
    """Dimension and stride of a weight that is cut; None for one that every rank holds whole."""
    return next((how for pattern, how in CUT.items() if re.search(pattern, name)), None)


def merge(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole weight from the parts of all ranks, in rank order."""
    how = _how(name)
    if how is None or len(parts) == 1:
        return parts[0]
    dim, stride = how
    strided = [part.chunk(stride, dim) for part in parts]
    return torch.cat([part for chunk in zip(*strided, strict=True) for part in chunk], dim)


def cut(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of `rank`; a weight that does not divide comes back whole, for its shape to be refused."""
    how = _how(name)
    if how is None or ranks == 1 or whole.shape[how[0]] % (ranks * how[1]):
        return whole
    dim, stride = how
    return torch.cat([matrix.chunk(ranks, dim)[rank] for matrix in whole.chunk(stride, dim)], dim)


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of all tensor-parallel ranks as those of one, each put together when it is asked for."""

    def __init__(self, ranks: list[Mapping[str, torch.Tensor]]):
        self._ranks = ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        return merge(name, [rank[name] for rank in self._ranks])

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranks[0])

    def __len__(self) -> int:
        return len(self._ranks[0])
