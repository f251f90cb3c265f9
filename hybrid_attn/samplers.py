"""Samplers: (logits float32[v], key) -> token int32[]. Pure, one row at a time."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Sampler = Callable[[Array, Array], Array]


def greedy(logits: Array, key: Array) -> Array:
    """The likeliest token; ties go to the lowest index."""
    del key
    return jnp.argmax(logits).astype(jnp.int32)


# Cached: a sampler is a static argument, and a new function would compile anew.
@functools.cache
def temperature(value: float, top_p: float = 1.0) -> Sampler:
    """Samples from softmax(logits / value), from the nucleus of mass ``top_p``.

    Raises:
      ValueError: value not above 0, or top_p outside (0, 1].
    """
    if value <= 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"temperature={value}, top_p={top_p}: expected above 0 and in (0, 1]"
        )

    def sample(logits: Array, key: Array) -> Array:
        scaled = logits / value
        if top_p < 1:
            order = jnp.argsort(-scaled)
            share = jax.nn.softmax(scaled[order])
            before = jnp.cumsum(share) - share
            kept = jnp.zeros(scaled.shape, bool).at[order].set(before < top_p)
            scaled = jnp.where(kept, scaled, -jnp.inf)
        return jax.random.categorical(key, scaled).astype(jnp.int32)

    return sample
