"""Packed documents: where each one starts, from the ids of its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def document_starts(segment_ids: ArrayLike, shape: tuple[int, ...]) -> Array:
    """int32[b, t]: the column at which each column's document starts.

    Every run of equal ids is a document.

    Args:
      segment_ids: integers [b, t].
      shape: (b, t), the shape of the tokens.

    Raises:
      ValueError: another shape, or ids that are not integers.
    """
    # Numbers from outside JAX are compared as they are: in int32 two long ids might
    # become one, and two documents with them.
    ids = segment_ids if isinstance(segment_ids, jax.Array) else np.asarray(segment_ids)
    if ids.shape != tuple(shape):
        raise ValueError(f"segment_ids {ids.shape}: expected {tuple(shape)}, as tokens")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids are {ids.dtype}: expected integers")
    first = jnp.asarray(ids[:, 1:] != ids[:, :-1])
    first = jnp.pad(first, [(0, 0), (1, 0)], constant_values=True)
    column = jnp.arange(shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(first, column, 0), axis=1)
