"""One layer: mixer and feed-forward, each behind a norm and a residual."""

from typing import Any

from flax import nnx
from jax import Array

from hybrid_attn.layers.feed_forward import FeedForward
from hybrid_attn.layers.hyper_connections import HyperConnection
from hybrid_attn.layers.moe import MoE
from hybrid_attn.layers.norm import RMSNorm


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)).

    With hyper-connections the residual is several streams [b, t, n, d], and each
    sublayer reads a mixture of them.
    """

    def __init__(self, config, index: int, mixer: nnx.Module, *, rngs: nnx.Rngs):
        size, eps = config.hidden_size, config.norm_eps
        self.mixer_norm = RMSNorm(size, eps)
        self.mixer: Any = mixer
        self.feed_forward_norm = RMSNorm(size, eps)
        if config.moe is None:
            self.feed_forward = FeedForward(
                size,
                config.feed_forward_size,
                rngs=rngs,
                dtype=config.compute_dtype,
                scale=config.residual_scale,
                limit=config.swiglu_limit,
            )
        else:
            hashed = index in config.moe.hash_layers
            self.feed_forward = MoE(config, hashed=hashed, rngs=rngs)
        self.mixer_hyper = _hyper(config, rngs)
        self.feed_forward_hyper = _hyper(config, rngs)

    def __call__(
        self, x: Array, tokens: Array, states, span, *, dense=None
    ) -> tuple[Array, dict[str, Any], dict[str, Any]]:
        """float[b, t, d] or [b, t, n, d], int32[b, t] -> (x, states, auxiliaries)."""
        enter, leave = _residual(self.mixer_hyper, x)
        y, new, aux = self.mixer(self.mixer_norm(enter), states, span, dense=dense)
        static = states is None or span.fresh
        return self.feed(leave(y), tokens, static=static), new, aux

    def feed(self, x: Array, tokens: Array, *, static: bool) -> Array:
        """The second sublayer: the residual with the feed-forward added.

        ``static`` as for `MoE`: the training form.
        """
        enter, leave = _residual(self.feed_forward_hyper, x)
        y = self.feed_forward_norm(enter)
        if isinstance(self.feed_forward, MoE):
            return leave(self.feed_forward(y, tokens, static=static))
        return leave(self.feed_forward(y))


def _hyper(config, rngs: nnx.Rngs) -> HyperConnection | None:
    if config.hyper is None:
        return None
    return HyperConnection(config.hidden_size, config.hyper, config.norm_eps, rngs=rngs)


def _residual(hyper: HyperConnection | None, x: Array):
    """(what a sublayer reads, the function that takes its output back in)."""
    if hyper is None:
        return x, lambda y: x + y
    collapsed, post, comb = hyper.collapse(x)
    return collapsed, lambda y: hyper.expand(x, y, post, comb)
