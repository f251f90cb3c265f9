"""Queries as the rows of an attention kernel, and its sums back as tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.softmax import LOG2_E, Partial


class Rows(NamedTuple):
    """The rows of a grouped query, [b, k, t·g] in the order (t, g).

    Attributes:
      query: bfloat16[b, k, r, h].
      low, high: int32[b, r]: the row sees keys at low..high-1.
      slope: float32[k, r], by which a base-2 logit falls per position of distance from
        high - 1; None for none.
    """

    query: Array
    low: Array
    high: Array
    slope: Array | None = None


def rows_of(
    query: Array, kv_heads: int, low: Array, high: Array, decay: Array | None = None
) -> Rows:
    """Rows of query [b, t, n, h], low and high int32[b, t], decay float[n] in nats.

    No copy where there is one key/value head.
    """
    b, t, n, h = query.shape
    g = n // kv_heads
    grouped = query.reshape(b, t, kv_heads, g, h).transpose(0, 2, 1, 3, 4)
    slope = None
    if decay is not None:
        slope = decay.astype(jnp.float32).reshape(kv_heads, 1, g) * LOG2_E
        slope = jnp.broadcast_to(slope, (kv_heads, t, g)).reshape(kv_heads, t * g)
    low, high = (jnp.repeat(x.astype(jnp.int32), g, axis=1) for x in (low, high))
    return Rows(grouped.reshape(b, kv_heads, t * g, h), low, high, slope)


def merge_splits(partial: Partial) -> Partial:
    """The sums over keys that were divided along the first axis."""
    if partial.total.shape[0] == 1:
        return Partial(*(x[0] for x in partial))
    maximum = jnp.max(partial.maximum, axis=0)
    factor = jnp.exp2(partial.maximum - maximum)
    return Partial(
        jnp.sum(partial.weighted * factor[..., None], axis=0),
        jnp.sum(partial.total * factor, axis=0),
        maximum,
    )


def by_token(partial: Partial, group: int) -> Partial:
    """Rows [b, k, t·g, ...] as [b, k, t, g, ...], of ``group`` heads each."""
    return Partial(
        *(
            x.reshape(*x.shape[:2], x.shape[2] // group, group, *x.shape[3:])
            for x in partial
        )
    )
