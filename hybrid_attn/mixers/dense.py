"""`dense`: grouped-query attention over every position, the baseline."""

import jax.numpy as jnp

from hybrid_attn.cache.rings import entry_write
from hybrid_attn.cache.states import CompressedKV
from hybrid_attn.mixers.base import Mixer
from hybrid_attn.mixers.layouts import entries_layout
from hybrid_attn.mixers.registry import register_mixer
from pallas_kernels.compressed_attention.api import compressed_attention


@register_mixer("dense")
class DenseMixer(Mixer):
    """Full causal attention with grouped key/value heads (arXiv 2305.13245).

    Its history is the uncompressed case: one entry a token.
    """

    kind = "dense"

    @classmethod
    def init_states(cls, config, layer, spec, batch):
        states = super().init_states(config, layer, spec, batch)
        shape = (batch, spec.capacity, layer.kv_heads, layer.head_dim)
        states["entries"] = CompressedKV(
            key=jnp.zeros(shape, spec.dtypes.entries),
            value=jnp.zeros(shape, spec.dtypes.entries),
        )
        return states

    def attend(self, inputs, states, span, *, dense):
        key, value = self.key_value(inputs.key_input, span.angle_positions)
        new = {}
        value = key if value is None else value
        if states is not None:
            entries = states["entries"].replace(
                key=entry_write(states["entries"].key, key, span.start, span, 1),
                value=entry_write(states["entries"].value, value, span.start, span, 1),
            )
            new["entries"] = entries
            key, value = entries.key, entries.value
        partial = compressed_attention(
            inputs.query,
            key,
            value,
            span.visible(1),
            visible_from=span.visible_from(1),
            scale=self.scale,
            static=states is None,
            entry_layout=entries_layout(self.layer, key.dtype),
        )
        return partial, new, {}
