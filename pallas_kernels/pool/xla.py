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
