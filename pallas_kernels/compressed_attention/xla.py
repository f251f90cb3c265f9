"""Attention over all visible entries in XLA, in blocks up to the longest row."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.array_typing import Entries, Queries, Visible, typed
from pallas_kernels.softmax import (
    MASKED,
    Partial,
    group_heads,
    merge,
    partial_softmax,
)

# Entries read at a time: large enough for the matrix product, small enough that a
# block of logits stays in cache.
BLOCK = 512


@typed
def compressed_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    visible: Visible,
    *,
    scale: float,
    static: bool,
    visible_from: Visible | None = None,
) -> Partial:
    """Softmax sums over entries visible_from..visible-1 of each query.

    Args:
      query: [b, t, n, h]; key, value: [b, e, k, h]; visible: int32[b, t].
      static: read every block (differentiable) instead of the blocks in use.
      visible_from: int32[b, t], the first entry that each query may read (of its
        packed document); None for 0.

    Entries beyond the last that any query of a row sees never enter a product,
    whatever they hold.
    """
    q = group_heads(query, key.shape[2], scale)
    size = key.shape[1]
    if size <= BLOCK:
        return _attend(q, key, value, visible, visible_from, 0, 0)
    blocks = -(-size // BLOCK)

    def body(index: Array, partial: Partial) -> Partial:
        # The last block starts early enough to be whole; what it re-reads is masked.
        first = jnp.minimum(index * BLOCK, size - BLOCK)
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=BLOCK, axis=1
        )
        k_block = cut(key)
        v_block = k_block if value is key else cut(value)
        part = _attend(q, k_block, v_block, visible, visible_from, first, index * BLOCK)
        return merge(partial, part)

    empty = Partial(
        jnp.zeros(q.shape, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.full(q.shape[:-1], MASKED, jnp.float32),
    )
    if static:
        step = jax.checkpoint(lambda carry, index: (body(index, carry), None))
        return jax.lax.scan(step, empty, jnp.arange(blocks, dtype=jnp.int32))[0]
    used = jnp.minimum(blocks, -(-jnp.max(visible) // BLOCK))
    return jax.lax.fori_loop(0, used, body, empty)


def _attend(q, key, value, visible, visible_from, first, least) -> Partial:
    entry = first + jnp.arange(key.shape[1], dtype=jnp.int32)
    shared = value is key
    # 0 x NaN is NaN: entries that no query sees are replaced, not only masked.
    seen = (entry < jnp.max(visible, axis=1)[:, None])[:, :, None, None]
    key = jnp.where(seen, key, 0).astype(jnp.float32)
    value = key if shared else jnp.where(seen, value, 0).astype(jnp.float32)
    mask = (entry >= least) & (entry < visible[..., None])
    if visible_from is not None:
        mask = mask & (entry >= visible_from[..., None])
    logits = jnp.einsum("bktgh,bskh->bktgs", q, key)
    weights, total, maximum = partial_softmax(logits, mask[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, value)
    return Partial(weighted, total, maximum)
