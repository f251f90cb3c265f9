"""Lightning-indexer scores and streaming top-k in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.array_typing import Visible, typed

# Entries scored at a time: their products stay in the cache.
BLOCK = 1024
DECODE_BLOCK = 4096
# Scores collected before the best are kept: every selection has a cost of its own.
_COLLECTED = 2**22
# One query of few numbers is bound by reading the keys, which one product does best.
_NARROW = 256
# Products at a time: fewer entries than a block where queries are many.
_PRODUCTS = 2**24
_LEAST = 128


@typed
def indexer_scores(
    query: Float[Array, "b t i c"],
    weight: Float[Array, "b t i"],
    key: Float[Array, "b c e"],
) -> Float[Array, "b t e"]:
    """float32[b, t, e]: Σ_i weight_i · relu(query_i · key).

    Args:
      query: [b, t, i, c]; weight: [b, t, i], scale included; key: [b, c, e].
    """
    b, t, heads, dim = query.shape
    flat = query.astype(jnp.float32).reshape(b, t * heads, dim)
    products = jnp.einsum("bxc,bce->bxe", flat, key.astype(jnp.float32))
    products = jax.nn.relu(products).reshape(b, t, heads, key.shape[2])
    return jnp.einsum("bti,btie->bte", weight.astype(jnp.float32), products)


@typed
def indexer_topk(
    query: Float[Array, "b t i c"],
    weight: Float[Array, "b t i"],
    key: Float[Array, "b c e"],
    visible: Visible,
    *,
    k: int,
) -> tuple[Array, Array]:
    """The k best visible entries of each query; ties go to the lowest index.

    Args:
      query: [b, t, i, c]; weight: [b, t, i]; key: [b, c, e]; visible: int32[b, t].

    Returns:
      (index int32[b, t, min(k, e)], -1 where fewer are visible; scores float32 of
      the same shape, -inf there).

    Beside the keys it holds the products of one block of entries and the scores of
    some blocks, whatever the number of entries.
    """
    b, t, heads, channels = query.shape
    size = key.shape[2]
    k = min(k, size)
    block = DECODE_BLOCK
    if t > 1:
        block = min(BLOCK, max(_LEAST, _PRODUCTS // max(1, b * t * heads)))
    if size <= block or b * t == 0:
        return _best(masked_scores(query, weight, key, visible, 0, 0), k)
    if t == 1 and heads * channels <= _NARROW and b * heads * size <= _PRODUCTS:
        return _by_prefix(query, weight, key, visible, k, block)
    return _by_blocks(query, weight, key, visible, k, block)


def masked_scores(query, weight, keys, visible, first, least) -> Array:
    """Scores of the entries from ``first``; -inf below ``least`` or not visible."""
    entry = first + jnp.arange(keys.shape[2], dtype=jnp.int32)
    scores = indexer_scores(query, weight, keys)
    # top_k would rank -0.0 below +0.0 (and XLA drops an addition of 0.0).
    scores = jnp.where(scores == 0, 0.0, scores)
    mask = (entry >= least) & (entry < visible[..., None])
    return jnp.where(mask, scores, -jnp.inf)


def _best(scores: Array, k: int) -> tuple[Array, Array]:
    best, index = jax.lax.top_k(scores, k)
    return jnp.where(best > -jnp.inf, index, -1).astype(jnp.int32), best


def _by_prefix(query, weight, key, visible, k: int, block: int) -> tuple[Array, Array]:
    """In one go, over the shortest of a few prefixes that holds what is visible."""
    sizes = [key.shape[2]]
    while sizes[0] > 4 * max(k, block):
        sizes.insert(0, -(-sizes[0] // 4))

    def choose(size: int):
        def run(query, weight, key, visible):
            keys = key[:, :, :size]
            return _best(masked_scores(query, weight, keys, visible, 0, 0), k)

        return run

    most = jnp.max(visible)
    at = sum((most > size).astype(jnp.int32) for size in sizes[:-1])
    branches = [choose(size) for size in sizes]
    return jax.lax.switch(at, branches, query, weight, key, visible)


def _by_blocks(query, weight, key, visible, k: int, block: int) -> tuple[Array, Array]:
    """Block by block; the best so far meet the scores of some blocks at a time."""
    size, rows = key.shape[2], visible.size
    blocks = -(-size // block)
    group = min(blocks, max(1, _COLLECTED // (rows * block)))
    # Blocks that no query sees are skipped.
    used = jnp.minimum(blocks, -(-jnp.max(visible) // block))

    def first_of(i):
        # The last block ends with the entries and repeats some of the one before.
        return jnp.minimum(i * block, size - block)

    def collect(start, stop) -> Array:
        def body(i: Array, scores: Array) -> Array:
            keys = jax.lax.dynamic_slice_in_dim(key, first_of(i), block, axis=2)
            part = masked_scores(query, weight, keys, visible, first_of(i), i * block)
            at = (i - start) * block
            return jax.lax.dynamic_update_slice_in_dim(scores, part, at, axis=2)

        shape = (*visible.shape, group * block)
        empty = jnp.full(shape, -jnp.inf, jnp.float32)
        return jax.lax.fori_loop(start, stop, body, empty)

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        index, best = carry
        start = i * group
        scores = collect(start, jnp.minimum(start + group, used))
        # What is kept so far stands first: of equal scores the lowest index wins.
        best, at = jax.lax.top_k(jnp.concatenate([best, scores], axis=-1), k)
        kept = jnp.take_along_axis(index, jnp.minimum(at, k - 1), axis=-1)
        at = at - k
        new = first_of(start + at // block) + at % block
        index = jnp.where(at < 0, kept, new)
        return jnp.where(best > -jnp.inf, index, -1), best

    shape = (*visible.shape, k)
    empty = (jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    return jax.lax.fori_loop(0, -(-used // group), body, empty)
