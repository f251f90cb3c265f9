"""Transforms as matrix products in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.array_typing import typed

# What is decorrelated is then quantised, so the products themselves must not round.
_EXACT = jax.lax.Precision.HIGHEST


@typed
def transform(
    x: Float[Array, "n s c"],
    tokens: Float[Array, "s s"] | None,
    channels: Float[Array, "c c"] | None,
) -> Float[Array, "n s c"]:
    """float32: tokens · x · channelsᵀ; see ``api.transform``."""
    x = x.astype(jnp.float32)
    if tokens is not None:
        x = jnp.einsum("pt,ntc->npc", tokens, x, precision=_EXACT)
    if channels is not None:
        x = jnp.einsum("ntc,qc->ntq", x, channels, precision=_EXACT)
    return x


@typed
def inverse(
    x: Float[Array, "n s c"],
    tokens: Float[Array, "s s"] | None,
    channels: Float[Array, "c c"] | None,
) -> Float[Array, "n s c"]:
    """float32: tokensᵀ · x · channels; see ``api.inverse``."""
    return transform(
        x,
        None if tokens is None else tokens.T,
        None if channels is None else channels.T,
    )
