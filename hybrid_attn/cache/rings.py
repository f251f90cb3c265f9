"""Ragged reads and appends on rings and on growing arrays, in one static shape.

Everything here copies values and never computes on them, so the same position holds
the same bits whichever way it was written.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hybrid_attn.cache.span import Span


def _rows(batch: int) -> Array:
    return jnp.arange(batch, dtype=jnp.int32)[:, None]


def _expand(mask: Array, like: Array) -> Array:
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim))


def _take(array: Array, index: Array) -> Array:
    """array[b, index[b, i], ...]; every index is in bounds by construction."""
    return jnp.take_along_axis(
        array, _expand(index, array), axis=1, mode="promise_in_bounds"
    )


def _in_place(written: Array) -> Array:
    """Keeps XLA from fusing the write into its readers as well.

    It then writes twice, and so copies the whole array first, at every step.
    """
    return jax.lax.optimization_barrier(written)


def ring_positions(ring_size: int, end: Array) -> Array:
    """int32[b, r]: the newest position below ``end`` of each slot (negative: none)."""
    slot = jnp.arange(ring_size, dtype=jnp.int32)
    last = end[:, None] - 1
    return last - (last - slot) % ring_size


def ring_write(ring: Array, rows: Array, span: Span) -> Array:
    """Writes the new columns of ``rows`` [b, t, ...] into ``ring`` [b, r, ...]."""
    size = ring.shape[1]
    rows = rows.astype(ring.dtype)
    if 2 * span.width <= size:
        # Few rows: scatter them (in place where the ring is donated).
        position = span.positions
        new = (position >= span.length[:, None]) & (position < span.end[:, None])
        slot = jnp.where(new, position % size, size)
        written = ring.at[_rows(ring.shape[0]), slot].set(rows, mode="drop")
        return _in_place(written)
    position = ring_positions(size, span.end)
    column = jnp.clip(position - span.start[:, None], 0, span.width - 1)
    fresh = _take(rows, column)
    return jnp.where(_expand(position >= span.length[:, None], ring), fresh, ring)


def span_rows(
    ring: Array | None,
    rows: Array,
    span: Span,
    first: Array | int,
    count: int,
    reach: int | None = None,
) -> Array:
    """Rows at positions first..first+count-1, from the ring or from the new columns.

    Args:
      ring: [b, r, ...], or None in training, where positions below 0 are all that
        precede the columns.
      rows: [b, t, ...] the step's columns.
      first: int32[b]; in training it must be a non-positive constant, given as the
        static int ``-lead``.
      count: static number of rows.
      reach: how many positions before ``length`` may be read; None is the ring size.

    Returns:
      [b, count, ...] in the rows' dtype. Positions below 0 or out of reach are zero,
      so that whatever unused capacity holds never enters a product.
    """
    if ring is None:
        lead = -int(first)
        tail = max(0, count - lead - span.width)
        pad = [(0, 0), (lead, tail)] + [(0, 0)] * (rows.ndim - 2)
        return jnp.pad(rows, pad)[:, :count]
    size = ring.shape[1]
    begin = jnp.asarray(first, jnp.int32)[:, None]
    position = begin + jnp.arange(count, dtype=jnp.int32)
    old = position < span.length[:, None]
    column = jnp.clip(position - span.start[:, None], 0, span.width - 1)
    source = jnp.concatenate([ring.astype(rows.dtype), rows], axis=1)
    index = jnp.where(old, position % size, size + column)
    taken = _take(source, index)
    least = jnp.maximum(0, span.length - (size if reach is None else reach))
    keep = ~old | (position >= least[:, None])
    return jnp.where(_expand(keep, taken), taken, jnp.zeros((), taken.dtype))


def group_rows(rows: Array, last: Array, ratio: int) -> Array:
    """The rows of groups that may stand anywhere, one group after another.

    Args:
      rows: [b, t, ...]; last: int32[b, g], the last column of each group.

    Returns:
      [b, g·ratio, ...].
    """
    column = last[..., None] + jnp.arange(1 - ratio, 1, dtype=jnp.int32)
    return _take(rows, column.reshape(last.shape[0], -1))


def entry_write(
    entries: Array,
    new: Array,
    first_group: Array,
    span: Span,
    ratio: int,
    axis: int = 1,
) -> Array:
    """Scatters the entries that close in this step; sealed ones stay as they are.

    Args:
      entries: [b, e, ...], or [b, c, e] with ``axis`` 2.
      new: [b, g, ...], of groups first_group..first_group+g-1.
      axis: where the entries lie, 1 or 2.
    """
    group = first_group[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)
    closes = (group >= (span.length // ratio)[:, None]) & (
        group < (span.end // ratio)[:, None]
    )
    closes &= group * ratio >= span.sealed[:, None]
    # Out-of-range indices are dropped; `dynamic_update_slice` would clamp them and
    # overwrite valid entries at the end of the capacity.
    index = jnp.where(closes, group, entries.shape[axis])
    rows = _rows(entries.shape[0])
    place = entries.at[rows, index] if axis == 1 else entries.at[rows, :, index]
    written = place.set(new.astype(entries.dtype), mode="drop")
    return _in_place(written)


def any_closes(span: Span, ratio: int) -> Array:
    """bool[]: whether any row closes a group in this step."""
    return jnp.any(span.end // ratio > span.length // ratio)
