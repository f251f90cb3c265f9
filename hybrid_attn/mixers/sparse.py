"""`csa`: a window, and the entries that an indexer chooses."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.cache.span import Span
from hybrid_attn.mixers.base import Inputs
from hybrid_attn.mixers.compressed import CompressedMixer
from hybrid_attn.mixers.indexer import Indexer, indexer_loss
from hybrid_attn.mixers.layouts import entries_layout, index_layout
from hybrid_attn.mixers.registry import register_mixer
from pallas_kernels.indexer_topk.api import indexer_scores, indexer_topk
from pallas_kernels.sparse_attention.api import masked_attention, sparse_attention


@register_mixer("csa")
class SparseMixer(CompressedMixer):
    """Compressed sparse attention (DeepSeek-V4, CSA).

    The choice gives no gradient: in training the indexer learns from the attention
    mass over entries, with its own inputs detached from the trunk.
    """

    kind = "csa"

    def __init__(self, config, layer, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.indexer = Indexer(config, layer, rngs=rngs)

    @classmethod
    def init_states(cls, config, layer, spec, batch):
        states = super().init_states(config, layer, spec, batch)
        states["index"] = Indexer.init_state(config, layer, spec, batch)
        return states

    def read(self, inputs, key, value, states, span, *, dense):
        if states is None:
            scores, seen = self.scores(inputs, span)
            return self._train(inputs.query, key, value, scores, seen, dense)
        query, weight, index_key, new_state = self._index(inputs, states, span)
        k = self.layer.top_k
        chosen, scores = indexer_topk(
            query,
            weight,
            index_key,
            self.visible(span),
            k=k + 1 if span.collect else k,
            key_layout=index_layout(self.layer, self.indexer.dim, index_key.dtype),
        )
        aux = {}
        if span.collect:
            aux = {"chosen": chosen[..., :k], "gap": score_gap(scores, k)}
            chosen = chosen[..., :k]
        partial = sparse_attention(
            inputs.query,
            key,
            value,
            chosen,
            scale=self.scale,
            entry_layout=entries_layout(self.layer, key.dtype),
        )
        return partial, {"index": new_state}, aux

    def scores(self, inputs: Inputs, span: Span) -> tuple[Array, Array]:
        """The training form's scores of all entries, and which ones may be read.

        Returns:
          (float32[b, t, e], bool[b, t, e]); no gradient of the scores reaches the
          layer's input.
        """
        query, weight, index_key, _ = self._index(inputs, None, span)
        layout = index_layout(self.layer, self.indexer.dim, index_key.dtype)
        scores = indexer_scores(query, weight, index_key, key_layout=layout)
        entry = jnp.arange(scores.shape[-1])
        seen = entry < self.visible(span)[..., None]
        first = span.visible_from(self.layer.ratio)
        if first is not None:
            seen = seen & (entry >= first[..., None])
        return scores, seen

    def _index(self, inputs, states, span):
        """(query, weight, keys, new state) of the indexer, detached from the trunk."""
        x, key_input, latent = (
            jax.lax.stop_gradient(part)
            for part in (inputs.x, inputs.key_input, inputs.latent)
        )
        state = None if states is None else states["index"]
        query, weight = self.indexer.queries(latent, x, span)
        return query, weight, *self.indexer.keys(key_input, state, span)

    def _train(self, query, key, value, scores, seen, dense):
        """Masked form: all scores are needed for the loss, so nothing is gathered."""
        chosen = top_k_mask(scores, seen, self.layer.top_k)
        if dense is not None:
            chosen = chosen | (seen & dense)
        partial, mass = masked_attention(query, key, value, chosen, scale=self.scale)
        loss = indexer_loss(scores, mass, chosen)
        return partial, {}, {"indexer_loss": loss}


def top_k_mask(scores, seen, k: int):
    """bool[b, t, e]: the k best seen entries; ties go to the lowest index."""
    if scores.shape[-1] <= k:
        return seen
    masked = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf))
    least = jax.lax.top_k(masked, k)[0][..., -1:]
    above, equal = masked > least, masked == least
    room = k - jnp.sum(above, axis=-1, keepdims=True)
    return seen & (above | (equal & (jnp.cumsum(equal, axis=-1) <= room)))


def score_gap(scores, k: int):
    """float32[b, t]: last chosen score minus first refused; inf where none refused."""
    if scores.shape[-1] <= k:
        return jnp.full(scores.shape[:-1], jnp.inf, jnp.float32)
    refused = scores[..., k]
    gap = scores[..., k - 1] - refused
    return jnp.where(refused > -jnp.inf, gap, jnp.inf)
