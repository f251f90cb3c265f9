"""`Span`: which positions one step covers, row by row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Closings(NamedTuple):
    """Where the groups of a fresh span close; its entries in order, then padding.

    Attributes:
      column: int32[b, e], the last column of each entry's group; padding is in bounds.
      real: bool[b, e], False for padding.
    """

    column: Array
    real: Array


@dataclasses.dataclass(frozen=True)
class Span:
    """Column i of a step's input stands at position ``start + i``.

    A position p of a row is new iff ``length <= p < end``. A plain step has start =
    length. `prefill` puts start at a multiple of block_tokens at or below length, so
    that a token always meets the same column, whatever came before it in the call:
    that, and not luck, makes every split bit-identical.

    A row of a fresh span may pack documents. Each of them starts at position 0, so
    its columns and its positions differ, and the entries of the documents before it
    stand before its own.

    Attributes:
      start, length, end, sealed: int32[b].
      width: static number of columns t.
      fresh: static; True in training, where every row starts at 0 with no cache.
      collect: static; True if mixers shall return what they chose.
      document_start: int32[b, t], the column at which each column's document starts;
        None where every row is one document. Fresh spans only.
    """

    start: Array
    length: Array
    end: Array
    sealed: Array
    width: int
    fresh: bool = False
    collect: bool = False
    document_start: Array | None = None

    @property
    def positions(self) -> Array:
        """int32[b, t], each counted from the start of its document."""
        position = self.start[:, None] + jnp.arange(self.width, dtype=jnp.int32)
        first = self.document_start
        return position if first is None else position - first

    @property
    def angle_positions(self) -> Array | np.ndarray:
        """The same for tables: static int32[1, t] in training, which XLA can fold."""
        if self.fresh and self.document_start is None:
            return np.arange(self.width, dtype=np.int32)[None]
        return self.positions

    @classmethod
    def training(
        cls, batch: int, width: int, document_start: Array | None = None
    ) -> "Span":
        zero = jnp.zeros((batch,), jnp.int32)
        end = zero + width
        return cls(
            zero, zero, end, zero, width, fresh=True, document_start=document_start
        )

    def reaches(self, distance: int) -> Array:
        """bool[b, t]: the token ``distance`` before is of the column's own document."""
        return self.positions >= distance

    def visible(self, ratio: int, lag: int = 0) -> Array:
        """int32[b, t]: the query of each column may read entries below this.

        Entry j closes at position ratio·j + ratio - 1 and is visible from there on, or
        ``lag`` positions later.
        Columns that are not new see nothing. In packed rows what may be read begins
        at `visible_from`.
        """
        position = self.positions
        new = (position >= self.length[:, None]) & (position < self.end[:, None])
        count = jnp.where(new, jnp.maximum(position + 1 - lag, 0) // ratio, 0)
        first = self.visible_from(ratio)
        return count if first is None else first + count

    def visible_from(self, ratio: int) -> Array | None:
        """int32[b, t]: the first entry that each column may read; None if 0 for all.

        It is the number of entries of the documents before the column's own.
        """
        if self.document_start is None:
            return None
        position = self.positions
        return _closed_so_far(position, ratio) - (position + 1) // ratio

    def closings(self, ratio: int) -> Closings:
        """Where the groups of a fresh span close, in t // ratio slots of each row."""
        position, slots = self.positions, self.width // ratio
        so_far = _closed_so_far(position, ratio)
        slot = jnp.where((position + 1) % ratio == 0, so_far - 1, slots)
        row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
        column = jnp.full((position.shape[0], slots), ratio - 1, jnp.int32)
        column = column.at[row, slot].set(
            jnp.arange(self.width, dtype=jnp.int32), mode="drop"
        )
        real = jnp.arange(slots, dtype=jnp.int32) < so_far[:, -1:]
        return Closings(column, real)

    def closed(self, ratio: int) -> Array:
        """int32[b]: entries closed once the step is done."""
        return self.end // ratio


def _closed_so_far(position: Array, ratio: int) -> Array:
    closes = (position + 1) % ratio == 0
    return jnp.cumsum(closes, axis=1, dtype=jnp.int32)


jax.tree_util.register_dataclass(
    Span,
    data_fields=["start", "length", "end", "sealed", "document_start"],
    meta_fields=["width", "fresh", "collect"],
)
