"""Tiles of 64 rows in the registers of a warpgroup, laid out as by matrix products.

Four lanes share a row, so that its numbers are reduced without shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64


def load(ref: Any) -> Array:
    """A tile of device memory, [64, columns]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def load_rows(ref: Any) -> Array:
    """A number per row of device memory, [64]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def load_columns(ref: Any) -> Array:
    """A number per column of device memory, [columns]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def over_columns(x: Array, columns: int) -> Array:
    """A number per row, [64], at every column: [64, columns]."""
    return jax.lax.broadcast_in_dim(x, (ROWS, columns), (0,))


def over_rows(x: Array) -> Array:
    """A number per column, [columns], at every row: [64, columns]."""
    return jax.lax.broadcast_in_dim(x, (ROWS, x.shape[0]), (1,))


def columns(size: int) -> Array:
    """int32[64, size], the index of the column."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, size), 1, layout=plgpu.Layout.WGMMA)
