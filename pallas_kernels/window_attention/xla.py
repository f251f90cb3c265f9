"""Sliding-window attention in XLA: banded for long steps, whole for short ones."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.array_typing import Keys, Positions, Queries, typed
from pallas_kernels.softmax import LOG2_E, Partial, group_heads, partial_softmax

# Narrower bands save arithmetic but cost more in copies than they save.
_LEAST_BAND = 64
_COPY_FACTOR = 1.25


@typed
def window_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    query_position: Positions,
    key_position: Int[Array, "b s"],
    *,
    window: int,
    scale: float,
    decay: Float[Array, " n"] | None,
    contiguous: bool,
    visible_from: Positions | None = None,
) -> Partial:
    """Softmax sums over the keys at distance 0..window-1 of each query.

    Args:
      query: [b, t, n, h].
      key, value: [b, s, k, h] (the same array for shared key/values).
      query_position: int32[b, t]; key_position: int32[b, s], negative = no key.
      scale: factor on q·k.
      decay: float[n], nats by which a logit falls per token of distance, or None.
      contiguous: key i stands at key_position[:, 0] + i and query j at key j +
        window - 1, which lets long steps read a band instead of all keys.
      visible_from: int32[b, t], the least key position that each query may read
        (where its packed document starts), from 0; None for 0.

    Memory is linear in t when contiguous.
    """
    t, s, k = query.shape[1], key.shape[1], key.shape[2]
    q = group_heads(query, k, scale)
    # Whole bands: block · blocks = t for the usual powers of two.
    block = max(-(-(window - 1) // _LEAST_BAND), 1) * _LEAST_BAND
    banded_cost = -(-t // block) * 2 * block * block
    if not contiguous or banded_cost * _COPY_FACTOR >= t * s:
        return _attend(
            q, key, value, query_position, key_position, window, decay, visible_from
        )
    blocks = -(-t // block)
    # Queries i·block.. see keys from i·block of an array led by block - (window - 1)
    # dead keys: the own block and the one before it.
    lead = block - (window - 1)
    tail = (blocks + 1) * block - lead - s

    def band(x: Array, fill: int = 0) -> Array:
        pad = [(0, 0), (lead, tail)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        x = x.reshape(x.shape[0], blocks + 1, block, *x.shape[2:])
        x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
        return x.reshape(-1, 2 * block, *x.shape[3:])

    def split(x: Array, axis: int) -> Array:
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, blocks * block - t)
        x = jnp.pad(x, pad)
        x = x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis, 1)
        return x.reshape(-1, *x.shape[2:])

    banded = band(key)
    part = _attend(
        split(q, 2),
        banded,
        banded if value is key else band(value),
        split(query_position, 1),
        band(key_position, fill=-1),
        window,
        decay,
        None if visible_from is None else split(visible_from, 1),
    )

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(-1, blocks, *x.shape[1:]), 1, 2)
        return x.reshape(*x.shape[:2], blocks * block, *x.shape[4:])[:, :, :t]

    return Partial(*(join(x) for x in part))


def _attend(
    q, key, value, query_position, key_position, window, decay, visible_from
) -> Partial:
    distance = query_position[:, :, None] - key_position[:, None, :]
    least = 0 if visible_from is None else visible_from[:, :, None]
    mask = (distance >= 0) & (distance < window) & (key_position[:, None, :] >= least)
    logits = jnp.einsum("bktgh,bskh->bktgs", q, key.astype(jnp.float32))
    if decay is not None:
        slope = (decay.astype(jnp.float32) * LOG2_E).reshape(q.shape[1], 1, -1, 1)
        logits = logits - slope * distance[:, None, :, None, :].astype(jnp.float32)
    weights, total, maximum = partial_softmax(logits, mask[:, None, :, None, :])
    weighted = jnp.einsum("bktgs,bskh->bktgh", weights, value.astype(jnp.float32))
    return Partial(weighted, total, maximum)
