"""Attention over chosen entries in XLA: by gather, or by mask over few entries."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.array_typing import Entries, Mass, Queries, typed
from pallas_kernels.softmax import Partial, group_heads, nothing, partial_softmax


@typed
def sparse_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: int | None = None,
) -> Partial | tuple[Partial, Mass]:
    """Softmax sums over the entries that each query chose.

    Args:
      query: [b, t, n, h]; key, value: [b, e, k, h].
      chosen: int32[b, t, c], entry indices, -1 = none.
      mass_block: also return the mass of each block of so many entries; see ``api``.
    """
    q = group_heads(query, key.shape[2], scale)
    valid = chosen >= 0
    b, t, c = chosen.shape
    mass = None
    if mass_block is not None:
        mass = jnp.zeros((b, t, -(-key.shape[1] // mass_block)), jnp.float32)
    if key.shape[1] * c == 0:
        return nothing(q) if mass is None else (nothing(q), mass)
    index = jnp.maximum(chosen, 0).reshape(b, t * c)

    def gather(x: Array) -> Array:
        x = jnp.take_along_axis(
            x, index[:, :, None, None], axis=1, mode="promise_in_bounds"
        )
        x = x.reshape(b, t, c, *x.shape[2:])
        return jnp.where(valid[..., None, None], x, 0).astype(jnp.float32)

    keys = gather(key)
    values = keys if value is key else gather(value)
    logits = jnp.einsum("bktgh,btskh->bktgs", q, keys)
    weights, total, maximum = partial_softmax(logits, valid[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,btskh->bktgh", weights, values)
    partial = Partial(weighted, total, maximum)
    if mass_block is None or mass is None:
        return partial
    share = jnp.mean(weights / jnp.where(total > 0, total, 1.0)[..., None], axis=(1, 3))
    # Weights of -1 are zero, so that it does not matter which block they go to.
    index = index.reshape(b, t, c) // mass_block
    row, column = jnp.ogrid[:b, :t]
    return partial, mass.at[row[..., None], column[..., None], index].add(
        share, mode="promise_in_bounds"
    )


@typed
def masked_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    mask: Bool[Array, "b t e"],
    *,
    scale: float,
) -> tuple[Partial, Array]:
    """The same over a mask bool[b, t, e]; also the weights float32[b, t, e].

    The weights are normalised over the entries of the mask and averaged over heads:
    what an indexer learns to predict. Costs t·e, so for training lengths only.
    """
    q = group_heads(query, key.shape[2], scale)
    logits = jnp.einsum("bktgh,bskh->bktgs", q, key.astype(jnp.float32))
    weights, total, maximum = partial_softmax(logits, mask[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, value.astype(jnp.float32))
    share = weights / jnp.where(total > 0, total, 1.0)[..., None]
    return Partial(weighted, total, maximum), jnp.mean(share, axis=(1, 3))
