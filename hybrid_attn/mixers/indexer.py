"""The lightning indexer: cheap scores that choose which entries a query reads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.cache.spec import CacheSpec
from hybrid_attn.cache.states import IndexerState
from hybrid_attn.config import LayerSpec, ModelConfig, Rope
from hybrid_attn.layers.linear import Linear
from hybrid_attn.layers.norm import RMSNorm
from hybrid_attn.layers.rope import rotate
from hybrid_attn.mixers.compressor import Compressor, empty_frontier


def _rope(config: ModelConfig, layer: LayerSpec) -> Rope:
    dims = config.index_rope_dims
    values = {f: getattr(layer.rope, f) for f in Rope.__dataclass_fields__}
    return Rope(**{**values, "dims": config.rope_dims if dims is None else dims})


class Indexer(nnx.Module):
    """score(t, e) = Σ_i w_ti · relu(q_ti · k_e) / sqrt(dim · heads).

    Without `index_weights` every w_ti is 1.
    """

    def __init__(self, config: ModelConfig, layer: LayerSpec, *, rngs: nnx.Rngs):
        self.heads, self.dim = config.index_heads, config.index_dim
        self.rope = _rope(config, layer)
        dtype = config.compute_dtype
        rank = config.query_rank or config.hidden_size
        self.query = Linear(rank, self.heads * self.dim, rngs=rngs, dtype=dtype)
        self.weight = (
            Linear(config.hidden_size, self.heads, rngs=rngs, dtype=dtype)
            if config.index_weights
            else None
        )
        self.compressor = Compressor(
            config,
            self.dim,
            layer.ratio,
            layer.overlap,
            rngs=rngs,
            slot_bias=config.slot_bias,
        )
        self.norm = RMSNorm(self.dim, config.norm_eps) if config.index_norm else None

    @classmethod
    def init_state(
        cls, config: ModelConfig, layer: LayerSpec, spec: CacheSpec, batch: int
    ) -> IndexerState:
        key = (batch, config.index_dim, spec.capacity // layer.ratio)
        return IndexerState(
            key=jnp.zeros(key, spec.dtypes.index),
            **empty_frontier(layer, spec, batch, config.index_dim),
        )

    def queries(self, latent: Array, x: Array, span) -> tuple[Array, Array]:
        """(query float32[b, t, i, c], weight float32[b, t, i], scaled)."""
        query = self.query(latent).reshape(*x.shape[:-1], self.heads, self.dim)
        if self.weight is None:
            weight = jnp.ones((*x.shape[:-1], self.heads), jnp.float32)
        else:
            weight = self.weight(x).astype(jnp.float32)
        scale = self.dim**-0.5 * self.heads**-0.5
        return rotate(query, span.angle_positions, self.rope), weight * scale

    def keys(
        self, x: Array, state: IndexerState | None, span
    ) -> tuple[Array, IndexerState | None]:
        """All index keys after the step, [b, c, e], and the new state."""
        ring = None if state is None else (state.content, state.score)
        pooled, first, ring = self.compressor(x, ring, span)
        positions = self.compressor.positions(first, pooled.shape[1], span)
        key = pooled if self.norm is None else self.norm(pooled)
        key = rotate(key, positions, self.rope)
        if state is None or ring is None:
            return jnp.swapaxes(key, 1, 2), None
        key = self.compressor.append(state.key, key, first, span, axis=2)
        return key, state.replace(key=key, content=ring[0], score=ring[1])


def indexer_loss(scores: Array, mass: Array, mask: Array) -> Array:
    """KL(attention mass ‖ softmax of scores) over the entries of the mask, float32[].

    Args:
      scores: [b, t, e]; mass: [b, t, e], attention weight per entry (detached here);
      mask: bool[b, t, e]. Queries that see no entry do not count.
    """
    mass = jax.lax.stop_gradient(jnp.where(mask, mass, 0.0))
    seen = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.where(seen > 0, seen, 1.0)
    log_share = jax.nn.log_softmax(jnp.where(mask, scores, -1e30), axis=-1)
    log_target = jnp.log(jnp.where(target > 0, target, 1.0))
    terms = jnp.where(mask, target * (log_target - log_share), 0.0)
    queries = jnp.sum(jnp.any(mask, axis=-1))
    return jnp.sum(terms) / jnp.maximum(queries, 1)
