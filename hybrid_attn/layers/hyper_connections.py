"""Manifold-constrained hyper-connections: the residual as parallel streams.

DeepSeek-V4 (arXiv 2606.19348, section 2.2). Everything
here is computed in float32.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.config import HyperConfig
from hybrid_attn.layers.linear import Linear

# Initial values: streams mix a little, and each token a little differently.
_SCALE = 0.01
_DIAGONAL = 4.0


def sinkhorn(matrix: Array, iterations: int, eps: float) -> Array:
    """Divides float32[..., n, n] by its column sums, then rows and columns in turn.

    ``iterations`` counts column normalisations; with many the result is doubly
    stochastic.
    """

    n = matrix.shape[-1]
    # Tokens last: sums over four streams are then whole vectors of tokens.
    rows = jnp.moveaxis(matrix.reshape(-1, n, n), 0, -1)

    def normalised(x: Array, axis: int) -> Array:
        return x / (jnp.sum(x, axis=axis, keepdims=True) + eps)

    # A loop, not 2·iterations unrolled operations: 13 times cheaper to run for one
    # token on CPU, and to compile; its static trip count keeps it differentiable.
    rows = jax.lax.fori_loop(
        0,
        iterations - 1,
        lambda _, x: normalised(normalised(x, 1), 0),
        normalised(rows, 0),
    )
    return jnp.moveaxis(rows, -1, 0).reshape(matrix.shape)


def _weigh(streams: Array, weights: Array) -> Array:
    """Σ_n weights_n · stream_n: [..., n, d] and [..., n] -> [..., d]."""
    # Products and sums, which fuse; a batch of tiny matrix products does not.
    parts = [
        weights[..., n, None] * streams[..., n, :] for n in range(streams.shape[-2])
    ]
    return functools.reduce(jnp.add, parts)


class _Projection(nnx.Module):
    """W·rms_norm(streams, flattened), float32[b, t, outputs]."""

    def __init__(
        self, size: int, hyper: HyperConfig, outputs: int, eps: float, rngs: nnx.Rngs
    ):
        self.project = Linear(hyper.streams * size, outputs, rngs=rngs)
        self.eps = eps

    def __call__(self, streams: Array) -> Array:
        flat = streams.reshape(*streams.shape[:-2], -1)
        # The norm is one number a token: it scales the product as well as its input.
        mean = jnp.mean(flat * flat, axis=-1, keepdims=True)
        return self.project(flat) * jax.lax.rsqrt(mean + self.eps)


class HyperConnection(nnx.Module):
    """One site: collapses the streams for a sublayer and takes its output back in."""

    def __init__(self, size: int, hyper: HyperConfig, eps: float, *, rngs: nnx.Rngs):
        n = hyper.streams
        self.hyper = hyper
        self.mix = _Projection(size, hyper, (2 + n) * n, eps, rngs)
        self.base = nnx.Param(
            jnp.concatenate(
                [
                    jnp.full((n,), -jnp.log(max(n - 1, 0.1)), jnp.float32),
                    jnp.zeros((n,), jnp.float32),
                    _DIAGONAL * jnp.eye(n, dtype=jnp.float32).reshape(-1),
                ]
            )
        )
        self.scale = nnx.Param(jnp.full((3,), _SCALE, jnp.float32))

    def collapse(self, streams: Array) -> tuple[Array, Array, Array]:
        """float[b, t, n, d] -> (input [b, t, d], post [b, t, n], comb [b, t, n, n])."""
        n, eps = self.hyper.streams, self.hyper.eps
        streams = streams.astype(jnp.float32)
        weights = self.mix(streams)
        scale, base = self.scale[...], self.base[...]
        pre = jax.nn.sigmoid(weights[..., :n] * scale[0] + base[:n]) + eps
        post = 2 * jax.nn.sigmoid(weights[..., n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = weights[..., 2 * n :] * scale[2] + base[2 * n :]
        comb = jax.nn.softmax(comb.reshape(*comb.shape[:-1], n, n), axis=-1) + eps
        return _weigh(streams, pre), post, sinkhorn(comb, self.hyper.iterations, eps)

    def expand(self, streams: Array, y: Array, post: Array, comb: Array) -> Array:
        """stream_k <- post_k · y + Σ_j comb[j, k] · stream_j, in the streams' dtype."""
        old, y = streams.astype(jnp.float32), y.astype(jnp.float32)
        new = [
            post[..., k, None] * y + _weigh(old, comb[..., k])
            for k in range(self.hyper.streams)
        ]
        return jnp.stack(new, axis=-2).astype(streams.dtype)


class HyperHead(nnx.Module):
    """Collapses the streams for the final norm."""

    def __init__(self, size: int, hyper: HyperConfig, eps: float, *, rngs: nnx.Rngs):
        n = hyper.streams
        self.hyper = hyper
        self.mix = _Projection(size, hyper, n, eps, rngs)
        self.base = nnx.Param(jnp.full((n,), -jnp.log(max(n - 1, 0.1)), jnp.float32))
        self.scale = nnx.Param(jnp.full((1,), _SCALE, jnp.float32))

    def __call__(self, streams: Array) -> Array:
        """float[..., n, d] -> float32[..., d]."""
        streams = streams.astype(jnp.float32)
        weights = self.mix(streams) * self.scale[...] + self.base[...]
        return _weigh(streams, jax.nn.sigmoid(weights) + self.hyper.eps)
