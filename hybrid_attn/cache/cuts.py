"""Cuts: the recent states as they stood at each row's last boundary.

Rings forget: a few tokens after a boundary the rows that continuing from it needs are
gone. A cut keeps them, by position and not by slot, so that what is stored or restored
at a boundary does not depend on the size of a ring.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hybrid_attn.cache.states import LayerCache

# Arrays of a layer by "state.field"; each is [b, reach, ...], oldest position first.
Cut = dict[str, Array]


def reach(ring_size: int, undo: int) -> int:
    """How many rows before a position continuing from it can read."""
    return ring_size - undo


def recent_fields(layer: LayerCache) -> dict[str, Array]:
    """The rings of a layer [b, r, ...] by "state.field", in a fixed order."""
    return {
        f"{name}.{field}": array
        for name, state in sorted(layer.states.items())
        for field, array in vars(state).items()
        if array is not None and field not in state.growing
    }


def empty_cuts(layers: tuple[LayerCache, ...], undo: int) -> tuple[Cut, ...]:
    """Cuts at position 0, where nothing was yet."""
    return tuple(
        {
            name: jnp.zeros(
                (ring.shape[0], reach(ring.shape[1], undo), *ring.shape[2:]), ring.dtype
            )
            for name, ring in recent_fields(layer).items()
            if reach(ring.shape[1], undo) > 0
        }
        for layer in layers
    )


def take_cuts(layers: tuple[LayerCache, ...], cut: Array, undo: int) -> tuple[Cut, ...]:
    """The rows before position ``cut`` int32[b], which the rings must still hold.

    Rows before position 0 are zero.
    """
    return tuple(
        {
            name: _rows_before(ring, cut, reach(ring.shape[1], undo))
            for name, ring in recent_fields(layer).items()
            if reach(ring.shape[1], undo) > 0
        }
        for layer in layers
    )


def _rows_before(ring: Array, cut: Array, count: int) -> Array:
    position = cut[:, None] - count + jnp.arange(count, dtype=jnp.int32)
    position = position.reshape(position.shape + (1,) * (ring.ndim - 2))
    rows = jnp.take_along_axis(
        ring, position % ring.shape[1], axis=1, mode="promise_in_bounds"
    )
    return jnp.where(position >= 0, rows, jnp.zeros((), ring.dtype))


def advance_cuts(
    layers: tuple[LayerCache, ...],
    cuts: tuple[Cut, ...],
    cut: Array,
    length: Array,
    end: Array,
    *,
    block_tokens: int,
    undo: int,
) -> tuple[tuple[Cut, ...], Array]:
    """Moves each row's cut to the last boundary that it crosses, if any.

    Args:
      layers: the states after the step from ``length`` to ``end``, int32[b].
      cuts, cut: as they stand.

    Returns:
      (cuts, their positions int32[b]). A boundary more than ``undo`` positions before
      ``end`` is passed over, its rows being gone: `prefill` ends its blocks at every
      boundary, single tokens meet each, and other steps should be short.
    """
    last = end // block_tokens * block_tokens
    crosses = (last > length) & (end - last <= undo)

    def moved(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
        new = take_cuts(layers, last, undo)
        return jax.tree.map(
            lambda old, rows: jnp.where(
                crosses.reshape(-1, *(1,) * (old.ndim - 1)), rows, old
            ),
            cuts,
            new,
        )

    cuts = jax.lax.cond(jnp.any(crosses), moved, lambda cuts: cuts, cuts)
    return cuts, jnp.where(crosses, last, cut)
