"""Interleaved codes on registers: one read and one write of each number.

Tiles are rows of a two-dimensional view, so that offsets may exceed 2^31. A number of
points that fills no whole tiles costs one more copy.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.launch import kernel
from pallas_kernels.morton import xla
from pallas_kernels.morton.bits import gather, spread

# Codes of one block: 8 for each of 128 lanes.
TILE = 1024


def encode(coordinates: Array, *, bits: int) -> Array:
    """uint32[n] codes of uint32[d, n]."""
    dimensions, n = coordinates.shape
    tiles = n // TILE
    if tiles == 0:
        return xla.encode(coordinates, bits=bits)
    whole = tiles * TILE

    def body(coordinate_ref, out_ref):
        tile = jax.lax.axis_index("tile")
        code = spread(coordinate_ref[0, tile], dimensions, bits)
        for axis in range(1, dimensions):
            part = spread(coordinate_ref[axis, tile], dimensions, bits)
            code = code | part << axis
        out_ref[tile] = code

    codes = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles, TILE), jnp.uint32),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="morton_encode",
        cost_estimate=_cost(dimensions, whole),
    )(coordinates[:, :whole].reshape(dimensions, tiles, TILE))
    codes = codes.reshape(whole)
    if whole == n:
        return codes
    rest = xla.encode(coordinates[:, whole:], bits=bits)
    return jnp.concatenate([codes, rest])


def decode(codes: Array, *, dimensions: int, bits: int) -> Array:
    """uint32[d, n] coordinates of uint32[n]."""
    n = len(codes)
    tiles = n // TILE
    if tiles == 0:
        return xla.decode(codes, dimensions=dimensions, bits=bits)
    whole = tiles * TILE

    def body(code_ref, out_ref):
        tile = jax.lax.axis_index("tile")
        code = code_ref[tile]
        for axis in range(dimensions):
            out_ref[axis, tile] = gather(code >> axis, dimensions, bits)

    coordinates = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((dimensions, tiles, TILE), jnp.uint32),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="morton_decode",
        cost_estimate=_cost(dimensions, whole),
    )(codes[:whole].reshape(tiles, TILE))
    coordinates = coordinates.reshape(dimensions, whole)
    if whole == n:
        return coordinates
    rest = xla.decode(codes[whole:], dimensions=dimensions, bits=bits)
    return jnp.concatenate([coordinates, rest], axis=1)


def _cost(dimensions: int, n: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=16 * dimensions * n,
        transcendentals=0,
        bytes_accessed=4 * (dimensions + 1) * n,
    )
