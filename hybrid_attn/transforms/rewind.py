"""Takes tokens back by lowering the length; touches no array of a state. EXACT."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache, Fault


def rewind(cache: Cache, length: ArrayLike) -> Cache:
    """Sets each row back to ``length`` tokens (int, or int32[b] row by row).

    What is kept are the states as they stand: rings hold `undo` positions more than a
    step reads, and counts say what is valid.

    Raises:
      ValueError: a target above the row's length or below its ``floor``; names the
        distance that is available. Inside jit the row is left as it is and its
        rewind bit in ``faults`` is set.
    """
    target = jnp.broadcast_to(jnp.asarray(length, jnp.int32), cache.length.shape)
    outside = (target > cache.length) | (target < cache.floor)
    leaves = (target, cache.length, cache.floor)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        bad = np.flatnonzero(np.asarray(outside))
        if bad.size:
            row = int(bad[0])
            held, floor = int(cache.length[row]), int(cache.floor[row])
            raise ValueError(
                f"rewind of row {row} to {int(target[row])}: it holds {held} tokens "
                f"and can go back by {held - floor} at most, to {floor}"
            )
        return _to(cache, target)
    bit = jnp.where(outside, jnp.uint8(Fault.REWIND), jnp.uint8(0))
    target = jnp.where(outside, cache.length, target)
    return _to(cache, target).replace(faults=cache.faults | bit)


def _to(cache: Cache, length: Array) -> Cache:
    # What was cut above the target belongs to tokens that are taken back.
    cut = jnp.where(cache.cut > length, 0, cache.cut)
    on_grid = jnp.minimum(cache.on_grid, length)
    return cache.replace(length=length, cut=cut, on_grid=on_grid)
