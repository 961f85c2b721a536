"""Mark the tokens that a model can only predict by recalling something far back in the same document.

The masks weigh the retrieval-weighted loss: `recall` marks copies from far back, `switch` the places where a copy
jumps to another source. Letters: T tokens, `x` the document, `i` and `e` the first positions of a later and an
earlier occurrence of a span of 4 tokens.
"""

import numpy as np

SPAN = 4  # tokens that must match
SWITCH_REACH = 64  # positions between two starts, and distance between their sources


def _dense(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """Number equal keys alike, from 0: ids and how many there are."""
    values, ids = np.unique(keys, return_inverse=True)
    return ids.reshape(-1).astype(np.int64), len(values)


def _unique_earlier_match(x: np.ndarray, gap: int) -> np.ndarray:
    """For each span start i its only earlier occurrence, if that is more than `gap` back, else -1: [T - SPAN + 1]."""
    tokens, num_tokens = _dense(x)
    pairs, num_pairs = _dense(tokens[:-1] * num_tokens + tokens[1:])
    spans = pairs[:-2] * num_pairs + pairs[2:]
    order = np.argsort(spans, kind="stable")  # equal spans side by side, each group by position
    same = spans[order[1:]] == spans[order[:-1]]
    second = same.copy()
    second[1:] &= ~same[:-1]  # equal to the one before it, which is the first of its group
    first_position, second_position = order[:-1][second], order[1:][second]
    match = np.full(len(spans), -1, dtype=np.int64)
    match[second_position] = np.where(second_position - first_position > gap, first_position, -1)
    return match


def recall_masks(tokens: np.ndarray, *, gap: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """The recall and switch masks of one document; position t speaks of the label tokens[t + 1].

    Args:
        tokens: token ids [T] of one whole document.
        gap: an earlier occurrence counts when it is more than this many tokens back.

    Returns:
        (recall, switch), bool [T]; the last position, which has no label, is False in both.
    """
    x = np.asarray(tokens)
    num_tokens = len(x)
    recall, switch = np.zeros(num_tokens, dtype=bool), np.zeros(num_tokens, dtype=bool)
    if num_tokens <= SPAN:
        return recall, switch
    match = _unique_earlier_match(x, gap)

    # a start: the span that begins at the label has a match, and the tokens before the two differ
    source = np.full(num_tokens, -1, dtype=np.int64)
    source[: len(match) - 1] = match[1:]
    starts = np.flatnonzero(source >= 1)
    starts = starts[x[source[starts] - 1] != x[starts]]
    recall[starts] = True

    # a continuation: the span that ends at t has a match, and the token after that match is the label
    last = np.flatnonzero(match[:-1] >= 0)
    recall[last[x[match[last] + SPAN] == x[last + SPAN]] + SPAN - 1] = True

    sources = source[starts]
    jumps = (np.diff(starts) <= SWITCH_REACH) & (np.abs(np.diff(sources)) > SWITCH_REACH)
    switch[starts[1:][jumps]] = True
    return recall, switch
