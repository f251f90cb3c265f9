"""Gated per-channel softmax pooling in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.array_typing import typed


@typed
def pool(
    content: Float[Array, "b g s c"], score: Float[Array, "b g s c"]
) -> Float[Array, "b g c"]:
    """Σ_s softmax_s(score) ∘ content, channel by channel, in float32.

    Args:
      content, score: [b, g, s, c]: s slots of each of g groups.

    Returns:
      float32[b, g, c].
    """
    weights = jax.nn.softmax(score.astype(jnp.float32), axis=2)
    return jnp.sum(weights * content.astype(jnp.float32), axis=2)


@typed
def overlapping_pool(
    content: Float[Array, "b before_g s two_c"],
    score: Float[Array, "b before_g s two_c"],
) -> Float[Array, "b g c"]:
    """float32[b, g, c] of [b, 1 + g, s, 2c]; see ``api.overlapping_pool``."""
    half = content.shape[3] // 2

    def slots(x: Array) -> Array:
        return jnp.concatenate([x[:, :-1, :, :half], x[:, 1:, :, half:]], axis=2)

    return pool(slots(content), slots(score))
