"""Transforms as matrix products in XLA, alone or with packing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.array_typing import typed
from pallas_kernels.kv_quant import xla as kv_quant

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


@typed
def transform_pack(
    x: Float[Array, "n s c"],
    tokens: Float[Array, "s s"] | None,
    channels: Float[Array, "c c"] | None,
    *,
    format: str,
    size: int,
) -> UInt8[Array, "n s r"]:
    """uint8[n, s, size] records of the coefficients; see ``api.transform_pack``."""
    n, s, c = x.shape
    rows = transform(x, tokens, channels).reshape(n * s, c)
    return kv_quant.pack(rows, format=format, rotary=0, size=size).reshape(n, s, size)


@typed
def unpack_inverse(
    records: UInt8[Array, "n s r"],
    tokens: Float[Array, "s s"] | None,
    channels: Float[Array, "c c"] | None,
    *,
    format: str,
    width: int,
) -> Float[Array, "n s c"]:
    """float32[n, s, width] of the records; see ``api.unpack_inverse``."""
    n, s, size = records.shape
    rows = kv_quant.unpack(
        records.reshape(n * s, size), format=format, channels=width, rotary=0
    )
    return inverse(rows.reshape(n, s, width), tokens, channels)
