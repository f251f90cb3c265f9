"""`hca`: a window, and every compressed entry of the history."""

import math

import jax.numpy as jnp
from flax import nnx

from hybrid_attn.cache.states import CompressedKV, UncompressedTail
from hybrid_attn.layers.norm import RMSNorm
from hybrid_attn.mixers.base import Mixer, finish_keys, merged
from hybrid_attn.mixers.compressor import Compressor, empty_frontier
from hybrid_attn.mixers.layouts import entries_layout
from hybrid_attn.mixers.registry import register_mixer
from pallas_kernels.compressed_attention.api import compressed_attention
from pallas_kernels.softmax import LOG2_E


class CompressedMixer(Mixer):
    """A window and a compressed history; subclasses say which entries are read."""

    def __init__(self, config, layer, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.compressor = Compressor(
            config,
            layer.features,
            layer.ratio,
            layer.overlap,
            rngs=rngs,
            slot_bias=config.slot_bias,
            heads=layer.kv_heads,
        )
        self.entry_norm = (
            RMSNorm(layer.head_dim, config.norm_eps) if config.key_norm else None
        )

    @classmethod
    def init_states(cls, config, layer, spec, batch):
        states = super().init_states(config, layer, spec, batch)
        dtypes = spec.dtypes
        entries = (
            batch,
            spec.capacity // layer.ratio,
            layer.kv_heads,
            layer.head_dim,
        )
        states["entries"] = CompressedKV(
            key=jnp.zeros(entries, dtypes.entries),
            value=None if layer.shared_kv else jnp.zeros(entries, dtypes.entries),
        )
        states["tail"] = UncompressedTail(
            **empty_frontier(layer, spec, batch, layer.features)
        )
        return states

    def compress(self, inputs, states, span):
        """(key, value) of all entries after the step [b, e, k, h], and new states."""
        tail = None if states is None else states["tail"]
        ring = None if tail is None else (tail.content, tail.score)
        pooled, first, ring = self.compressor(inputs.key_input, ring, span)
        positions = self.compressor.positions(first, pooled.shape[1], span)
        key, value = finish_keys(pooled, positions, self.layer, self.entry_norm)
        if states is None or tail is None or ring is None:
            return key, (key if value is None else value), {}
        entries = states["entries"]
        entries = entries.replace(
            key=self.compressor.append(entries.key, key, first, span),
            value=None
            if value is None
            else self.compressor.append(entries.value, value, first, span),
        )
        new = {
            "entries": entries,
            "tail": tail.replace(content=ring[0], score=ring[1]),
        }
        return entries.key, (entries.key if value is None else entries.value), new

    def attend(self, inputs, states, span, *, dense):
        window, new = self.window_partial(
            inputs, states, span, read_from=self.read_from(span)
        )
        key, value, history = self.compress(inputs, states, span)
        new.update(history)
        if key.shape[1] == 0:
            return window, new, {}
        partial, index, aux = self.read(inputs, key, value, states, span, dense=dense)
        new.update(index)
        if self.config.entry_bias:
            # All logits of entries rise alike: their common maximum carries it.
            bias = self.config.entry_bias * math.log(self.layer.ratio) * LOG2_E
            partial = partial._replace(maximum=partial.maximum + bias)
        return merged(window, partial), new, aux

    def visible(self, span):
        """int32[b, t]: the query of each column may read entries below this.

        Without `entries_in_window` an entry counts from where its first token has
        left the window.
        """
        layer, lag = self.layer, 0
        if not self.config.entries_in_window:
            lag = layer.window - layer.ratio + 1
        return span.visible(layer.ratio, lag)

    def read_from(self, span):
        """int32[b, t]: where the window begins after the entries that are read.

        Positions of the own document; None where the window is read as a whole.
        """
        if self.config.entries_in_window:
            return None
        visible, ratio = self.visible(span), self.layer.ratio
        before = span.visible_from(ratio)
        return (visible if before is None else visible - before) * ratio

    def read(self, inputs, key, value, states, span, *, dense):
        """(softmax sums over entries, further states, auxiliaries)."""
        raise NotImplementedError(f"{type(self).__name__} must define read")


@register_mixer("hca")
class FullHistoryMixer(CompressedMixer):
    """Reads every visible entry: full-history compression (DeepSeek-V4, HCA)."""

    kind = "hca"

    def read(self, inputs, key, value, states, span, *, dense):
        partial = compressed_attention(
            inputs.query,
            key,
            value,
            self.visible(span),
            visible_from=span.visible_from(self.layer.ratio),
            scale=self.scale,
            static=states is None,
            entry_layout=entries_layout(self.layer, key.dtype),
        )
        return partial, {}, {}
