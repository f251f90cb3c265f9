"""SwiGLU feed-forward."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.layers.linear import Linear


def swiglu(both: Array, limit: float | None) -> Array:
    """silu(gate) ∘ up of [..., gate | up]; gate ≤ limit and |up| ≤ limit if given."""
    width = both.shape[-1] // 2
    gate, up = both[..., :width], both[..., width:]
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


class FeedForward(nnx.Module):
    """y = W_down·(silu(W_gate·x) ∘ W_up·x) (arXiv 2002.05202)."""

    def __init__(
        self,
        size: int,
        width: int,
        *,
        rngs: nnx.Rngs,
        dtype: str,
        scale: float = 1.0,
        limit: float | None = None,
    ):
        # Gate and up share one product: two narrow ones cost more on every backend.
        self.gate_up = Linear(size, 2 * width, rngs=rngs, dtype=dtype)
        self.down = Linear(width, size, rngs=rngs, dtype=dtype, scale=scale)
        self.limit = limit

    def __call__(self, x: Array) -> Array:
        return self.down(swiglu(self.gate_up(x), self.limit))
