"""Copies a cache, so that one can be donated without consuming the other. EXACT."""

import jax
import jax.numpy as jnp

from hybrid_attn.cache.states import Cache


def fork(cache: Cache) -> Cache:
    """A copy that shares no buffer with the donor, whose bytes stay as they are."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), cache)
