"""`Span`: which positions one step covers, row by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Span:
    """Column i of a step's input stands at position ``start + i``.

    A position p of a row is new iff ``length <= p < end``. A plain step has start =
    length. `prefill` puts start at a multiple of block_tokens at or below length, so
    that a token always meets the same column, whatever came before it in the call:
    that, and not luck, makes every split bit-identical.

    Attributes:
      start, length, end, sealed: int32[b].
      width: static number of columns t.
      fresh: static; True in training, where every row starts at 0 with no cache.
      collect: static; True if mixers shall return what they chose.
    """

    start: Array
    length: Array
    end: Array
    sealed: Array
    width: int
    fresh: bool = False
    collect: bool = False

    @property
    def positions(self) -> Array:
        """int32[b, t]."""
        return self.start[:, None] + jnp.arange(self.width, dtype=jnp.int32)

    @property
    def angle_positions(self) -> Array | np.ndarray:
        """The same for tables: static int32[1, t] in training, which XLA can fold."""
        if self.fresh:
            return np.arange(self.width, dtype=np.int32)[None]
        return self.positions

    @classmethod
    def training(cls, batch: int, width: int) -> "Span":
        zero = jnp.zeros((batch,), jnp.int32)
        return cls(zero, zero, zero + width, zero, width, fresh=True)

    def visible(self, ratio: int) -> Array:
        """int32[b, t]: how many entries the query of each column may read.

        Entry j closes at position ratio·j + ratio - 1 and is visible from there on.
        Columns that are not new see nothing.
        """
        position = self.positions
        new = (position >= self.length[:, None]) & (position < self.end[:, None])
        return jnp.where(new, (position + 1) // ratio, 0)

    def closed(self, ratio: int) -> Array:
        """int32[b]: entries closed once the step is done."""
        return self.end // ratio


jax.tree_util.register_dataclass(
    Span,
    data_fields=["start", "length", "end", "sealed"],
    meta_fields=["width", "fresh", "collect"],
)
