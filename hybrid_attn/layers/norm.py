"""RMS normalisation, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def rms_norm(x: Array, eps: float) -> Array:
    """x · rsqrt(mean(x²) + eps) over the last axis, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """Weighted RMS norm over the last axis."""

    def __init__(self, size: int, eps: float):
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.eps) * self.weight[...]
