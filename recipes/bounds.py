"""Which values each key of the schema may have by itself; what must fit between keys is checked in `recipes/load.py`.

Every number has an interval here, in the notation of mathematics: [0, 1) holds 0 and not 1.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

# intervals of the numbers of each section; every number must be finite besides, and an integer below 2**53
INTERVALS = {
    "": {"[0, 4294967295]": "seed"},
    "model": {
        "[1, inf)": "num_layers hidden_size num_heads num_kv_heads head_dim ffn_size vocab_size vocab_tokens "
        "seq_length",
        "(0, 1)": "norm_eps",
        "(0, inf)": "init_std",
    },
    "model.attention": {
        "[1, inf)": "rope_base cell_size query_block top_k retain recent",
        "[0, inf)": "window",
        "(0, inf)": "sigma gate_temperature",
        "(-inf, inf)": "lam alpha_init",
        "(0, 1)": "eps",
        "[0, 1]": "gate_threshold leak_probability open_probability",
    },
    "parallel": {"[1, inf)": "tensor context", "[0, 3]": "zero_stage", "(0, 1e9]": "timeout_seconds"},
    "data": {
        "[1, inf)": "max_document_mib tokenizer_vocab_size max_tokens canonical_nodes",
        "[0, inf)": "split_seed prep_workers cache_gib num_workers",
        "[1, 4095]": "shard_mib",
        "[0, 1)": "heldout_fraction",
        "(0, 1e9]": "timeout_seconds",
    },
    "data.sources[]": {"[0, inf)": "min_chars", "[1, inf)": "max_chars"},
    "data.mixture[]": {"(0, inf)": "proportion", "[0, inf)": "min_tokens", "[1, inf)": "max_tokens repeat"},
    "data.streams[]": {"(0, inf)": "proportion"},
    "train": {
        "[1, inf)": "steps tokens_per_step micro_batch loss_chunk log_interval",
        "[0, inf)": "lr min_lr warmup_steps weight_decay clip recall_beta switch_beta gate_penalty gate_penalty_start "
        "gate_penalty_ramp skip_nonfinite eval_interval eval_sequences",
        "[0, 1)": "beta1 beta2",
        "(0, 1)": "adam_eps",
    },
    "checkpoint": {"[0, inf)": "interval", "[1, inf)": "keep"},
}
PATTERNS = ("train.train_only", "train.freeze")
LARGEST = 2**53  # of an integer


class Complaint(NamedTuple):
    """A value that a key cannot have, and why."""

    key: str
    value: object
    reason: str


def intervals() -> dict[str, str]:
    """The interval of each numeric key; keys of lists of sections have [] in place of a number."""
    return {
        f"{section}.{key}".removeprefix("."): interval
        for section, of_keys in INTERVALS.items()
        for interval, keys in of_keys.items()
        for key in keys.split()
    }


def complaints(recipe: Any) -> Iterator[Complaint]:
    """What is wrong with the single values of a recipe."""
    known = intervals()
    for key, value in _values(recipe, ""):
        reason = None
        if isinstance(value, str):
            reason = _wrong_text(value)
        elif isinstance(value, list):
            for one in value:
                reason = reason or (_wrong_text(one) if isinstance(one, str) and one else None)
                reason = reason or (_wrong_pattern(one) if key in PATTERNS else None)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            reason = _wrong_number(value, known[re.sub(r"\[\d+\]", "[]", key)])
        if reason is not None:
            yield Complaint(key, value, reason)


def _values(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a section."""
    for field in fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if is_dataclass(value):
            yield from _values(value, f"{key}.")
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            for number, one in enumerate(value):
                yield from _values(one, f"{key}[{number}].")
        else:
            yield key, value


def _wrong_number(value: float, interval: str) -> str | None:
    """Why a number does not lie in an interval."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"must be at most {LARGEST}" if value > 0 else f"must lie in {interval}"
    if not math.isfinite(value):
        return "must be a finite number"
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    if above and below:
        return None
    if high < math.inf:
        return f"must lie in {interval}"
    if interval[0] == "(":
        return f"must be above {low:g}"
    return "must be 0 or more" if low == 0 else f"must be at least {low:g}"


def _wrong_text(text: str) -> str | None:
    if not text:
        return "must not be empty"
    if "\0" in text:
        return "holds a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the shell, which Python keeps as halves of characters
        return "is not UTF-8 text"
    return None


def _wrong_pattern(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"{pattern!r} is no regular expression ({error})"
    return None
