"""Mark the tokens that a model can only predict by recalling something far back in what it sees of a document.

The masks weigh the retrieval-weighted loss: `recall` marks copies from far back, `switch` the places where a copy
jumps to another source. They belong to a piece, which is what one sequence holds of a document: a source in an earlier
sequence cannot be copied, and an occurrence there does not make a later one ambiguous.
Letters: T tokens, `x` the piece, `i` and `e` the first positions of a later and an earlier occurrence of a span of 4
tokens.
"""

import numpy as np

MASKS: tuple[str, ...] = ("recall", "switch")  # in the order in which they are stored
MASKS_OF = "pieces"  # what a manifest states of masks that are made piece by piece
SPAN = 4  # tokens that must match
SWITCH_REACH = 64  # positions between two starts, and distance between their sources


def _sorted_spans(x: np.ndarray) -> np.ndarray:
    """Span starts, equal spans side by side and each group by position: a radix sort, linear in T."""
    keys = np.ascontiguousarray(x).astype(np.uint64, copy=False)
    num_spans, largest = len(x) - SPAN + 1, int(keys.max())
    digits = [(keys >> np.uint64(shift)).astype(np.uint16) for shift in range(0, max(largest.bit_length(), 1), 16)]
    order = np.arange(num_spans)
    for place in reversed(range(SPAN)):
        for digit in digits:  # numpy sorts 16-bit numbers stably by counting
            order = order[np.argsort(digit[place : place + num_spans][order], kind="stable")]
    return order


def _unique_earlier_match(x: np.ndarray, gap: int) -> np.ndarray:
    """For each span start i its only earlier occurrence, if that is more than `gap` back, else -1: [T - SPAN + 1]."""
    order = _sorted_spans(x)
    same = np.ones(len(order) - 1, dtype=bool)
    for place in range(SPAN):
        sorted_tokens = x[place : place + len(order)][order]
        same &= sorted_tokens[1:] == sorted_tokens[:-1]
    second = same.copy()
    second[1:] &= ~same[:-1]  # equal to the one before it, which is the first of its group
    first_position, second_position = order[:-1][second], order[1:][second]
    match = np.full(len(order), -1, dtype=np.int64)
    match[second_position] = np.where(second_position - first_position > gap, first_position, -1)
    return match


def recall_masks(tokens: np.ndarray, *, gap: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """The recall and switch masks of one piece of a document; position t speaks of the label tokens[t + 1].

    Args:
        tokens: token ids [T] of all that one sequence holds of the document.
        gap: an earlier occurrence counts when it is more than this many tokens back.

    Returns:
        (recall, switch), bool [T]; the last position, which has no label, is False in both.
    """
    x = np.asarray(tokens)
    num_tokens = len(x)
    recall, switch = np.zeros(num_tokens, dtype=bool), np.zeros(num_tokens, dtype=bool)
    if num_tokens <= max(gap, 0) + SPAN:  # no span has another one so far before it
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
