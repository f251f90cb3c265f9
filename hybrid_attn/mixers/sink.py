"""A key and a value that stand for the first token once a window has left it."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.cache.span import Span
from hybrid_attn.config import LayerSpec
from pallas_kernels.softmax import MASKED, Partial, group_heads, merge


class SinkKey(nnx.Module):
    """One more key per key/value head, a parameter, for queries from ``window`` on.

    Trained models give much of their attention to the first token, whatever it is
    (attention sinks, arXiv 2309.17453). Its key and value hardly depend on the text,
    so a window that forgets it is helped by two constants and needs no state. The key
    stands at position 0 of its document, already rotated: the logit of a query is
    what it was with the first token's own key.
    """

    def __init__(self, layer: LayerSpec):
        shape = (layer.kv_heads, layer.head_dim)
        self.key = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.value = nnx.Param(jnp.zeros(shape, jnp.float32))
        self.window = layer.window

    def __call__(
        self, partial: Partial, query: Array, span: Span, *, scale: float
    ) -> Partial:
        """The softmax sums with this key among them; query [b, t, n, h], rotated."""
        key, value = self.key[...], self.value[...]
        grouped = group_heads(query, key.shape[0], scale)
        logit = jnp.einsum("bktgh,kh->bktg", grouped, key.astype(jnp.float32))
        # Before that the token itself is in the window.
        seen = (span.positions >= self.window)[:, None, :, None]
        seen = jnp.broadcast_to(seen, logit.shape)
        own = Partial(
            jnp.where(seen[..., None], value[:, None, None].astype(jnp.float32), 0.0),
            seen.astype(jnp.float32),
            jnp.where(seen, logit, MASKED),
        )
        return merge(partial, own)
