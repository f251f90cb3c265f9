"""One layer: mixer and feed-forward, each behind a norm and a residual."""

from flax import nnx
from jax import Array

from hybrid_attn.layers.feed_forward import FeedForward
from hybrid_attn.layers.norm import RMSNorm


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config, mixer: nnx.Module, *, rngs: nnx.Rngs):
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(
            config.hidden_size,
            config.feed_forward_size,
            rngs=rngs,
            dtype=config.compute_dtype,
            scale=config.residual_scale,
        )

    def __call__(self, x: Array, states, span, *, dense=None):
        """float[b, t, d] -> (the same, new states, auxiliaries)."""
        y, states, aux = self.mixer(self.mixer_norm(x), states, span, dense=dense)
        x = x + y
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x, states, aux
