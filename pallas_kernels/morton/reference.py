"""Interleaved codes bit by bit, in Python integers."""

import numpy as np


def reference_encode(coordinates, bits: int) -> np.ndarray:
    """uint32[n] of uint32[d, n]: bit i of coordinate j is bit i·d + j of the code."""
    coordinates = np.asarray(coordinates)
    dimensions, n = coordinates.shape
    codes = []
    for place in range(n):
        code = 0
        for axis in range(dimensions):
            for bit in range(bits):
                code |= (int(coordinates[axis, place]) >> bit & 1) << (
                    bit * dimensions + axis
                )
        codes.append(code)
    return np.array(codes, np.uint32)
