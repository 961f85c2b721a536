"""The halo of a window: keys and values of the tokens before a slice, from as many earlier ranks as it takes."""

import torch

from megatron_ext.parallel.collectives import Group, all_gather, group_rank, group_size


def with_halo(
    k: torch.Tensor, v: torch.Tensor, *, window: int | None, group: Group
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Put the `window` tokens before this rank's slice in front of it.

    Args:
        k, v: this rank's slice [B, T, G, D]; every rank holds the same T.
        window: tokens a query looks back; None for all of them.
        group: the context-parallel group, or None.

    Returns:
        k and v [B, halo + T, G, D] and halo, the number of tokens put in front (0 on the first rank). The gradients
        of the halo return to the ranks that own it.
    """
    ranks, rank, length = group_size(group), group_rank(group), k.shape[1]
    if ranks == 1 or window == 0:
        return k, v, 0
    reach = (ranks - 1) * length if window is None else min(window, (ranks - 1) * length)
    tail = min(reach, length)  # what each rank offers
    tails = all_gather(torch.stack((k, v))[:, :, length - tail :], group, "window")
    earlier = torch.cat((tails[0, :, :, :0], *tails[:rank]), dim=2)  # the empty slice keeps rank 0 in the backward
    halo = min(reach, rank * length)
    earlier = earlier[:, :, earlier.shape[2] - halo :]
    return torch.cat((earlier[0], k), dim=1), torch.cat((earlier[1], v), dim=1), halo
