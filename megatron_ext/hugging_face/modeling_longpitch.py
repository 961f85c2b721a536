"""Runs an exported L2A model under transformers: AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True).

A layer first attends over a window, then, for the tokens whose gate is open, over everything (arXiv 2603.17484). Plain
torch; written for transformers 4.57 to 5.24. The file travels with the weights and imports nothing of Longpitch.

A `DynamicCache` holds two layers for each decoder layer: the window's last keys and values, and all of the second look;
a layer without a second look has the first only. Shapes: B batch, T new tokens, K keys, H query heads, G kv heads,
D head dim. A token's slot is its place in the sequence, padding counted; its position is what RoPE turns by.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

SCORES = 1 << 27  # attention scores computed at a time
# transformers 5 renames past_key_values to cache
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class LongpitchConfig(PretrainedConfig):
    """Sizes as in Qwen's configs; `local_window` counts the tokens before the query itself.

    `gate_threshold` may be moved after training: from_pretrained(..., gate_threshold=0.7) opens fewer gates. With an
    `open_probability` gates open by chance instead, and no router is there. With `cells` (cell_size, query_block,
    top_k, retain, recent, sigma, lam, eps) the second look is at a few remembered cells, see `CellAttention`.
    """

    model_type = "longpitch"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        base_model_type: str = "qwen2",
        vocab_size: int = 151936,
        hidden_size: int = 4096,
        intermediate_size: int = 22016,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 32,
        head_dim: int = 128,
        max_position_embeddings: int = 32768,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        local_window: int = 4095,
        gate_temperature: float = 0.1,
        gate_threshold: float = 0.5,
        open_probability: float | None = None,
        shared_attention: bool = False,
        cells: dict[str, Any] | None = None,
        closed_layers: tuple[int, ...] | list[int] = (),
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs,
    ):
        self.base_model_type = base_model_type
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        self.max_position_embeddings, self.rms_norm_eps, self.rope_theta = (
            max_position_embeddings,
            rms_norm_eps,
            rope_theta,
        )
        self.qkv_bias, self.qk_norm = qkv_bias, qk_norm
        self.local_window, self.gate_temperature, self.gate_threshold = local_window, gate_temperature, gate_threshold
        self.open_probability, self.cells = open_probability, cells
        self.shared_attention, self.closed_layers = shared_attention, list(closed_layers)
        self.initializer_range, self.use_cache = initializer_range, use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RMSNorm(nn.Module):
    """Root-mean-square norm, taken in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Sequence:
    """What all layers of one forward share: rotation tables [B, T, D/2], and where the new tokens stand."""

    def __init__(self, position_ids: Tensor, is_real: Tensor | None, past: int, config: LongpitchConfig):
        D, T = config.head_dim, position_ids.shape[1]
        exponent = torch.arange(0, D, 2, dtype=torch.float64, device=position_ids.device) / D
        # angles in fp64: rounded to bf16, position 15,962 would become 15,968
        angle = position_ids.double()[..., None] * config.rope_theta**-exponent
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        self.positions = position_ids  # [B, T]
        self.end = past + T  # slots so far
        self.slots = past + torch.arange(T, device=position_ids.device)  # of the new tokens
        self.is_real = is_real  # [B, end] bool, False for padding; None: there is none

    def to(self, device: torch.device | str | int, **_options) -> "Sequence":
        """The same on another device: accelerate asks for it where a device_map spreads layers over several."""
        if self.slots.device == torch.device(device):
            return self
        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(device) if isinstance(value, Tensor) else value)
        return moved

    def rotate(self, x: Tensor) -> Tensor:
        """Turn [B, heads, T, D] by the positions, in fp32."""
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, window: int | None, row: int | None) -> Tensor:
        """Causal attention of queries at any slots, a bounded number of scores at a time.

        Args:
            q: [B, H, n, D] at ascending `slots` [n]. k, v: [B, G, K, D], the last K slots.
            window: tokens a query looks back; None for all.
            row: the sequence that q, k and v are of; None: all.
        """
        B, H, n, _ = q.shape
        K = k.shape[2]
        if window is None and self.is_real is None and n == K:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        first = self.end - K
        step = max(1, min(512, SCORES // (B * H * (K if window is None else min(K, window + 512)))))
        out = []
        for begin in range(0, n, step):
            at = slots[begin : begin + step] - first
            low, high = 0 if window is None else max(0, int(at[0]) - window), int(at[-1]) + 1
            distance = at[:, None] - torch.arange(low, high, device=at.device)
            seen = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
            if self.is_real is not None:
                real = self.is_real if row is None else self.is_real[row : row + 1]
                # padding sees itself, or its softmax would be over nothing
                seen = seen & real[:, None, None, first + low : first + high] | (distance == 0)
            part = (q[:, :, begin : begin + step], k[:, :, low:high], v[:, :, low:high])
            out.append(F.scaled_dot_product_attention(*part, attn_mask=seen, enable_gqa=True))
        return torch.cat(out, dim=2)


class Attention(nn.Module):
    """Projections of one attention: over a window, or, for chosen tokens, over everything."""

    rotated = True

    def __init__(self, config: LongpitchConfig):
        super().__init__()
        D, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = D
        self.q_proj = nn.Linear(config.hidden_size, H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, G * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, G * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def _project(self, x: Tensor, sequence: Sequence, cache: DynamicCache | None, index: int):
        """q of the new tokens [B, H, T, D], k and v of all that the cache keeps [B, G, K, D]."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotated:
            q, k = sequence.rotate(q), sequence.rotate(k)
        if cache is not None:
            k, v = cache.update(k, v, index)
        return q, k, v

    def _out(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def over_window(self, x: Tensor, sequence: Sequence, window: int, cache: DynamicCache | None, index: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        q, k, v = self._project(x, sequence, cache, index)
        return self._out(sequence.attend(q, k, v, sequence.slots, window, None))

    def over_everything(
        self, x: Tensor, is_open: Tensor, sequence: Sequence, cache: DynamicCache | None, index: int
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], zero where is_open [B, T] is not."""
        q, k, v = self._project(x, sequence, cache, index)
        if is_open.all():
            return self._out(sequence.attend(q, k, v, sequence.slots, None, None))
        heads = torch.zeros_like(q)
        for row in range(x.shape[0]):
            chosen = is_open[row].nonzero().squeeze(1)
            if chosen.numel():
                own_q, own_k, own_v = (part[row : row + 1] for part in (q[:, :, chosen], k, v))
                heads[row, :, chosen] = sequence.attend(own_q, own_k, own_v, sequence.slots[chosen], None, row)[0]
        return self._out(heads)


class Readout(nn.Module):
    """What was read of cells, normalised and weighed by head: alpha * RMSNorm(u), in fp32."""

    def __init__(self, config: LongpitchConfig, eps: float):
        super().__init__()
        self.eps = eps
        self.alpha = nn.Parameter(torch.ones(config.num_attention_heads))
        self.gain = nn.Parameter(torch.ones(config.head_dim))

    def forward(self, u: Tensor) -> Tensor:
        """[H, n, D] -> [H, n, D]."""
        wide = u.float()
        wide = self.gain.float() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.alpha.float()[:, None, None] * wide).to(u.dtype)


class CellAttention(Attention):
    """A second look at a few remembered cells of tokens in place of everything (FreeSolo, arXiv 2610.17191).

    A query ranks the cells that ended before its block of queries, of which each kv head keeps the `retain` that have
    the longest keys and the `recent` last, and reads the tokens of the `top_k` best. Decided in fp64, as in training.
    """

    rotated = False

    def __init__(self, config: LongpitchConfig, cells: dict[str, Any]):
        super().__init__(config)
        self.cells, self.readout = cells, Readout(config, cells["eps"])

    def over_everything(
        self, x: Tensor, is_open: Tensor, sequence: Sequence, cache: DynamicCache | None, index: int
    ) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden], zero where is_open [B, T] is not."""
        q, k, v = self._project(x, sequence, cache, index)
        heads, per_block = torch.zeros_like(q), self.cells["query_block"]
        for row in range(x.shape[0]):
            real = is_open.new_ones(sequence.end) if sequence.is_real is None else sequence.is_real[row]
            place = real.cumsum(0)[sequence.slots] - 1  # among the sequence's own tokens
            table = self._summaries(k[row][:, real], v[row][:, real])
            blocks = place // per_block
            for block in blocks.unique().tolist():
                some = (is_open[row] & real[sequence.slots] & (blocks == block)).nonzero().squeeze(1)
                ended = block * per_block // self.cells["cell_size"]
                if some.numel() and ended:
                    heads[row, :, some] = self._read(q[row][:, some], place[some], *(part[:, :ended] for part in table))
        return self._out(heads)

    def _summaries(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The cells of k and v [G, K, D]: keys, values [G, N, s, D], mean key [G, N, D], priority [G, N]."""
        size = self.cells["cell_size"]
        count = k.shape[1] // size
        k, v = (part[:, : count * size].unflatten(1, (count, size)) for part in (k, v))
        wide = k.double()
        return k, v, wide.mean(2), wide.square().sum(-1).sqrt().amax(-1)

    def _read(self, q: Tensor, place: Tensor, k: Tensor, v: Tensor, mean: Tensor, priority: Tensor) -> Tensor:
        """Queries [H, n, D] of one block, at `place` [n], read the cells [G, N, ...] before it: [H, n, D]."""
        own, (G, N) = self.cells, priority.shape
        pool = own["retain"] + own["recent"]
        ranked = priority.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(priority, dtype=torch.bool).scatter(1, ranked[:, : own["retain"]], True)
        kept[:, -own["recent"] :] = True
        columns = torch.arange(N, device=q.device).where(kept, N).sort(dim=-1).values[:, :pool]
        absent, columns = (columns == N)[:, None, None], columns.clamp(max=N - 1)
        head = torch.arange(G, device=q.device)[:, None]
        k, v, mean, priority = (part[head, columns] for part in (k, v, mean, priority))  # [G, C, ...]
        queries = q.unflatten(0, (G, -1))  # [G, R, n, D]
        distance = place[:, None] - ((columns.double() + 0.5) * own["cell_size"])[:, None, None]
        recency = own["lam"] * priority[:, None, None] * torch.erf(distance / (2 * own["sigma"]))
        scores = queries.double() @ mean.mT[:, None] / self.head_dim**0.5 + recency
        best = scores.masked_fill(absent, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best[..., : own["top_k"]], True) & ~absent
        seen = chosen.repeat_interleave(own["cell_size"], dim=-1).flatten(1, 2)  # [G, R * n, C * s]
        u = F.scaled_dot_product_attention(queries.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), attn_mask=seen)
        return self.readout(u.view_as(q))


# SplitMix64 on int64, whose products wrap
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's mixing step on int64."""
    for bits, factor in ((30, FIRST), (27, SECOND)):
        x = (x ^ (x >> bits & 2 ** (64 - bits) - 1)) * factor
    return x ^ (x >> 31 & 2**33 - 1)


def drawn_open(positions: Tensor, layer: int, probability: float) -> Tensor:
    """Gates that open by chance: a function of the layer (from 1) and of int64 `positions`, as outside training."""
    key = torch.zeros((), dtype=torch.int64, device=positions.device)
    for part in (0, 0, layer, 2):  # seed, step, layer, and the stream of these draws
        key = mixed(key + torch.full_like(key, part + 1) * GOLDEN)
    return (mixed(positions * GOLDEN + key) >> 11 & 2**53 - 1) < int(probability * 2**53)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LongpitchConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Linear):
    """The score of each token, in fp32."""

    def forward(self, z: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T]."""
        return (z.float() * self.weight.float()).sum(-1)


class LongpitchLayer(nn.Module):
    """Window, gated second look, MLP: layer `number`, from 1; `local_index` is its first place in the cache."""

    def __init__(self, config: LongpitchConfig, *, number: int, has_global: bool, local_index: int):
        super().__init__()
        self.number, self.open_probability = number, config.open_probability
        self.window, self.local_index, self.global_index = config.local_window, local_index, local_index + 1
        self.temperature, self.threshold = config.gate_temperature, config.gate_threshold
        self.has_global, self.shared = has_global, config.shared_attention
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        if has_global:
            self.global_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if has_global and self.open_probability is None:
            self.router = Router(config.hidden_size, 1, bias=False)
        if has_global and not self.shared:
            self.global_attn = CellAttention(config, config.cells) if config.cells else Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def is_open(self, z: Tensor, positions: Tensor) -> Tensor:
        """[B, T] bool: whose gate is open; decided in fp32, as in training, or drawn for int64 `positions` [B, T]."""
        if self.open_probability is not None:
            return drawn_open(positions, self.number, self.open_probability)
        return (self.router(z) / self.temperature).sigmoid() >= self.threshold

    def forward(self, x: Tensor, sequence: Sequence, cache: DynamicCache | None) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + self.self_attn.over_window(self.input_layernorm(x), sequence, self.window, cache, self.local_index)
        if self.has_global:
            z = self.global_layernorm(x)
            attention = self.self_attn if self.shared else self.global_attn
            is_open = self.is_open(z, sequence.positions)
            x = x + attention.over_everything(z, is_open, sequence, cache, self.global_index)
        return x + self.mlp(self.post_attention_layernorm(x))


def as_dict(config: LongpitchConfig, asked: bool | None) -> bool:
    """Whether a forward answers by names; the config's `return_dict` decides where the call does not."""
    return bool(config.return_dict if asked is None else asked)


class LongpitchPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model."""

    config: LongpitchConfig
    config_class = LongpitchConfig
    base_model_prefix = "model"
    _no_split_modules = ["LongpitchLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            nn.init.zeros_(module.weight)  # every gate open
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, Readout):
            nn.init.ones_(module.alpha)
            nn.init.ones_(module.gain)


class LongpitchModel(LongpitchPreTrainedModel):
    """The decoder: tokens to normalised states."""

    def __init__(self, config: LongpitchConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers, index = [], 0
        for number in range(config.num_hidden_layers):
            has_global = number not in config.closed_layers
            layers.append(LongpitchLayer(config, number=number + 1, has_global=has_global, local_index=index))
            index += 1 + has_global
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def _prepare(self, cache: DynamicCache | None) -> DynamicCache:
        """A cache with this model's layers in it; one that holds tokens already has them."""
        cache = DynamicCache() if cache is None else cache
        if not isinstance(cache, DynamicCache):
            raise ValueError(
                f"an L2A model needs a DynamicCache, got {type(cache).__name__}; leave cache_implementation out"
            )
        if cache.get_seq_length() == 0:
            own: list = []
            kept = max(1, self.config.local_window)  # told to keep nothing, the cache layer would keep everything
            for layer in self.layers:
                own.append(DynamicSlidingWindowLayer(sliding_window=kept + 1))
                if layer.has_global:
                    own.append(DynamicLayer())
            cache.layers = own
        return cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: DynamicCache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_kwargs,
    ) -> BaseModelOutputWithPast | tuple:
        """attention_mask: [B, slots so far], 0 for padding. `cache` is another name of past_key_values.

        hidden_states are what each layer reads, and the normalised output: num_hidden_layers + 1 times [B, T, hidden].
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: an L2A model keeps no attention weights; leave it out")
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = self._prepare(past_key_values if cache is None else cache) if use_cache else None
        past = 0 if cache is None else cache.get_seq_length()
        is_real = None
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(f"an L2A model takes attention_mask [B, tokens], got {list(attention_mask.shape)}")
            is_real = None if attention_mask.all() else attention_mask.bool()
        if position_ids is None:
            position_ids = past + torch.arange(x.shape[1], device=x.device)[None]
            if is_real is not None:
                position_ids = (is_real.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        sequence = Sequence(position_ids.expand(x.shape[0], -1), is_real, past, self.config)
        read = ()
        for layer in self.layers:
            read = (*read, x) if keep else ()
            x = layer(x, sequence, cache)
        x = self.norm(x)
        fields: dict[str, Any] = {"hidden_states": (*read, x) if keep else None, CACHE: cache}
        found = BaseModelOutputWithPast(last_hidden_state=x, **fields)
        return found if as_dict(self.config, return_dict) else found.to_tuple()


class LongpitchForCausalLM(LongpitchPreTrainedModel, GenerationMixin):
    """The language model. Its gates are hard, so the router does not train here."""

    accepts_loss_kwargs = False  # the loss is a mean: a Trainer has to divide it by its accumulation steps itself
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LongpitchConfig):
        super().__init__(config)
        self.model = LongpitchModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_kwargs,
    ) -> CausalLMOutputWithPast | tuple:
        """Logits [B, T or logits_to_keep, V]; with labels [B, T] the mean next-token loss besides."""
        past_key_values = past_key_values if cache is None else cache
        given = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        asked = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        found = self.model(*given, **asked, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        fields: dict[str, Any] = {"loss": loss, CACHE: found.get(CACHE)}
        found = CausalLMOutputWithPast(logits=logits, hidden_states=found.hidden_states, **fields)
        return found if as_dict(self.config, return_dict) else found.to_tuple()
