"""What the operators are, once more: loops over queries in float64 with gradients derived by hand, sharing no code
with kernels/. They take the sizes that a loop can do and are themselves held to the stored vectors.

Letters: T tokens, H query heads, G key/value heads (head h reads h // (H / G)), D head dim. One sequence, no batch.
"""

import math

import numpy as np
import torch
from torch import Tensor


def as_float64(**tensors: Tensor) -> list[np.ndarray]:
    """The tensors as float64 arrays, in their order."""
    return [x.detach().double().numpy() for x in tensors.values()]


def select_cells_by_loops(
    q: Tensor, k: Tensor, *, cell_size=32, query_block=128, top_k=4, sigma=4.0, lam=1.0, retain=None, recent=8
) -> Tensor:
    """The cells that each query and head reads: int32 [T, H, top_k], ascending, padded with -1.

    Plain Python floats whose sums are exact (`math.fsum`), so that equal cells have equal scores.

    Args:
        q: [T, H, D]; k: [T, G, D].
    """
    (T, H, D), G = q.shape, k.shape[1]
    selected = np.full((T, H, top_k), -1, np.int32)
    queries, all_keys = q.double().tolist(), k.double().transpose(0, 1).tolist()
    for g, keys in enumerate(all_keys):
        cells = [keys[c * cell_size : (c + 1) * cell_size] for c in range(T // cell_size)]
        mean = [[math.fsum(column) / cell_size for column in zip(*cell, strict=True)] for cell in cells]
        priority = [max(math.sqrt(math.fsum(x * x for x in key)) for key in cell) for cell in cells]
        for i in range(T):
            pool = list(range(i // query_block * query_block // cell_size))
            if retain is not None:
                pool = sorted({*sorted(pool, key=lambda c: (-priority[c], c))[:retain], *pool[-recent:]})
            for h in range(g * H // G, (g + 1) * H // G):
                score = {}
                for c in pool:
                    distance = i - (c + 0.5) * cell_size
                    score[c] = math.fsum(x * y for x, y in zip(queries[i][h], mean[c], strict=True)) / math.sqrt(D)
                    score[c] += lam * priority[c] * math.erf(distance / (2 * sigma))
                best = sorted(sorted(pool, key=lambda c: (-score[c], c))[:top_k])
                selected[i, h, : len(best)] = best
    return torch.from_numpy(selected)


def attend_row(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One query's (result [D], weights [keys]) over keys [keys, D]."""
    logits = k @ q * scale
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights @ v, weights


def attend_row_backward(d_out, q, k, v, weights, scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq [D], dk, dv [keys, D]) of `attend_row`."""
    d_weights = v @ d_out
    d_logits = weights * (d_weights - weights @ d_weights) * scale
    return d_logits @ k, np.outer(d_logits, q), np.outer(weights, d_out)


def rope_angles(T: int, D: int, base: float) -> np.ndarray:
    """[T, 1, D / 2]."""
    return np.arange(T)[:, None, None] / base ** (np.arange(D // 2) / (D // 2))


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Rotate-half RoPE of x [T, heads, D]; with negative angles its transpose."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def readout_row(u, d_out, alpha, gain, eps) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """alpha * RMSNorm(u) of one head, and what its gradient gives to u, gain and alpha."""
    root = math.sqrt(np.mean(u * u) + eps)
    normed = u / root
    d_normed = alpha * gain * d_out
    d_u = d_normed / root - u * (u @ d_normed) / (len(u) * root**3)
    return alpha * gain * normed, d_u, alpha * normed * d_out, float(d_out @ (gain * normed))


def freesolo_by_loops(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, gain: Tensor, d_out: Tensor, selected: Tensor, *,
    window=512, cell_size=32, rope_base=10000.0, eps=1e-8,
) -> dict[str, Tensor]:  # fmt: skip
    """FreeSolo's output and gradients given the selection: {"out", "dq", "dk", "dv", "dalpha", "dgain"} in float64.

    Args:
        q, d_out: [T, H, D]; k, v: [T, G, D]; alpha: [H]; gain: [D]; selected: [T, H, K], -1 pads.
    """
    q, k, v, alpha, gain, d_out = as_float64(q=q, k=k, v=v, alpha=alpha, gain=gain, d_out=d_out)
    (T, H, D), G, scale = q.shape, k.shape[1], q.shape[-1] ** -0.5
    angles = rope_angles(T, D, rope_base)
    turned_q, turned_k = rotate(q, angles), rotate(k, angles)
    out, dq, dk, dv, dalpha, dgain = (np.zeros_like(x) for x in (q, q, k, v, alpha, gain))
    turned_dq, turned_dk = np.zeros_like(q), np.zeros_like(k)
    for h in range(H):
        g = h // (H // G)
        for i in range(T):
            near = slice(max(0, i - window), i + 1)
            row = turned_q[i, h], turned_k[near, g], v[near, g]
            out[i, h], weights = attend_row(*row, scale)
            turned_dq[i, h], d_keys, d_values = attend_row_backward(d_out[i, h], *row, weights, scale)
            turned_dk[near, g] += d_keys
            dv[near, g] += d_values
            read = [t for c in selected[i, h].tolist() if c >= 0 for t in range(c * cell_size, (c + 1) * cell_size)]
            if not read:
                continue
            row = q[i, h], k[read, g], v[read, g]
            u, weights = attend_row(*row, scale)
            branch, d_u, d_gain, d_alpha = readout_row(u, d_out[i, h], alpha[h], gain, eps)
            out[i, h] += branch
            dgain += d_gain
            dalpha[h] += d_alpha
            d_query, d_keys, d_values = attend_row_backward(d_u, *row, weights, scale)
            dq[i, h] += d_query
            dk[read, g] += d_keys  # no token is read twice
            dv[read, g] += d_values
    dq, dk = dq + rotate(turned_dq, -angles), dk + rotate(turned_dk, -angles)
    found = {"out": out, "dq": dq, "dk": dk, "dv": dv, "dalpha": dalpha, "dgain": dgain}
    return {name: torch.from_numpy(x) for name, x in found.items()}


def sparse_query_by_loops(q: Tensor, k: Tensor, v: Tensor, active: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    """Causal attention rows of the active queries, zero elsewhere: {"out", "dq", "dk", "dv"} in float64.

    Args:
        q, d_out: [T, H, D]; k, v: [T, G, D]; active: bool [T].
    """
    q, k, v, d_out = as_float64(q=q, k=k, v=v, d_out=d_out)
    (T, H), G, scale = q.shape[:2], k.shape[1], q.shape[-1] ** -0.5
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for i in range(T):
        for h in range(H) if active[i] else ():
            g = h // (H // G)
            row = q[i, h], k[: i + 1, g], v[: i + 1, g]
            out[i, h], weights = attend_row(*row, scale)
            dq[i, h], d_keys, d_values = attend_row_backward(d_out[i, h], *row, weights, scale)
            dk[: i + 1, g] += d_keys
            dv[: i + 1, g] += d_values
    return {name: torch.from_numpy(x) for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
