"""SwiGLU feed-forward."""

import jax
from flax import nnx
from jax import Array

from hybrid_attn.layers.linear import Linear


class FeedForward(nnx.Module):
    """y = W_down·(silu(W_gate·x) ∘ W_up·x) (arXiv 2002.05202)."""

    def __init__(
        self, size: int, width: int, *, rngs: nnx.Rngs, dtype: str, scale: float = 1.0
    ):
        # Gate and up share one product: two narrow ones cost more on every backend.
        self.gate_up = Linear(size, 2 * width, rngs=rngs, dtype=dtype)
        self.down = Linear(width, size, rngs=rngs, dtype=dtype, scale=scale)

    def __call__(self, x: Array) -> Array:
        both = self.gate_up(x)
        width = both.shape[-1] // 2
        return self.down(jax.nn.silu(both[..., :width]) * both[..., width:])
