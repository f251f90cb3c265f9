"""Sliding-window attention with time decay."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.abi import Layout, check_stored
from pallas_kernels.array_typing import Keys, Positions, Queries, typed
from pallas_kernels.dispatch import SM90, Dispatch, Implementation
from pallas_kernels.softmax import Partial, check_groups
from pallas_kernels.window_attention import mosaic_gpu, xla

DISPATCH = Dispatch(
    "window_attention",
    Implementation("mosaic_gpu", mosaic_gpu.window_attention, SM90, mosaic_gpu.refuses),
    Implementation("xla", xla.window_attention),
)
KEY_AXES = ("b", "s", "k", "h")
_LAST = jnp.iinfo(jnp.int32).max


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
    key_layout: Layout | None = None,
    implementation: str | None = None,
) -> Partial:
    """Softmax sums over the keys at distance 0..window-1 of each query.

    Args:
      query: float[b, t, n, h].
      key, value: float[b, s, k, h] (the same array for shared key/values). What no
        query of a row is near enough to may hold anything, also NaN.
      query_position: int32[b, t]; key_position: int32[b, s], negative = no key.
      window: keys that a query reads at most, itself included.
      scale: factor on q·k.
      decay: float[n], nats by which a logit falls per token of distance, or None.
      contiguous: key i stands at key_position[:, 0] + i and query j at key j +
        window - 1.
      visible_from: int32[b, t], the least key position that each query may read; None
        for 0.
      key_layout: the owner's description of key and value, checked if given.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Raises:
      ValueError: the key/value heads do not divide the query heads.
      LayoutError: key or value is not as described.
      Unsupported: the named implementation does not serve the call.
    """
    check_groups(query, key)
    check_stored(key_layout, KEY_AXES, key, "window_attention key")
    check_stored(key_layout, KEY_AXES, value, "window_attention value")
    # 0 x NaN is NaN: what stands in slots that no query reads is replaced here, where
    # XLA makes it one pass with whatever gathers the keys.
    least = jnp.maximum(jnp.min(query_position, axis=1, initial=_LAST) - window + 1, 0)
    most = jnp.max(query_position, axis=1, initial=-1)
    near = (key_position >= least[:, None]) & (key_position <= most[:, None])
    near = near[:, :, None, None]

    def readable(x: Array) -> Array:
        x = jnp.where(near, x, 0)
        # A ring is read by both products at once: fused into them it is done for each.
        return x if contiguous else jax.lax.optimization_barrier(x)

    keys = readable(key)
    return DISPATCH(
        query,
        keys,
        keys if value is key else readable(value),
        query_position,
        key_position,
        window=window,
        scale=scale,
        decay=decay,
        contiguous=contiguous,
        visible_from=visible_from,
        implementation=implementation,
    )
