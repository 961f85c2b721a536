"""The typed recipe: every key a recipe may hold, its unit, and its one default.

Plain dataclasses that import nothing of ours; `launch` hands them to the constructors of `megatron_ext` and
`data_prep`. `recipes/load.py` merges YAML files into them, where an unknown key is refused; `recipes/bounds.py` says
which values each may have.
"""

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # omegaconf's mark of a key that the recipe must give

BACKENDS = ("auto", "reference", "triton")
PRECISIONS = ("auto", "fp32", "bf16")
PENALTY_NORMS = ("sequence", "token")
DEVICES = ("auto", "cpu", "cuda")
BAD_DOCUMENT_POLICIES = ("stop", "skip")
SOURCE_FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
PACKINGS = ("concat", "best_fit", "long_first")


@dataclass
class AttentionConfig:
    """Which attention a layer computes, and its constants; a key that its kind does not use is refused."""

    kind: str = "freesolo"  # a row of recipes/kinds.py
    backend: str = "auto"  # auto | reference | triton
    rope_base: float = 10000.0  # of the rotary positions
    window: int = 512  # tokens a query looks back in the local branch (all kinds but dense; L2A recipes say 4095)
    cell_size: int = 32  # tokens; the Triton kernels take 16, 32, 64 and 128
    query_block: int = 128  # tokens, a multiple of cell_size
    top_k: int = 4  # cells read per query and head; the Triton kernels take up to 64
    sigma: float = 4.0  # tokens, width of the positional term
    lam: float = 1.0  # weight of the positional term; 0 routes by content only
    retain: int = 64  # freesolo_l, l2a_freesolo: cells kept by priority, per kv head
    recent: int = 8  # freesolo_l, l2a_freesolo: newest cells kept besides
    eps: float = 1.0e-8  # of the readout's RMSNorm
    alpha_init: float = 1.0  # weight of the long-range branch at the start, per head
    gate_temperature: float = 0.1  # L2A: p = sigmoid(router's score / temperature)
    gate_threshold: float = 0.5  # L2A: a gate is open where p >= threshold; may be moved after training
    leak_probability: float = 0.1  # L2A: of a training step in which a layer computes closed queries too
    open_probability: float = 0.2  # context_free: of a gate
    closed_layers: list[int] = field(default_factory=list)  # L2A: layers (from 0) without a second look, as pruned
    document_mask: bool = False  # True: every packed document is as if alone
    restart_positions: bool = True  # with document_mask: RoPE positions start at 0 in every document


@dataclass
class ModelConfig:
    """The decoder: megatron-core's GPT layers (RMSNorm, SwiGLU, no dropout) around the attention above."""

    num_layers: int = MISSING  # decoder layers
    hidden_size: int = MISSING  # width of the residual stream
    num_heads: int = MISSING  # query heads
    num_kv_heads: int | None = None  # None: as many as num_heads
    head_dim: int | None = None  # even; None: hidden_size / num_heads. The Triton kernels take up to 128
    ffn_size: int = MISSING  # width of the MLP (SwiGLU)
    vocab_size: int = MISSING  # rows of the embedding; at least the tokenizer's vocabulary
    vocab_tokens: int | None = None  # rows that stand for tokens; None: all. The others pad: never predicted
    seq_length: int = MISSING  # tokens
    tie_embeddings: bool = True  # the output layer uses the embedding's rows
    qkv_bias: bool = False  # a bias on q, k and v (Qwen2)
    qk_norm: bool = False  # RMSNorm on q and k per head
    norm_eps: float = 1.0e-5  # of every RMSNorm but the readout's
    init_std: float = 0.02  # standard deviation of the first weights
    init_from: str | None = None  # run directory (or one of its checkpoints) whose weights this run starts from
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    @property
    def token_rows(self) -> int:
        """Rows of the embedding that stand for tokens."""
        return self.vocab_size if self.vocab_tokens is None else self.vocab_tokens


@dataclass
class ParallelConfig:
    """How the GPUs are laid out: tensor x context x data; what is left over is data parallel."""

    tensor: int = 1  # ranks that share every layer's heads and MLP
    context: int = 1  # ranks that share every sequence
    zero_stage: int = 1  # DeepSpeed ZeRO 0-3 over data x context
    timeout_seconds: float = 600.0  # a collective that waits longer ends the job


@dataclass
class SourceConfig:
    """One input of `longpitch prep`."""

    path: str = MISSING  # a directory, a file, a glob, or the URL of one (s3://, gs://, hf://, file://)
    name: str | None = None  # for the mixture and the report; None: the path
    format: str = "auto"
    # text | jsonl | parquet | hf (a data set saved to disk) | auto: by suffix, of which .jsonl, .ndjson and .json hold
    # JSON lines, tables such as .csv are refused, and all others are text
    text_field: str = "text"  # key of the text in a JSONL line, column of a Parquet file or HF data set
    split: str = "train"  # of an HF data set that has several
    suffixes: list[str] = field(default_factory=lambda: [".txt", ".md", ".jsonl", ".ndjson", ".parquet"])
    # files taken from a directory and all below it, each also with .gz, .zst and .bz2 behind it; prep counts the others
    exclude: list[str] = field(default_factory=list)  # names of folders in a directory that are left out
    min_chars: int = 0  # shorter documents are left out
    max_chars: int | None = None  # longer documents are left out
    language_field: str | None = None  # key or column that holds a document's language
    languages: list[str] = field(default_factory=list)  # values of language_field that are kept


@dataclass
class MixtureConfig:
    """One part of the training tokens: documents of a source whose length lies within bounds."""

    proportion: float = MISSING  # of the training tokens; the proportions of all parts are scaled to sum to 1
    source: str | None = None  # name of a source; None: all of them
    min_tokens: int = 0  # a document of fewer tokens belongs to another part
    max_tokens: int | None = None  # a document of this many tokens or more belongs to another part
    repeat: int = 1  # a document may be used so many times


@dataclass
class StreamConfig:
    """One folder of shards among several that training mixes."""

    shards: str = MISSING  # folder or URL
    proportion: float = MISSING  # of the sequences; the proportions of all streams are scaled to sum to 1


@dataclass
class DataConfig:
    """Where the shards lie, how `longpitch prep` makes them, and how training reads them."""

    shards: str = MISSING  # folder (training also: URL) with train/, heldout/, tokenizer/ and manifest.json
    # prep: inputs
    sources: list[SourceConfig] = field(default_factory=list)  # what `longpitch prep` reads
    bad_documents: str = "stop"  # stop | skip: what an unreadable document does
    max_document_mib: int = 64  # a larger document, or line, is a bad one
    deduplicate: bool = True  # exact copies of a document are left out
    heldout_fraction: float = 0.01  # of the documents, by hash
    split_seed: int = 0  # of that hash; not the seed of training, so that runs of other seeds share the split
    # prep: tokens
    tokenizer: str | None = None
    # Hugging Face tokenizer directory or tokenizer.json, or SentencePiece .model; None: byte-level BPE trained here
    tokenizer_vocab_size: int = 4096  # entries of the tokenizer trained here
    add_bos: bool | None = None  # begin every document with BOS; None: where the tokenizer does so itself
    # prep: sequences
    packing: str = "concat"  # concat | best_fit | long_first
    mixture: list[MixtureConfig] = field(default_factory=list)  # a document belongs to the first part that it fits
    max_tokens: int | None = None  # of the training split; None: as many as there are (and the mixture allows)
    recall_masks: bool = False
    # True: store the bit masks of the retrieval-weighted loss, made of what each sequence holds of a document
    shard_mib: int = 64  # size of one shard
    prep_workers: int = 0  # processes of prep; 0: one for each core
    # training
    streams: list[StreamConfig] = field(default_factory=list)
    # training sequences come from these instead of `shards`, which still holds the tokenizer and the held-out split
    cache: str | None = None
    # folder on each host for shards that lie at a URL; None: this run's own in the system's temporary folder,
    # $TMPDIR/longpitch-<user id>/<hash of host and run_dir>/cache, which stays for the next start until it is removed;
    # the lock files of a running job lie beside it, not in run_dir
    cache_gib: float = 0.0  # size that the cached shards of each URL may reach per host; 0: no limit
    num_workers: int = 0  # loader processes per rank
    shuffle: bool = True  # another order of the sequences in every epoch
    canonical_nodes: int = 1  # fixes the sample order whatever the number of nodes
    verify_hashes: bool = False  # True: check every shard's hash at the start, not only its size and counts
    timeout_seconds: float = 300.0  # a batch that takes longer to arrive ends the job


@dataclass
class TrainConfig:
    """The optimisation: AdamW, linear warm-up then cosine, clipping, one global batch of tokens a step."""

    steps: int = MISSING  # optimizer steps of the whole run
    tokens_per_step: int = MISSING  # tokens; a multiple of seq_length
    micro_batch: int = 1  # sequences per forward
    lr: float = MISSING  # learning rate after the warm-up
    min_lr: float = MISSING  # learning rate at the last step
    warmup_steps: int = 0  # over which the learning rate grows linearly
    weight_decay: float = 0.1  # of matrices; norms, biases, alpha and gain have none
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    adam_eps: float = 1.0e-8  # of AdamW
    clip: float = 1.0  # global gradient norm; 0 turns clipping off
    precision: str = "auto"  # auto: bf16 on GPU, fp32 on CPU
    fp32_accumulation: bool = True
    # bf16 runs: the gradients of a step's micro-batches, if it has several, are summed in fp32; takes 2 bytes
    # more per trained parameter and rank at ZeRO 0 and 1, 2 / (data x context ranks) more at ZeRO 2 and 3
    device: str = "auto"  # auto: the GPU where there is one
    recompute: bool = False  # True: layers keep their inputs only
    loss_chunk: int = 1024  # tokens whose logits exist at a time
    recall_beta: float = 0.0  # loss weight 1 + recall_beta * recall + switch_beta * switch
    switch_beta: float = 0.0  # see recall_beta
    gate_penalty: float = 1.0e-8  # L2A: lambda, weight of the mean over sequences and layers of the sum of p^2
    gate_penalty_per: str = "sequence"  # sequence: p^2 is summed over a sequence's tokens | token: averaged over them
    gate_penalty_start: int | None = None  # steps without penalty; None: warmup_steps
    gate_penalty_ramp: int | None = None  # steps from there over which it grows linearly; None: until the last step
    train_only: list[str] = field(default_factory=list)  # regular expressions of the names that train; empty: all
    freeze: list[str] = field(default_factory=list)  # regular expressions of parameter names that do not train
    skip_nonfinite: int = 0
    # steps of the whole run whose loss or gradient may be not finite before it stops; they leave the weights alone and
    # count like any other: in the schedule, in the metrics and for the data
    eval_interval: int = 0  # steps; 0: only at the end
    eval_sequences: int = 32  # held-out sequences; 0 turns evaluation off
    log_interval: int = 1  # steps between TensorBoard points and progress lines; metrics.jsonl has every step


@dataclass
class CheckpointConfig:
    """When the training state is saved, and how many are kept."""

    interval: int = 1000  # steps; 0: only at the end and on SIGTERM or SIGUSR1
    keep: int = 2  # newest whole checkpoints; a damaged one is never removed


@dataclass
class Recipe:
    """One run."""

    run_dir: str = MISSING  # folder of the run; relative to where `longpitch` is started
    seed: int = 1234  # of the first weights, the order of the data and what layers draw
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
