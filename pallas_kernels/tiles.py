"""Kernels work on whole tiles of rows; XLA does the rows that fill none."""

from collections.abc import Callable
from typing import Any

import jax


def by_tiles(
    kernel: Callable[..., Any],
    rest: Callable[..., Any],
    tile: int,
    *arrays: jax.Array,
) -> Any:
    """kernel(*arrays) with the rows of the last, partial tile from ``rest``.

    Args:
      kernel: takes all rows and need not write those of the partial tile.
      rest: the same operation for any number of rows, row by row.
      tile: rows.
      *arrays: [n, ...] each.

    The rest is written in place: neither padding nor a copy of the other rows.
    """
    rows = arrays[0].shape[0]
    whole = rows // tile * tile
    if whole == 0:
        return rest(*arrays)
    out = kernel(*arrays)
    if whole == rows:
        return out
    tail = rest(*(array[whole:] for array in arrays))
    return jax.tree.map(lambda a, b: a.at[whole:].set(b), out, tail)
