"""The core attentions in megatron-core's `core_attention` slot: windowed or dense, FreeSolo, and L2A's look back.

They receive unrotated q, k, v as [T, B, heads, D] (this rank's slice and heads) and a `SequenceContext`, rotate
with its tables, let `parallel` bring what earlier slices hold, and call the kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.cells import combine, read_cells
from kernels.freesolo import measured_freesolo_attention
from kernels.rope import apply_rope
from kernels.window import sliding_window_attention
from megatron_ext.parallel.cells import candidate_cells
from megatron_ext.parallel.collectives import group_size
from megatron_ext.parallel.halo import with_halo
from megatron_ext.parallel.queries import balanced_attention
from megatron_ext.parallel.tensor import replicated_parameter, tensor_parallel_group
from megatron_ext.sequence_context import SequenceContext

# on an H200 with torch 2.11
SDPA_FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                      SDPBackend.MATH]  # fmt: skip


class ActiveQueries(NamedTuple):
    """Which queries look back over the whole sequence; travels in megatron-core's `attention_mask` argument."""

    mask: torch.Tensor | None  # bool [B, T]; None: all of them


class HeadNorm(nn.RMSNorm):
    """RMSNorm of q or k per head (Qwen3). Each tensor-parallel rank norms its own heads, so gradients are summed.

    The stock norm leaves that to megatron-core's own optimizer, which is not ours.
    """

    def __init__(self, hidden_size: int, config, eps: float):
        super().__init__(hidden_size, eps=eps)
        self.tensor_group = tensor_parallel_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, replicated_parameter(self.weight, self.tensor_group), self.eps)


class _CoreAttention(nn.Module):
    """What both attentions share: the arguments megatron-core builds a core attention with, and its tensor layout."""

    def __init__(self, config, layer_number: int, *, backend: str, pg_collection, **_from_megatron):
        super().__init__()
        self.layer_number, self.backend = layer_number, backend
        self.context_group, self.tensor_group = pg_collection.cp, pg_collection.tp
        self.heads = config.num_attention_heads // group_size(self.tensor_group)
        self.head_dim = config.kv_channels

    def forward(
        self,
        query,
        key,
        value,
        active: ActiveQueries | None,
        *,
        packed_seq_params: SequenceContext,
        **_from_megatron,
    ):
        """[T, B, heads, D] three times -> [T, B, heads * D]."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if active is None:
            out = self.attend(q, k, v, packed_seq_params)
        else:
            out = self.look_back(q, k, v, active.mask, packed_seq_params)
        return out.transpose(0, 1).reshape(*query.shape[:2], -1)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: SequenceContext) -> torch.Tensor:
        """[B, T, heads, D] three times -> [B, T, heads, D]."""
        raise NotImplementedError  # each kind defines it

    def look_back(self, q, k, v, active: torch.Tensor | None, context: SequenceContext) -> torch.Tensor:
        """`attend` for the queries of `active` [B, T], zeros for the others: what L2A's second attention computes."""
        raise NotImplementedError  # the attentions that L2A uses define it

    def local_branch(self, q, k, v, context: SequenceContext, window: int | None) -> torch.Tensor:
        """Rotated attention over the last `window` tokens, across slices."""
        q, k = (apply_rope(x, context.rope_cos, context.rope_sin, backend=self.backend) for x in (q, k))
        k, v, halo = with_halo(k, v, window=window, group=self.context_group)
        first_key = None if context.first_key is None else context.first_key - (context.start - halo)
        return sliding_window_attention(
            q, k, v, window=window, query_offset=halo, first_key=first_key, backend=self.backend
        )

    def whole_sequence(self, q, k, v, active: torch.Tensor | None, context: SequenceContext) -> torch.Tensor:
        """Rotated causal attention of the active queries over everything before them, across slices."""
        q, k = (apply_rope(x, context.rope_cos, context.rope_sin, backend=self.backend) for x in (q, k))
        return balanced_attention(
            q, k, v, active,
            start=context.start, first_key=context.first_key, group=self.context_group, backend=self.backend,
        )  # fmt: skip


class WindowAttention(_CoreAttention):
    """Causal softmax attention over a sliding window, or over everything (`window` None)."""

    def __init__(self, config, layer_number: int, *, window: int | None, **rest):
        super().__init__(config, layer_number, **rest)
        self.window = window

    def attend(self, q, k, v, context):
        whole = group_size(self.context_group) == 1 and context.first_key is None
        exact = torch.are_deterministic_algorithms_enabled()  # our kernel's gradients have the same bits in every run
        if self.window is None and whole and self.backend == "auto" and q.is_cuda and not exact:
            q, k = (apply_rope(x, context.rope_cos, context.rope_sin) for x in (q, k))
            return _torch_attention(q, k, v)
        if self.window is None and group_size(self.context_group) > 1:
            return self.whole_sequence(q, k, v, None, context)
        return self.local_branch(q, k, v, context, self.window)


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense causal attention [B, T, heads, D] by the fastest kernel that torch has for these inputs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPA_FASTEST_FIRST, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


class SparseQueryAttention(_CoreAttention):
    """Causal softmax attention over the whole sequence for the queries whose gate is open (L2A, arXiv 2603.17484)."""

    def look_back(self, q, k, v, active, context):
        return self.whole_sequence(q, k, v, active, context)


class SharedAttention(WindowAttention):
    """Window and look back over the same q, k and v projections (L2A-shared)."""

    def look_back(self, q, k, v, active, context):
        return self.whole_sequence(q, k, v, active, context)


class FreeSoloAttention(_CoreAttention):
    """Window branch plus alpha times the normalised readout of a few remembered cells (FreeSolo, arXiv 2610.17191).

    `alpha` [heads] and `gain` [D] train; `sigma` and `lam` [heads] are constants that travel with the weights.
    `retain` None ranks every cell (FS), a number keeps a bounded pool (FS-L).
    """

    def __init__(
        self,
        config,
        layer_number: int,
        *,
        window: int,
        cell_size: int,
        query_block: int,
        top_k: int,
        sigma: float,
        lam: float,
        retain: int | None,
        recent: int,
        eps: float,
        alpha_init: float,
        **rest,
    ):
        super().__init__(config, layer_number, **rest)
        self.window, self.cell_size, self.query_block, self.top_k = window, cell_size, query_block, top_k
        self.retain, self.recent, self.eps = retain, recent, eps
        self.alpha = nn.Parameter(torch.full((self.heads,), float(alpha_init), dtype=config.params_dtype))
        # DeepSpeed and megatron-core take a parameter without these marks for one that every tensor rank holds alike
        set_tensor_model_parallel_attributes(self.alpha, is_parallel=True, dim=0, stride=1)
        self.gain = nn.Parameter(torch.ones(self.head_dim, dtype=config.params_dtype))
        self.register_buffer("sigma", torch.full((self.heads,), float(sigma)))
        self.register_buffer("lam", torch.full((self.heads,), float(lam)))

    def _apply(self, fn, recurse=True):
        """Move to another device or dtype, but keep the constants in fp32: bf16 would round lambda."""
        sigma, lam = self.sigma, self.lam
        super()._apply(fn, recurse)
        self.sigma, self.lam = sigma.to(self.sigma.device), lam.to(self.lam.device)
        return self

    def attend(self, q, k, v, context):
        pool = {"retain": self.retain, "recent": self.recent}
        ranking = {"top_k": self.top_k, "sigma": self.sigma, "lam": self.lam, "query_block": self.query_block, **pool}
        gain = replicated_parameter(self.gain, self.tensor_group)
        whole = group_size(self.context_group) == 1  # one slice: the operator does all of it at once
        if whole:
            out, retained = measured_freesolo_attention(
                q, k, v, self.alpha, gain, context.rope_cos, context.rope_sin, window=self.window,
                cell_size=self.cell_size, eps=self.eps, backend=self.backend, **ranking,
            )  # fmt: skip
            self._measure(retained, context, num_queries=q.shape[1])
            return out
        table = candidate_cells(k, v, start=context.start, cell_size=self.cell_size, group=self.context_group, **pool)
        local = self.local_branch(q, k, v, context, self.window)
        u, retained = read_cells(
            q, table.k, table.v, table.index, query_start=context.start, backend=self.backend, **ranking
        )
        self._measure(retained, context, num_queries=q.shape[1])
        return combine(local, u, self.alpha, gain, eps=self.eps)

    def look_back(self, q, k, v, active, context):
        """The readout alone, in place of attention to everything."""
        pool = {"retain": self.retain, "recent": self.recent}
        table = candidate_cells(k, v, start=context.start, cell_size=self.cell_size, group=self.context_group, **pool)
        u, retained = read_cells(
            q, table.k, table.v, table.index, query_start=context.start, query_block=self.query_block,
            top_k=self.top_k, sigma=self.sigma, lam=self.lam, backend=self.backend, **pool,
        )  # fmt: skip
        self._measure(retained, context, num_queries=q.shape[1])
        gain = replicated_parameter(self.gain, self.tensor_group)
        out = combine(torch.zeros_like(u), u, self.alpha, gain, eps=self.eps)
        return out if active is None else out.masked_fill(~active[..., None, None], 0)

    def _measure(self, retained: torch.Tensor | None, context: SequenceContext, *, num_queries: int) -> None:
        """Record which share of the available cells the pool keeps, over the blocks of real tokens that have any."""
        if not context.measure or retained is None:
            return
        real = max(0, min(num_queries, context.length - context.start))
        blocks = slice(0 if context.start else 1, -(-real // self.query_block))  # nothing lies before the first of all
        some = retained[..., blocks]
        context.record("retained_fraction", self.layer_number, some.sum(dtype=torch.float64), some.numel())
