"""Attention over chosen entries, one query at a time, in float64 numpy."""

import math

import numpy as np


def reference(query, key, value, chosen, *, scale: float):
    """(output float64[b, t, n, h] without a sink, log Σ exp [b, t, n], shares).

    Shapes as `sparse_attention`; ``shares`` float64[b, t, e] is the attention weight
    of each entry, averaged over heads. A query that chose nothing gives zeros.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    b, t, heads, _ = query.shape
    share = heads // key.shape[2]
    out = np.zeros((b, t, heads, value.shape[-1]))
    log_sum = np.full((b, t, heads), -math.inf)
    shares = np.zeros((b, t, key.shape[1]))
    for row, column, head in np.ndindex(b, t, heads):
        picked = [int(e) for e in np.asarray(chosen)[row, column] if e >= 0]
        if not picked:
            continue
        logits = [
            scale * float(query[row, column, head] @ key[row, e, head // share])
            for e in picked
        ]
        total = sum(math.exp(logit - max(logits)) for logit in logits)
        for entry, logit in zip(picked, logits, strict=True):
            weight = math.exp(logit - max(logits)) / total
            out[row, column, head] += weight * value[row, entry, head // share]
            shares[row, column, entry] += weight / heads
        log_sum[row, column, head] = max(logits) + math.log(total)
    return out, log_sum, shares
