"""Lightning-indexer scores and streaming top-k in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.array_typing import Visible, typed

BLOCK = 1024
DECODE_BLOCK = 4096


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
    products = jax.nn.relu(products).reshape(b, t, heads, -1)
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
    """
    size = key.shape[2]
    k = min(k, size)
    # Long steps skip what no query sees yet; a single query is done sooner in one go.
    block = DECODE_BLOCK if query.shape[1] == 1 else BLOCK

    def masked(keys: Array, first, least) -> tuple[Array, Array]:
        entry = first + jnp.arange(keys.shape[2], dtype=jnp.int32)
        scores = indexer_scores(query, weight, keys)
        # top_k would rank -0.0 below +0.0 (and XLA drops an addition of 0.0).
        scores = jnp.where(scores == 0, 0.0, scores)
        mask = (entry >= least) & (entry < visible[..., None])
        return jnp.where(mask, scores, -jnp.inf), entry

    if size <= block:
        scores, _ = masked(key, 0, 0)
        best, index = jax.lax.top_k(scores, k)
        return jnp.where(best > -jnp.inf, index, -1).astype(jnp.int32), best

    def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        index, best = carry
        first = jnp.minimum(i * block, size - block)
        keys = jax.lax.dynamic_slice_in_dim(key, first, block, axis=2)
        scores, entry = masked(keys, first, i * block)
        # What is kept so far stands first: of equal scores the lowest index wins.
        scores = jnp.concatenate([best, scores], axis=-1)
        entry = jnp.broadcast_to(entry, (*scores.shape[:-1], block))
        best, at = jax.lax.top_k(scores, k)
        index = jnp.take_along_axis(
            jnp.concatenate([index, entry], axis=-1), at, axis=-1
        )
        return jnp.where(best > -jnp.inf, index, -1), best

    shape = (*visible.shape, k)
    empty = (jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))
    used = jnp.minimum(-(-size // block), -(-jnp.max(visible) // block))
    return jax.lax.fori_loop(0, used, body, empty)
