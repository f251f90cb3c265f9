"""Clears the fault bits of rows. EXACT."""

import jax.numpy as jnp
from jax import Array

from hybrid_attn.cache.states import Cache


def clear_faults(cache: Cache, rows: Array | None = None) -> Cache:
    """Clears ``faults`` of all rows, or of those where bool[b] ``rows`` is True.

    Raises:
      ValueError: rows has another shape than (batch,).
    """
    if rows is None:
        return cache.replace(faults=jnp.zeros_like(cache.faults))
    mask = jnp.asarray(rows, bool)
    if mask.shape != (cache.batch,):
        raise ValueError(f"rows {mask.shape}: expected ({cache.batch},)")
    return cache.replace(faults=jnp.where(mask, jnp.uint8(0), cache.faults))
