"""FreeSolo's candidate cells under context parallelism: what earlier ranks offer, then the rank's own.

FS-L uses TopP(C u D) = TopP(TopP(C) u D): a cell that its own rank's pool has discarded can never be chosen later, so
each rank offers its `retain` best and `recent` last cells and no more. FS offers every cell.
"""

from typing import NamedTuple

import torch

from kernels.cells import cell_priority, number_cells, offered_cells, split_cells
from megatron_ext.parallel.collectives import Group, all_gather, all_gather_constant, group_rank, group_size


class CellTable(NamedTuple):
    """Cells that a rank's queries may choose from, in the order of their global index."""

    k: torch.Tensor  # [B, G, N, s, D]
    v: torch.Tensor  # [B, G, N, s, D]
    index: torch.Tensor | None  # [B, G, N] int64, -1 for padding; None: every cell from 0 on


def _take_cells(cells: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """cells [B, G, N, s, D] at places [B, G, n] (padding -1 takes cell 0, which its index masks)."""
    at = places.clamp(min=0)[..., None, None].expand(*places.shape, *cells.shape[3:])
    return cells.gather(2, at)


def candidate_cells(
    k: torch.Tensor, v: torch.Tensor, *, start: int, cell_size: int, retain: int | None, recent: int, group: Group
) -> CellTable:
    """The table of cells that this rank's queries rank and read.

    Args:
        k, v: this rank's unrotated slice [B, T, G, D]; T and `start` are multiples of `cell_size` when ranks > 1.
        start: global position of the slice's first token.
        retain, recent: the pool of FS-L; retain None is FS.
        group: the context-parallel group, or None.
    """
    k_cells, v_cells = split_cells(k, cell_size), split_cells(v, cell_size)
    index = number_cells(k_cells, first=start // cell_size)
    ranks, rank = group_size(group), group_rank(group)
    if ranks == 1:
        return CellTable(k_cells, v_cells, index)
    offered_k, offered_v = k_cells, v_cells
    if retain is not None:
        places = offered_cells(cell_priority(k_cells), index, retain=retain, recent=recent)
        offered_k, offered_v = _take_cells(k_cells, places), _take_cells(v_cells, places)
        offered_index = index.gather(2, places.clamp(min=0)).masked_fill(places < 0, -1)
        indices = all_gather_constant(offered_index, group, "cells")
        index = torch.cat((*indices[:rank], index), dim=2)
    cells = all_gather(torch.stack((offered_k, offered_v)), group, "cells")
    # the empty slice keeps rank 0 in the backward
    earlier = torch.cat((cells[0, :, :, :, :0], *cells[:rank]), dim=3)
    k_cells, v_cells = torch.cat((earlier[0], k_cells), dim=2), torch.cat((earlier[1], v_cells), dim=2)
    return CellTable(k_cells, v_cells, None if retain is None else index)
