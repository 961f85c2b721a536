"""The language model: megatron-core's GPT with our layers and a loss that never holds all logits."""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from kernels.rope import rope_tables
from megatron_ext.loss import linear_cross_entropy
from megatron_ext.parallel.collectives import Group, group_rank, group_size
from megatron_ext.sequence_context import RotationTables, SequenceContext, sequence_context
from megatron_ext.specs import decoder_spec
from recipes.errors import UserError
from recipes.schema import ModelConfig, TrainConfig


class LanguageModel(GPTModel):
    """GPT without position embedding (RoPE is the attention's); returns the weighted loss, or logits."""

    def __init__(self, *args, token_rows: int, tensor_group: Group = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.tensor_group = tensor_group
        per_rank = self.vocab_size // group_size(tensor_group)
        self.first_row = group_rank(tensor_group) * per_rank
        self.own_rows = min(per_rank, token_rows - self.first_row)  # of this rank; the rest is padding
        if self.own_rows < 1:
            raise UserError(
                f"model.vocab_tokens {token_rows} leaves tensor-parallel rank {group_rank(tensor_group)} nothing of "
                f"model.vocab_size {self.vocab_size} but padding; lower model.vocab_size"
            )

    def output_weight(self) -> torch.nn.Parameter:
        """The rows that hidden states are multiplied by: the embedding's when tied, else the output layer's."""
        layer = self.embedding.word_embeddings if self.share_embeddings_and_output_weights else self.output_layer
        assert layer.weight is not None  # there are no pipeline stages without one
        return layer.weight

    def forward(
        self,
        tokens: torch.Tensor,
        context: SequenceContext,
        labels: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        loss_chunk: int = TrainConfig.loss_chunk,
    ) -> torch.Tensor:
        """Run the decoder over this rank's slice.

        Args:
            tokens: [B, T] int64. context: positions and borders of the slice.
            labels, weights: [B, T]; without them logits come back.
            loss_chunk: tokens whose logits exist at a time.

        Returns:
            sum of weight * nll over this slice (scalar), or logits [B, T, V or this rank's V/tp], padding left out.
        """
        hidden = self.embedding(input_ids=tokens, position_ids=None)
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=context)  # [T, B, width]
        weight = self.output_weight()[: self.own_rows]
        if labels is None or weights is None:
            return (hidden @ weight.t()).transpose(0, 1)
        flat = hidden.transpose(0, 1).reshape(-1, hidden.shape[-1])
        return linear_cross_entropy(
            flat,
            weight,
            labels.reshape(-1),
            weights.reshape(-1),
            chunk=loss_chunk,
            first_row=self.first_row,
            tensor_group=self.tensor_group,
        )


def head_dim(model: ModelConfig) -> int:
    """Width of one head."""
    return model.head_dim or model.hidden_size // model.num_heads


def _transformer_config(model: ModelConfig, *, tensor: int, context: int, dtype: torch.dtype, fused: bool):
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads or model.num_heads,
        kv_channels=head_dim(model),
        ffn_hidden_size=model.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=model.init_std,
        params_dtype=dtype,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        # weights drawn on the CPU are the same whatever the layout and the device
        use_cpu_initialization=True,
        # the fusions are compiled by torch at the first call: worth it on a GPU only
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        gradient_accumulation_fusion=False,
    )


def build_model(
    model: ModelConfig,
    *,
    tensor: int = 1,
    context: int = 1,
    tensor_group: Group = None,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    fused: bool = False,
) -> LanguageModel:
    """Build the model on the CPU (or on the meta device under `torch.device("meta")`), weights drawn from torch's RNG.

    Raises:
        UserError: the attention refuses the recipe (see `layer_spec`).
    """
    return LanguageModel(
        config=_transformer_config(model, tensor=tensor, context=context, dtype=dtype, fused=fused),
        transformer_layer_spec=decoder_spec(model, recompute=recompute),
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="none",
        token_rows=model.token_rows,
        tensor_group=tensor_group,
    )


def weight_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight and buffer of a whole model, without its memory."""
    with torch.device("meta"):
        state = build_model(model).state_dict()
    return {name: value.shape for name, value in state.items() if value is not None}


def shared_tables(model: ModelConfig, *, start: int, tokens: int, device: torch.device) -> RotationTables | None:
    """The rotation tables of every slice of `tokens` tokens from global position `start` on.

    None where each micro-batch has its own: positions start anew in every document.
    """
    if model.attention.document_mask and model.attention.restart_positions:
        return None
    positions = start + torch.arange(tokens, device=device)
    return rope_tables(positions, head_dim(model), model.attention.rope_base)


def slice_context(
    model: ModelConfig,
    doc_starts: torch.Tensor,
    *,
    start: int,
    length: int,
    tables: RotationTables | None = None,
    measure: bool = False,
    seed: int = 0,
    step: int = 0,
) -> SequenceContext:
    """The `SequenceContext` of a slice that begins at global position `start`, for this model's attention.

    Args:
        tables: its `shared_tables`; None makes some for this slice alone.
    """
    return sequence_context(
        doc_starts,
        start=start,
        length=length,
        head_dim=head_dim(model),
        rope_base=model.attention.rope_base,
        document_mask=model.attention.document_mask,
        restart_positions=model.attention.restart_positions,
        tables=tables,
        measure=measure,
        seed=seed,
        step=step,
    )
