"""What all layers of one micro-batch share beside its hidden states: where its slice lies, and what they measure."""

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from kernels.rope import rope_tables

Measured = dict[str, dict[int, torch.Tensor]]  # figure -> layer -> [sum, count]
RotationTables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, as SequenceContext holds them


@dataclass(kw_only=True)
class SequenceContext(PackedSeqParams):
    """What all layers of one micro-batch share; megatron-core hands it through to the core attention untouched."""

    qkv_format: str = "bshd"
    start: int = 0  # global position of this slice's first token
    length: int = 0  # tokens of the whole sequence, without the padding that makes slices equal
    rope_cos: torch.Tensor  # [T, D/2] or [B, T, D/2] fp32
    rope_sin: torch.Tensor
    first_key: torch.Tensor | None = None  # [B, T] smallest visible global position; None: the sequence's start
    measure: bool = False  # True: layers put their figures into `measured`
    measured: Measured = field(default_factory=dict)
    seed: int = 0  # seed and step: what the draws of a training step depend on beside the layer
    step: int = 0
    penalty_scale: float = 0.0  # gradient of the loss for one layer's sum of p^2; set by the engine
    penalties: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> sum of p^2 over the slice's tokens

    counts: dict[int, torch.Tensor] = field(default_factory=dict)  # numbers that layers share, on the device

    def record(self, figure: str, layer: int, total: torch.Tensor, count: int) -> None:
        """Keep one layer's figure, fp64 `total` over `count` things; a recomputed layer records the same again.

        Takes one small launch, as layers of one micro-batch count the same things.
        """
        if count not in self.counts:
            self.counts[count] = torch.full((), count, dtype=torch.float64, device=total.device)
        self.measured.setdefault(figure, {})[layer] = torch.stack((total, self.counts[count]))


def sequence_context(
    doc_starts: torch.Tensor,
    *,
    start: int,
    length: int,
    head_dim: int,
    rope_base: float,
    document_mask: bool,
    restart_positions: bool,
    tables: RotationTables | None = None,
    measure: bool = False,
    seed: int = 0,
    step: int = 0,
) -> SequenceContext:
    """Positions, rotation tables and document borders of a slice.

    Args:
        doc_starts: [B, T] global position of the first token of each position's document; only with `document_mask` or
            without `tables` must it lie on the model's device.
        start: global position of the slice's first token.
        length: tokens of the whole sequence before padding.
        tables: the slice's rotation tables, if somebody has them (`rope_tables`).
        measure: whether layers put their figures into the context.
        seed, step: of the run, for what a layer draws.
    """
    if tables is None:
        positions = start + torch.arange(doc_starts.shape[1], device=doc_starts.device)
        if document_mask and restart_positions:
            positions = positions - doc_starts
        tables = rope_tables(positions, head_dim, rope_base)
    cos, sin = tables
    first_key = doc_starts if document_mask else None
    return SequenceContext(
        start=start, length=length, rope_cos=cos, rope_sin=sin, first_key=first_key, measure=measure, seed=seed,
        step=step,
    )  # fmt: skip
