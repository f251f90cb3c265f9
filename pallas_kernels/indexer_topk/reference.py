"""Lightning-indexer scores and choice, one query at a time, in float64 numpy."""

import numpy as np


def reference_scores(query, weight, key) -> np.ndarray:
    """float64[b, t, e]; shapes as `indexer_scores`."""
    query, weight, key = (np.asarray(x, np.float64) for x in (query, weight, key))
    b, t, heads, _ = query.shape
    out = np.zeros((b, t, key.shape[2]))
    for row, column, entry, head in np.ndindex(b, t, key.shape[2], heads):
        product = float(query[row, column, head] @ key[row, :, entry])
        out[row, column, entry] += weight[row, column, head] * max(product, 0.0)
    return out


def reference_choice(scores, visible, k: int) -> np.ndarray:
    """int[b, t, k]: the k best visible entries, best first; ties to the lowest index.

    Args:
      scores: [b, t, e]; visible: int[b, t].
    """
    scores = np.asarray(scores)
    chosen = np.full((*scores.shape[:2], k), -1)
    for row, column in np.ndindex(*scores.shape[:2]):
        seen = range(min(int(visible[row, column]), scores.shape[2]))
        best = sorted(seen, key=lambda e: (-float(scores[row, column, e]), e))[:k]
        chosen[row, column, : len(best)] = best
    return chosen
