"""Sliding-window attention, one query at a time, in float64 numpy."""

import math

import numpy as np


def reference(
    query,
    key,
    value,
    query_position,
    key_position,
    *,
    window: int,
    scale,
    decay,
    visible_from=None,
):
    """(output float64[b, t, n, h] without a sink, log Σ exp of logits [b, t, n]).

    Shapes as `window_attention`. A query that sees nothing gives zeros and -inf.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    b, t, heads, _ = query.shape
    share = heads // key.shape[2]
    out = np.zeros((b, t, heads, value.shape[-1]))
    log_sum = np.full((b, t, heads), -math.inf)
    for row, column, head in np.ndindex(b, t, heads):
        at = int(query_position[row, column])
        least = 0 if visible_from is None else int(visible_from[row, column])
        terms = []
        for place, position in enumerate(np.asarray(key_position)[row]):
            if position < least or not at - window < position <= at:
                continue
            logit = scale * float(
                query[row, column, head] @ key[row, place, head // share]
            )
            if decay is not None:
                logit -= float(decay[head]) * (at - position)
            terms.append((logit, value[row, place, head // share]))
        if not terms:
            continue
        highest = max(logit for logit, _ in terms)
        total = sum(math.exp(logit - highest) for logit, _ in terms)
        for logit, val in terms:
            out[row, column, head] += math.exp(logit - highest) / total * val
        log_sum[row, column, head] = highest + math.log(total)
    return out, log_sum
