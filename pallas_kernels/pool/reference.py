"""Gated per-channel pooling, one channel at a time, in float64 numpy."""

import math

import numpy as np


def reference(content, score) -> np.ndarray:
    """float64[b, g, c]; shapes as `pool`."""
    content, score = np.asarray(content, np.float64), np.asarray(score, np.float64)
    b, groups, slots, channels = content.shape
    out = np.zeros((b, groups, channels))
    for row, group, channel in np.ndindex(b, groups, channels):
        logits = score[row, group, :, channel]
        weights = [math.exp(logit - logits.max()) for logit in logits]
        for slot in range(slots):
            share = weights[slot] / sum(weights)
            out[row, group, channel] += share * content[row, group, slot, channel]
    return out
