"""Interleaved codes in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from pallas_kernels.array_typing import typed
from pallas_kernels.morton.bits import gather, spread


@typed
def encode(coordinates: UInt32[Array, "d n"], *, bits: int) -> UInt32[Array, " n"]:
    """uint32[n] codes of uint32[d, n]; see ``api.encode``."""
    dimensions = len(coordinates)
    code = spread(coordinates[0], dimensions, bits)
    for axis in range(1, dimensions):
        code = code | spread(coordinates[axis], dimensions, bits) << axis
    return code


@typed
def decode(
    codes: UInt32[Array, " n"], *, dimensions: int, bits: int
) -> UInt32[Array, "d n"]:
    """uint32[d, n] coordinates of uint32[n]; see ``api.decode``."""
    return jnp.stack(
        [gather(codes >> axis, dimensions, bits) for axis in range(dimensions)]
    )
