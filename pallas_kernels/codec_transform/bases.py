"""Orthonormal bases, one vector a row."""

import numpy as np

BASES = ("hadamard", "cosine")


def basis(name: str, size: int) -> np.ndarray:
    """float32[size, size] with orthonormal rows.

    Args:
      name: "hadamard" (Sylvester's order, a power of two) or "cosine" (DCT-II, lowest
        frequency first).
      size: of the axis to transform.

    Raises:
      ValueError: the name is unknown or has no basis of this size.
    """
    if name not in BASES:
        raise ValueError(f"basis {name!r}: expected one of {', '.join(BASES)}")
    if name == "hadamard" and (size < 1 or size & (size - 1)):
        raise ValueError(f"basis {name!r} of size {size}: expected a power of two")
    if size < 1:
        raise ValueError(f"basis {name!r} of size {size}: expected a positive size")
    if name == "cosine":
        frequency, place = np.arange(size)[:, None], np.arange(size)[None]
        matrix = np.cos(np.pi * (place + 0.5) * frequency / size)
        matrix[0] *= np.sqrt(0.5)
        return (matrix * np.sqrt(2 / size)).astype(np.float32)
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)
