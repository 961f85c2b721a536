"""The attention kinds, one row each: what a layer reads, behind which gate, and what can be done with such a model.

All that the rest of the code asks about a kind is answered here. A new kind is its module (`megatron_ext/specs.py` maps
each reading to one), its row, and its test. Imports the schema only, so that a recipe is checked without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recipes.schema import ModelConfig

# keys of the attention section that every kind uses: what positions mean, and how slices are padded
COMMON_KEYS = ("kind", "backend", "rope_base", "query_block", "document_mask", "restart_positions")


@dataclass(frozen=True)
class Reading:
    """What a query reads of the tokens before it."""

    name: str
    keys: tuple[str, ...]  # of the attention section; they may be changed after training
    fixed_keys: tuple[str, ...]  # likewise; a trained model's weights fix them
    attended: Callable[[ModelConfig], float]  # tokens, the mean over the queries of a sequence


def _window_tokens(model: ModelConfig) -> float:
    return min(model.attention.window + 1, model.seq_length / 2)


def _cell_tokens(model: ModelConfig) -> float:
    return model.attention.top_k * model.attention.cell_size


_CELL_KEYS = ("cell_size", "query_block", "top_k", "eps")
_CELL_CONSTANTS = ("sigma", "lam", "alpha_init")

EVERYTHING = Reading("everything", (), (), lambda model: model.seq_length / 2)
WINDOW = Reading("window", ("window",), (), _window_tokens)
CELLS = Reading("cells", _CELL_KEYS, _CELL_CONSTANTS, _cell_tokens)
POOL = Reading("pool", (*_CELL_KEYS, "retain", "recent"), _CELL_CONSTANTS, _cell_tokens)


@dataclass(frozen=True)
class Gate:
    """What decides for each token whether an L2A layer's global attention is computed for it."""

    keys: tuple[str, ...]  # as in Reading
    fixed_keys: tuple[str, ...]
    learned: bool


ROUTER = Gate(("gate_temperature", "gate_threshold"), ("leak_probability", "closed_layers"), learned=True)
CHANCE = Gate(("open_probability",), ("leak_probability", "closed_layers"), learned=False)


@dataclass(frozen=True)
class AttentionKind:
    """One kind. The L2A kinds have a gate and a global attention behind it."""

    reads: tuple[Reading, ...]  # the layer's attention; of an L2A layer, its local attention
    global_reads: Reading | None = None
    gate: Gate | None = None
    shared_projections: bool = False  # the global attention uses the local one's q, k, v and output projections
    document_mask: bool = False  # can treat every packed document as if alone
    export: str | None = None  # transformers' class that runs it: "stock", or "modeling" for the file we export with it

    @property
    def _parts(self) -> list[Reading | Gate]:
        return [part for part in (*self.reads, self.global_reads, self.gate) if part is not None]

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the attention section that this kind uses."""
        own = {key for part in self._parts for key in (*part.keys, *part.fixed_keys)}
        return frozenset({*COMMON_KEYS, *own})

    @property
    def changeable_keys(self) -> tuple[str, ...]:
        """Keys that may be changed after training and then change what the model computes."""
        common = [key for key in COMMON_KEYS if key != "query_block"]  # a single slice is not padded
        return tuple(dict.fromkeys([*common, *(key for part in self._parts for key in part.keys)]))

    @property
    def reads_cells(self) -> bool:
        """Whether any part reads FreeSolo's cells."""
        return any(part in (CELLS, POOL) for part in self._parts)

    @property
    def prunable(self) -> bool:
        """Whether layers can lose their global attention after training, which counting learned gates decides."""
        return self.gate is not None and self.gate.learned

    def attended(self, model: ModelConfig, open_fraction: float) -> float:
        """Tokens that a query reads, the mean over a sequence.

        Args:
            open_fraction: share of queries whose gate is open, the mean over layers; for learned gates.
        """
        tokens = sum(part.attended(model) for part in self.reads)
        if self.gate is None or self.global_reads is None:
            return tokens
        share = open_fraction if self.gate.learned else model.attention.open_probability
        return tokens + share * self.global_reads.attended(model)


KINDS: dict[str, AttentionKind] = {
    "dense": AttentionKind((EVERYTHING,), document_mask=True, export="stock"),
    "swa": AttentionKind((WINDOW,), document_mask=True, export="stock"),
    "freesolo": AttentionKind((WINDOW, CELLS)),
    "freesolo_l": AttentionKind((WINDOW, POOL)),
    "l2a": AttentionKind((WINDOW,), EVERYTHING, ROUTER, document_mask=True, export="modeling"),
    "l2a_shared": AttentionKind(
        (WINDOW,), EVERYTHING, ROUTER, shared_projections=True, document_mask=True, export="modeling"
    ),
    "l2a_freesolo": AttentionKind((WINDOW,), POOL, ROUTER, export="modeling"),
    "context_free": AttentionKind((WINDOW,), EVERYTHING, CHANCE, document_mask=True, export="modeling"),
}
ATTENTION_KINDS = tuple(KINDS)
L2A_KINDS = tuple(name for name, kind in KINDS.items() if kind.gate is not None)


def kinds_with(test: Callable[[AttentionKind], object]) -> tuple[str, ...]:
    """Names of the kinds for which `test` holds, for a message that lists them."""
    return tuple(name for name, kind in KINDS.items() if test(kind))
