"""Takes, repeats or reorders rows of a batch. EXACT."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache


def select_rows(cache: Cache, rows: ArrayLike) -> Cache:
    """A cache of the rows int[n] of this one, in that order; a row may repeat.

    Raises:
      ValueError: rows is not one-dimensional, is empty, or names a row that is not
        there.
    """
    index = np.asarray(rows)
    if index.ndim != 1 or not index.size or not np.issubdtype(index.dtype, np.integer):
        raise ValueError(f"rows {rows!r}: expected a list of row numbers")
    if index.min() < 0 or index.max() >= cache.batch:
        raise ValueError(f"rows {index.tolist()}: expected 0..{cache.batch - 1}")
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0), cache)
