"""Hugging Face weights as ours, one tensor at a time: each is joined, padded and handed on before the next is read.

The names and shapes come from the model that will read them, so nothing it needs can be missing; what no tensor used is
an error too, as it would be lost.
"""

import re
from collections.abc import Iterator

import torch

from megatron_ext.hugging_face import names
from megatron_ext.weights import StoredWeights, WeightsError, some
from recipes.schema import ModelConfig

# old checkpoints store RoPE's frequencies, which follow from rope_theta
NO_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Importer:
    """The weights of one Hugging Face model under our names.

    Args:
        source: its tensors.
        model: the model section they are read for; `vocab_size` may exceed `token_rows` by rows of zeros.
        shapes: name and shape of every weight of that model.

    Raises:
        WeightsError: tensors that are missing, left over, or of another shape, by name; nothing has been read yet.
    """

    def __init__(self, source: StoredWeights, model: ModelConfig, shapes: dict[str, torch.Size]):
        self.source, self.model = source, model
        self.shapes = {name: shape for name, shape in shapes.items() if not names.given_by_recipe(name, source)}
        self.heads = names.heads_of(model)
        self._check()

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self.shapes.items():
            parts = self._parts(name)
            if parts is None:
                yield name, torch.zeros(shape, dtype=self.source[FINAL_NORM].dtype)
                continue
            tensor = names.join(name, [self.source[part] for part in parts], self.heads)
            yield name, _padded(tensor, shape) if name in names.VOCABULARY else tensor

    def _parts(self, name: str) -> tuple[str, ...] | None:
        """What `name` is read from: its own tensors, those it starts as a copy of, or None for a start at zero."""
        own = names.parts_of(name)
        if any(part in self.source for part in own):
            return own
        if own == (EMBEDDING,) and self.model.tie_embeddings and OUTPUT in self.source:
            return (OUTPUT,)  # one matrix, stored under its other name
        original = names.copied_from(name)
        if original is not None:
            return names.parts_of(original)
        return None if name.endswith(names.GATE) else own

    def _check(self) -> None:
        used, missing, shaped = set(), [], []
        for name, shape in self.shapes.items():
            parts = self._parts(name) or ()
            wanted = names.expected_shape(name, self._token_shape(name, shape), self.heads) if parts else []
            for part, expected in zip(parts, wanted, strict=True):
                used.add(part)
                if part not in self.source:
                    missing.append(part)
                elif (found := self.source.shape(part)) != expected:
                    shaped.append(f"{part} is {found} instead of {expected}")
        left = [name for name in self.source if name not in used and not NO_WEIGHTS.fullmatch(name)]
        if OUTPUT in left and self.model.tie_embeddings:
            left.remove(OUTPUT)
            self._check_tied()
        folder = self.source.folder
        if missing:
            raise WeightsError(f"{folder} lacks {some(missing)}; is config.json that of these weights?")
        if left:
            raise WeightsError(f"{folder} holds {some(left)}, which this model has no place for; see its config.json")
        if shaped:
            raise WeightsError(f"{folder}: {some(shaped)}; is config.json that of these weights?")

    def _token_shape(self, name: str, shape: torch.Size) -> torch.Size:
        return torch.Size([self.model.token_rows, *shape[1:]]) if name in names.VOCABULARY else shape

    def _check_tied(self) -> None:
        """A tied model may store its output layer again, if it is the same."""
        if not torch.equal(self.source[EMBEDDING], self.source[OUTPUT]):
            raise WeightsError(
                f"{self.source.folder}: config.json says tie_word_embeddings, but {OUTPUT} differs from {EMBEDDING}; "
                "set it to false"
            )


def _padded(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[: tensor.shape[0]] = tensor
    return padded
