"""Gated pooling of groups of tokens into entries, streaming and whole.

Used for main entries and, with one head of its own width, for index keys. The softmax
of the pooling runs per channel over the slots of a group (of two groups, with
overlap: the first half of the features feeds the next entry, the second half the
entry of the token's own group). Order: pool, normalise, rotate, round.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hybrid_attn.cache.rings import (
    any_closes,
    entry_write,
    group_rows,
    ring_write,
    span_rows,
)
from hybrid_attn.cache.span import Span
from hybrid_attn.cache.spec import CacheSpec
from hybrid_attn.config import LayerSpec, ModelConfig
from hybrid_attn.layers.linear import Linear
from pallas_kernels.pool.api import overlapping_pool, pool

# A group scored far below every real one: it gets weight zero, and no inf - inf.
_NO_SCORE = -1e30
_LONG_GROUP = 32


def empty_frontier(
    layer: LayerSpec, spec: CacheSpec, batch: int, features: int
) -> dict[str, Array]:
    """``content`` and ``score`` [b, r, c] of a compressor that has seen nothing.

    r is the open group, the overlap group and the undo span, in tokens; c is
    ``features``, twice that with overlap.
    """
    halves = 2 if layer.overlap else 1
    shape = (batch, halves * layer.ratio - 1 + spec.undo, halves * features)
    dtype = spec.dtypes.frontier
    return {"content": jnp.zeros(shape, dtype), "score": jnp.zeros(shape, dtype)}


class Compressor(nnx.Module):
    """Pools ``ratio`` tokens into one row of ``features`` channels."""

    def __init__(
        self,
        config: ModelConfig,
        features: int,
        ratio: int,
        overlap: bool,
        *,
        rngs: nnx.Rngs,
        slot_bias: float = 0.0,
        heads: int = 1,
    ):
        self.ratio, self.overlap, self.features = ratio, overlap, features
        width = features * (2 if overlap else 1)
        # Content and gate share one product.
        self.project = Linear(
            config.hidden_size, 2 * width, rngs=rngs, dtype=config.compute_dtype
        )
        self.slot_score = nnx.Param(
            _slot_scores(ratio, features, overlap, slot_bias, heads)
        )

    @property
    def width(self) -> int:
        """Channels of one raw row."""
        return self.features * (2 if self.overlap else 1)

    def __call__(
        self, x: Array, ring: tuple[Array, Array] | None, span: Span
    ) -> tuple[Array, Array, tuple[Array, Array] | None]:
        """Pools the groups that the span touches.

        Args:
          x: float[b, t, d].
          ring: frontier (content, score) [b, r, width], None in training.

        Returns:
          (pooled float32[b, g, features], first group int32[b], new ring). Groups
          that do not close in this step hold meaningless finite numbers.
        """
        both = self.project(x).astype(jnp.float32)
        content, score = both[..., : self.width], both[..., self.width :]
        slot = span.positions % self.ratio
        score = score + self.slot_score[...][slot]
        lead = self.ratio if self.overlap else 0
        if span.document_start is not None:
            return self._packed(content, score, span), jnp.zeros_like(span.start), None
        if ring is None:
            groups = span.width // self.ratio
            first = jnp.zeros_like(span.start)
            origin = -lead
        else:
            groups = (span.width + self.ratio - 1) // self.ratio
            first = span.start // self.ratio
            origin = first * self.ratio - lead
            content, score = (
                rows.astype(old.dtype).astype(jnp.float32)
                for rows, old in zip((content, score), ring, strict=True)
            )
        count = groups * self.ratio + lead

        def pooled() -> Array:
            old_content, old_score = (None, None) if ring is None else ring
            rows = span_rows(old_content, content, span, origin, count)
            scores = span_rows(old_score, score, span, origin, count)
            if self.overlap:
                none = _precedes(origin, count)
                scores = jnp.where(none[..., None], _NO_SCORE, scores)
            return self._pool(rows, scores)

        if ring is None:
            return pooled(), first, None
        new_ring = (
            ring_write(ring[0], content, span),
            ring_write(ring[1], score, span),
        )
        if span.width > self.ratio or self.ratio < _LONG_GROUP:
            return pooled(), first, new_ring
        # A short step seldom closes a long group, and pooling one costs more than the
        # rest of a decoded token's work on it.
        empty = jnp.zeros((x.shape[0], groups, self.features), jnp.float32)
        out = jax.lax.cond(any_closes(span, self.ratio), pooled, lambda: empty)
        return out, first, new_ring

    def _packed(self, content: Array, score: Array, span: Span) -> Array:
        """The same where groups start at each document's start: by gather."""
        last, real = span.closings(self.ratio)
        lead = self.ratio if self.overlap else 0

        def assembled(x: Array) -> Array:
            return jnp.pad(group_rows(x, last, self.ratio), [(0, 0), (lead, 0), (0, 0)])

        scores = assembled(score)
        if self.overlap:
            # By the first half of its channels, the s-th group of rows feeds entry s:
            # with nothing where that is the first of a document.
            begins = jnp.take_along_axis(span.positions, last, axis=1) < self.ratio
            none = jnp.pad(jnp.repeat(begins, self.ratio, axis=1), [(0, 0), (0, lead)])
            half = jnp.arange(self.width) < self.features
            scores = jnp.where(none[..., None] & half, _NO_SCORE, scores)
        pooled = self._pool(assembled(content), scores)
        return jnp.where(real[..., None], pooled, 0)

    def _pool(self, rows: Array, scores: Array) -> Array:
        b, count, width = rows.shape
        # The sizes are spelled out: -1 has no answer where there are no groups yet.
        shape = (b, count // self.ratio, self.ratio, width)
        combine = overlapping_pool if self.overlap else pool
        return combine(rows.reshape(shape), scores.reshape(shape))

    def append(
        self, entries: Array, new: Array, first: Array, span: Span, *, axis: int = 1
    ) -> Array:
        """Writes the groups that close into ``entries``, which lie along ``axis``."""
        return entry_write(entries, new, first, span, self.ratio, axis)

    def positions(self, first: Array, groups: int, span: Span) -> Array | np.ndarray:
        """int32[b, g]: an entry stands at the first position of its own group."""
        if span.document_start is not None:
            last, real = span.closings(self.ratio)
            own = jnp.take_along_axis(span.positions, last, axis=1)
            return jnp.where(real, own - (self.ratio - 1), 0)
        if span.fresh:
            return np.arange(groups, dtype=np.int32)[None] * self.ratio
        return (first[:, None] + jnp.arange(groups, dtype=jnp.int32)) * self.ratio


def _precedes(origin, count: int) -> Array:
    position = jnp.arange(count, dtype=jnp.int32)[None] + jnp.reshape(origin, (-1, 1))
    return position < 0


def _slot_scores(
    ratio: int, features: int, overlap: bool, bias: float, heads: int
) -> Array:
    """float32[ratio, width], the learned position bias of the pooling.

    With ``bias`` 0 pooling starts as a mean. Otherwise the channels of each head (of
    each ratio-th part of the channels where there are fewer heads than slots) prefer
    one slot by ``bias`` nats, so that it starts as a choice.
    """
    if heads >= min(ratio, 2):
        part = jnp.arange(features) // (features // heads)
    else:
        part = jnp.arange(features) * ratio // features
    prefer = (part % ratio)[None, :] == jnp.arange(ratio)[:, None]
    own = bias * prefer.astype(jnp.float32)
    return jnp.concatenate([jnp.zeros_like(own), own], axis=1) if overlap else own
