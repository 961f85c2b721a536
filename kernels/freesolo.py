"""FreeSolo attention: a rotated sliding window beside an unrotated read of the few cells each query remembers.

FS ranks every cell before the query's block. FS-L ranks a pool of bounded size, which is what lets decoding keep a
bounded cache and context-parallel ranks exchange a bounded number of cells. Equations: FreeSolo, arXiv 2610.17191;
cells.py holds the parts, which context parallelism composes in its own way.

Shapes: B batch, T tokens, H query heads, G key/value heads, D head dim.
"""

from torch import Tensor

from kernels.attention import check_heads, compute_dtype
from kernels.cells import check_ranking, choose_cells, combine, number_cells, read_cells, split_cells
from kernels.rope import apply_rope
from kernels.triton_freesolo import triton_choose_cells, triton_freesolo
from kernels.triton_tools import use_triton
from kernels.window import sliding_window_attention


def freesolo_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    gain: Tensor,
    rope_cos: Tensor,
    rope_sin: Tensor,
    *,
    window: int = 512,
    cell_size: int = 32,
    query_block: int = 128,
    top_k: int = 4,
    sigma: float | Tensor = 4.0,
    lam: float | Tensor = 1.0,
    retain: int | None = None,
    recent: int = 8,
    eps: float = 1e-8,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> Tensor:
    """o_i = local_i + alpha_h * RMSNorm(u_i): window attention plus the readout of the chosen cells.

    q, k and v get gradient from both branches, alpha and gain from the sum; selection passes none.

    Args:
        q: unrotated queries [B, T, H, D], any float dtype; less than fp32 is computed in fp32. The Triton kernels take
            bf16 as fp16 in places: a number of q, k or v beyond 65,504 comes out as infinity.
        k, v: unrotated keys, and values [B, T, G, D], H a multiple of G.
        alpha: weight of the readout [H].
        gain: RMSNorm gain of the readout [D].
        rope_cos, rope_sin: [T, D/2] or [B, T, D/2], from `rope_tables`; they rotate the window branch only.
        window: w, tokens the window holds before the query's own.
        cell_size, query_block: s and Bq, a multiple of s.
        top_k: K, cells read per query and query head.
        sigma, lam: width and weight of the positional term of the score, a number or one per query head [H].
        retain: P, the cells of largest priority that FS-L keeps; None is FS, which ranks every cell.
        recent: W, the most recent cells that FS-L keeps.
        eps: RMSNorm epsilon.
        backend: "auto" (Triton on CUDA, for fp64 and elsewhere the reference), "reference" or "triton".
        deterministic: same gradient bits in every run; None follows `torch.are_deterministic_algorithms_enabled`.
            The reference always is; Triton pays for a sort.

    Returns:
        [B, T, H, D] in the dtype of `q`.

    Raises:
        ValueError: shapes that do not fit, an odd head dim, numbers out of range, an unknown or unavailable backend.
    """
    return measured_freesolo_attention(
        q, k, v, alpha, gain, rope_cos, rope_sin, window=window, cell_size=cell_size, query_block=query_block,
        top_k=top_k, sigma=sigma, lam=lam, retain=retain, recent=recent, eps=eps, backend=backend,
        deterministic=deterministic,
    )[0]  # fmt: skip


def measured_freesolo_attention(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, rope_cos: Tensor, rope_sin: Tensor, *,
    window: int, cell_size: int, query_block: int, top_k: int, sigma: float | Tensor, lam: float | Tensor,
    retain: int | None, recent: int, eps: float, backend: str = "auto", deterministic: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`freesolo_attention`, and which share of the cells its pools hold (`Readout.retained`; None for FS)."""
    on_gpu = use_triton("freesolo_attention", backend, q, k, v)
    _check_tokens(q, k, v)
    ranking = {"top_k": top_k, "sigma": sigma, "lam": lam, "retain": retain, "recent": recent}
    if on_gpu:
        _check_whole(q, window, alpha, gain, rope_cos, rope_sin)
        check_ranking(q, cell_size, 0, query_block, **ranking)
        sizes = {"window": window, "cell_size": cell_size, "query_block": query_block, "eps": eps}
        return triton_freesolo(
            q, k, v, alpha, gain, rope_cos, rope_sin, **sizes, **ranking, deterministic=deterministic
        )
    return _reference(q, k, v, alpha, gain, rope_cos, rope_sin, window, cell_size, query_block, eps, ranking)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, rope_cos: Tensor, rope_sin: Tensor, window: int,
    cell_size: int, query_block: int, eps: float, ranking: dict,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The definition: both branches and their sum, in fp32 or more."""
    out_dtype = q.dtype
    q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
    q_rotated, k_rotated = (apply_rope(x, rope_cos, rope_sin, backend="reference") for x in (q, k))
    local = sliding_window_attention(q_rotated, k_rotated, v, window=window, backend="reference")
    k_cells, v_cells = split_cells(k, cell_size), split_cells(v, cell_size)
    u, retained = read_cells(q, k_cells, v_cells, None, query_block=query_block, **ranking, backend="reference")
    return combine(local, u, alpha, gain, eps=eps).to(out_dtype), retained


def select_cells(
    q: Tensor,
    k: Tensor,
    *,
    cell_size: int = 32,
    query_block: int = 128,
    top_k: int = 4,
    sigma: float | Tensor = 4.0,
    lam: float | Tensor = 1.0,
    retain: int | None = None,
    recent: int = 8,
    backend: str = "auto",
) -> Tensor:
    """The cells that `freesolo_attention` reads for each query; arguments and errors are its own.

    Returns:
        Cell indices, int32 [B, T, H, top_k], ascending, then -1 where fewer cells are available.
    """
    on_gpu = use_triton("select_cells", backend, q, k)
    _check_tokens(q, k)
    ranking = {"top_k": top_k, "sigma": sigma, "lam": lam, "retain": retain, "recent": recent}
    if on_gpu:
        check_ranking(q, cell_size, 0, query_block, **ranking)
        cells = k[:, : k.shape[1] // cell_size * cell_size].unflatten(1, (-1, cell_size)).permute(0, 3, 1, 2, 4)
        return triton_choose_cells(q, cells, None, query_start=0, query_block=query_block, **ranking)
    k_cells = split_cells(k, cell_size)
    return choose_cells(q, k_cells, number_cells(k_cells), query_block=query_block, **ranking, backend="reference")


def _check_tokens(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    check_heads(q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens but k has {k.shape[1]}; both branches need one key per query")


def _check_whole(q: Tensor, window: int, alpha: Tensor, gain: Tensor, rope_cos: Tensor, rope_sin: Tensor) -> None:
    """What the parts of the reference check one by one."""
    B, T, H, D = q.shape
    if D % 2:
        raise ValueError(f"head_dim must be even to rotate in pairs, got {D}")
    if window < 0:
        raise ValueError(f"window must be None or at least 0, got {window}")
    if alpha.shape != (H,) or gain.shape != (D,):
        raise ValueError(f"alpha must be {[H]} and gain {[D]}, got {list(alpha.shape)} and {list(gain.shape)}")
    for name, table in (("cos", rope_cos), ("sin", rope_sin)):
        if table.shape not in ((T, D // 2), (B, T, D // 2)):
            raise ValueError(f"{name} must be {[T, D // 2]} or {[B, T, D // 2]} for x {list(q.shape)}, "
                             f"got {list(table.shape)}")  # fmt: skip
