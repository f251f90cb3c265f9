"""Attention over chosen entries in XLA: by gather, or by mask over few entries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8

from pallas_kernels.array_typing import Entries, Mass, Queries, typed
from pallas_kernels.kv_quant.xla import unpack
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

    def gather(index: Array) -> tuple[Array, Array]:
        def rows(x: Array) -> Array:
            return _take(x, index).astype(jnp.float32)

        keys = rows(key)
        return keys, keys if value is key else rows(value)

    q = group_heads(query, key.shape[2], scale)
    return _attend(q, gather, key.shape[1], chosen, mass_block)


@typed
def sparse_attention_packed(
    query: Queries,
    records: UInt8[Array, "b e r"],
    chosen: Int[Array, "b t c"],
    *,
    format: str,
    rotary: int,
    scale: float,
    mass_block: int | None = None,
) -> Partial | tuple[Partial, Mass]:
    """The same over packed records, both key and value; only the chosen are unpacked.

    Args:
      query: [b, t, n, h]; records: uint8[b, e, r] of h channels.
      format, rotary: of the records, see `kv_quant`.
    """

    def gather(index: Array) -> tuple[Array, Array]:
        rows = _take(records, index)
        rows = unpack(
            rows.reshape(-1, records.shape[2]),
            format=format,
            channels=query.shape[3],
            rotary=rotary,
        ).reshape(*rows.shape[:2], 1, query.shape[3])
        return rows, rows

    q = group_heads(query, 1, scale)
    return _attend(q, gather, records.shape[1], chosen, mass_block)


def _take(x: Array, index: Array) -> Array:
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _attend(
    q: Array,
    gather: Callable[[Array], tuple[Array, Array]],
    entries: int,
    chosen: Array,
    mass_block: int | None,
) -> Partial | tuple[Partial, Array]:
    """Softmax sums over the keys and values [b, t·c, k, h] of entries [b, t·c]."""
    valid = chosen >= 0
    b, t, c = chosen.shape
    if entries * c == 0:
        if mass_block is None:
            return nothing(q)
        return nothing(q), jnp.zeros((b, t, -(-entries // mass_block)), jnp.float32)
    index = jnp.maximum(chosen, 0).reshape(b, t * c)

    def place(x: Array) -> Array:
        x = x.reshape(b, t, c, *x.shape[2:])
        # Gathered and masked once: fused into both products it is done for each.
        return jax.lax.optimization_barrier(jnp.where(valid[..., None, None], x, 0))

    keys, values = gather(index)
    shared = values is keys
    keys = place(keys)
    values = keys if shared else place(values)
    # Keys first: a product that takes them second transposes them, here the few logits.
    logits = jnp.einsum("btskh,bktgh->btskg", keys, q).transpose(0, 3, 1, 4, 2)
    weights, total, maximum = partial_softmax(logits, valid[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,btskh->bktgh", weights, values)
    partial = Partial(weighted, total, maximum)
    if mass_block is None:
        return partial
    # A product: cheaper than to divide every weight before the mean over the heads.
    factor = 1 / (jnp.where(total > 0, total, 1.0) * (q.shape[1] * q.shape[3]))
    share = jnp.einsum("bktg,bktgs->bts", factor, weights)
    return partial, mass_of(share, chosen, entries, mass_block)


def mass_of(share: Array, chosen: Array, entries: int, mass_block: int) -> Array:
    """float32[b, t, blocks] of the shares [b, t, c] of chosen entries, 0 for -1."""
    b, t, _ = chosen.shape
    blocks = -(-entries // mass_block)
    first = blocks * jnp.arange(b * t, dtype=jnp.int32).reshape(b, t, 1)
    # As the share of -1 is zero, it does not matter which block it goes to.
    index = first + jnp.maximum(chosen, 0) // mass_block
    mass = jnp.zeros((b * t * blocks,), jnp.float32)
    mass = mass.at[index.reshape(-1)].add(share.reshape(-1), mode="promise_in_bounds")
    return mass.reshape(b, t, blocks)


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
