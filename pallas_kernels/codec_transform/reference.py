"""Transforms coefficient by coefficient, in float64."""

import math

import numpy as np


def reference_basis(name: str, size: int) -> np.ndarray:
    """float64[size, size], one basis vector a row."""
    out = np.zeros((size, size))
    for row, place in np.ndindex(size, size):
        if name == "hadamard":
            sign = (-1) ** (row & place).bit_count()
            out[row, place] = sign / math.sqrt(size)
        else:
            angle = math.pi * (2 * place + 1) * row / (2 * size)
            norm = math.sqrt((1 if row == 0 else 2) / size)
            out[row, place] = norm * math.cos(angle)
    return out


def reference_transform(x, tokens: str | None, channels: str | None) -> np.ndarray:
    """float64[n, s, c]: the coefficients of each group of s tokens by c channels."""
    x = np.asarray(x, np.float64)
    n, s, c = x.shape
    out = x.copy()
    if tokens is not None:
        rows = reference_basis(tokens, s)
        for group, place, channel in np.ndindex(n, s, c):
            out[group, place, channel] = sum(
                rows[place, t] * x[group, t, channel] for t in range(s)
            )
    x = out.copy()
    if channels is not None:
        rows = reference_basis(channels, c)
        for group, token, place in np.ndindex(n, s, c):
            out[group, token, place] = float(rows[place] @ x[group, token])
    return out
