"""Attention over visible entries, one query at a time, in float64 numpy."""

import math

import numpy as np


def reference(query, key, value, visible, *, scale: float, visible_from=None):
    """(output float64[b, t, n, h] without a sink, log Σ exp [b, t, n], shares).

    Shapes as `compressed_attention`; ``shares`` float64[b, t, e] is the attention
    weight of each entry, averaged over heads. A query that sees nothing gives zeros
    and -inf.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    b, t, heads, _ = query.shape
    share = heads // key.shape[2]
    out = np.zeros((b, t, heads, value.shape[-1]))
    log_sum = np.full((b, t, heads), -math.inf)
    shares = np.zeros((b, t, key.shape[1]))
    for row, column, head in np.ndindex(b, t, heads):
        first = 0 if visible_from is None else int(visible_from[row, column])
        read = slice(first, int(visible[row, column]))
        if read.start >= read.stop:
            continue
        logits = key[row, read, head // share] @ query[row, column, head] * scale
        weights = np.exp(logits - logits.max())
        out[row, column, head] = weights @ value[row, read, head // share]
        out[row, column, head] /= weights.sum()
        shares[row, column, read] += weights / weights.sum() / heads
        log_sum[row, column, head] = logits.max() + math.log(weights.sum())
    return out, log_sum, shares
