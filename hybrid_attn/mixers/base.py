"""What every mixer shares: queries, keys, window, sink, output.

A mixer is a pure function of (layer input, layer states, span). Its attention is one
softmax over the union of its sources of keys; a subclass adds its sources in
`attend`. The training form is the same call with ``states=None`` and a fresh span.
"""

import functools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hybrid_attn.cache.rings import ring_positions, ring_write, span_rows
from hybrid_attn.cache.span import Span
from hybrid_attn.cache.spec import CacheSpec
from hybrid_attn.cache.states import SlidingWindow, UncompressedTail
from hybrid_attn.config import LayerSpec, ModelConfig
from hybrid_attn.layers.linear import GroupedLinear, Linear
from hybrid_attn.layers.norm import RMSNorm, rms_norm
from hybrid_attn.layers.rope import rotate
from hybrid_attn.mixers.layouts import rows_layout
from hybrid_attn.mixers.sink import SinkKey
from pallas_kernels.softmax import Partial, finish, merge
from pallas_kernels.window_attention.api import window_attention

# By name; the concrete state class is the mixer's own business.
States = dict[str, Any]


class Inputs(NamedTuple):
    """What `attend` gets.

    Attributes:
      x: float[b, t, d], the normalised layer input.
      key_input: float[b, t, d], the same after the token shift, if any.
      latent: float[b, t, r], what queries are projected from.
      query: float32[b, t, n, h], rotated.
    """

    x: Array
    key_input: Array
    latent: Array
    query: Array


def decay_slopes(layer: LayerSpec, rate: float) -> Array:
    """float32[n], nats per token of distance: zero for head 0, then geometric."""
    head = jnp.arange(layer.heads, dtype=jnp.float32)
    slopes = rate * 2.0 ** (1 - head)
    return jnp.where(head == 0, 0.0, slopes)


class KeyValue(nnx.Module):
    """Projects a layer input to stored keys and values of every position."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, *, rngs: nnx.Rngs):
        self.layer = layer
        self.project = Linear(
            config.hidden_size, layer.features, rngs=rngs, dtype=config.compute_dtype
        )
        self.norm = (
            RMSNorm(layer.head_dim, config.norm_eps) if config.key_norm else None
        )

    def __call__(
        self, x: Array, positions: Array | np.ndarray
    ) -> tuple[Array, Array | None]:
        """(key, value) float32[b, t, k, h], value None where shared."""
        return finish_keys(self.project(x), positions, self.layer, self.norm)


def finish_keys(features, positions, layer: LayerSpec, norm):
    """Features [b, t, f] -> normalised, rotated key and value [b, t, k, h]."""
    shape = (*features.shape[:-1], layer.kv_heads, layer.head_dim)
    if layer.shared_kv:
        key, value = features.reshape(shape), None
    else:
        key, value = jnp.split(features, 2, axis=-1)
        key = key.reshape(shape)
        value = value.reshape(shape).astype(jnp.float32)
    if norm is not None:
        key = norm(key)
    return rotate(key, positions, layer.rope), value


class Mixer(nnx.Module):
    """Base of all mixers; a subclass overrides `attend` and `init_states`."""

    kind: ClassVar[str] = ""

    def __init__(self, config: ModelConfig, layer: LayerSpec, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        linear = functools.partial(Linear, rngs=rngs, dtype=config.compute_dtype)
        width = layer.heads * layer.head_dim
        d = config.hidden_size
        rank = config.query_rank
        self.query_down = None if rank is None else linear(d, rank)
        self.query_down_norm = None if rank is None else RMSNorm(rank, config.norm_eps)
        self.query_up = linear(rank or d, width)
        self.key_value = KeyValue(config, layer, rngs=rngs)
        self.sink = nnx.Param(jnp.zeros((layer.heads,))) if config.sink else None
        self.sink_key = SinkKey(layer) if config.sink_key and layer.window else None
        self.shift = nnx.Param(jnp.zeros((d,))) if config.token_shift else None
        self.slopes = (
            nnx.Param(decay_slopes(layer, config.decay_rate))
            if layer.decay == "learned"
            else None
        )
        groups, out_rank = config.output_groups, config.output_rank
        self.output_down = (
            None
            if out_rank is None
            else GroupedLinear(
                groups, width, out_rank, rngs=rngs, dtype=config.compute_dtype
            )
        )
        self.output_up = linear(
            width if out_rank is None else groups * out_rank,
            d,
            scale=config.residual_scale,
        )

    # -- to override ---------------------------------------------------------------

    @classmethod
    def init_states(
        cls, config: ModelConfig, layer: LayerSpec, spec: CacheSpec, batch: int
    ) -> States:
        """Empty states of one layer; each array is its own buffer."""
        states: States = {}
        dtypes = spec.dtypes
        if layer.window:
            ring = layer.window - 1 + spec.undo
            shape = (batch, max(ring, 1), layer.kv_heads, layer.head_dim)
            states["window"] = SlidingWindow(
                key=jnp.zeros(shape, dtypes.window),
                value=None if layer.shared_kv else jnp.zeros(shape, dtypes.window),
            )
        if config.token_shift:
            shape = (batch, 1 + spec.undo, config.hidden_size)
            states["shift"] = UncompressedTail(
                content=jnp.zeros(shape, dtypes.frontier), score=None
            )
        return states

    def attend(
        self, inputs: Inputs, states: States | None, span: Span, *, dense: Array | None
    ) -> tuple[Partial, States, dict[str, Any]]:
        """Softmax sums over the layer's keys, the new states, and auxiliaries.

        ``dense`` is bool[] in training (True: read all entries while the indexer
        warms up) and None in a step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attend")

    # -- shared --------------------------------------------------------------------

    def __call__(
        self,
        x: Array,
        states: States | None,
        span: Span,
        *,
        dense: Array | None = None,
    ) -> tuple[Array, States, dict[str, Any]]:
        """Mixes float[b, t, d]; returns (y of the same shape, states, auxiliaries)."""
        inputs, shift_state = self.inputs(x, states, span)
        partial, new_states, aux = self.attend(inputs, states, span, dense=dense)
        y = self.output(partial, inputs.query, span)
        return y, {**shift_state, **new_states}, aux

    def inputs(
        self, x: Array, states: States | None, span: Span
    ) -> tuple[Inputs, States]:
        """What `attend` gets for float[b, t, d], and the shift's new state."""
        key_input, shift_state = self._shifted(x, states, span)
        latent = x
        if self.query_down is not None and self.query_down_norm is not None:
            latent = self.query_down_norm(self.query_down(x))
        layer = self.layer
        query = self.query_up(latent).reshape(
            *x.shape[:-1], layer.heads, layer.head_dim
        )
        if self.config.query_norm:
            query = rms_norm(query, self.config.norm_eps)
        query = rotate(query, span.angle_positions, layer.rope)
        return Inputs(x, key_input, latent, query), shift_state

    def output(self, partial: Partial, query: Array, span: Span) -> Array:
        """float[b, t, d] of the softmax sums: sinks, then the output projection."""
        if self.sink_key is not None:
            partial = self.sink_key(partial, query, span, scale=self.scale)
        sink = None if self.sink is None else self.sink[...]
        mixed = finish(partial, sink)
        if self.layer.shared_kv:
            # Values carry their own position: undo the query's, so that what a key
            # contributes depends on the distance alone.
            mixed = rotate(mixed, span.angle_positions, self.layer.rope, inverse=True)
        y = mixed.reshape(*query.shape[:2], -1)
        if self.output_down is not None:
            y = self.output_down(y)
        return self.output_up(y)

    @property
    def scale(self) -> float:
        return self.layer.head_dim**-0.5

    def _shifted(self, x, states, span) -> tuple[Array, States]:
        """Key input x_t + mu·x_(t-1), and the state that remembers x_(t-1)."""
        if self.shift is None:
            return x, {}
        ring = None if states is None else states["shift"].content
        # What is stored is what is used: round before reading.
        rows = x if ring is None else x.astype(ring.dtype).astype(x.dtype)
        first = -1 if ring is None else span.start - 1
        previous = span_rows(ring, rows, span, first, span.width)
        previous = jnp.where(span.reaches(1)[..., None], previous, 0)
        new = {}
        if states is not None and ring is not None:
            new["shift"] = states["shift"].replace(content=ring_write(ring, rows, span))
        return x + self.shift[...].astype(x.dtype) * previous, new

    def window_partial(
        self,
        inputs: Inputs,
        states: States | None,
        span: Span,
        *,
        read_from: Array | None = None,
    ) -> tuple[Partial, States]:
        """Softmax sums over the layer's window, and the window's new state.

        Args:
          read_from: int32[b, t], the first position of its document that each query
            reads; None for all of the window.
        """
        key, value = self.key_value(inputs.key_input, span.angle_positions)
        window = self.layer.window
        state = None if states is None else states["window"]
        slopes = None
        if self.slopes is not None:
            slopes = jnp.maximum(self.slopes[...], 0.0)
        elif self.layer.decay == "fixed":
            slopes = decay_slopes(self.layer, self.config.decay_rate)
        dtype = key.dtype if state is None else state.key.dtype
        attention = functools.partial(
            window_attention,
            window=window,
            scale=self.scale,
            decay=slopes,
            key_layout=rows_layout(self.layer, dtype),
        )
        if state is None:
            # Distances are the same by columns, and documents then follow each other.
            begins = span.document_start
            if read_from is not None:
                begins = read_from if begins is None else begins + read_from
            lead = window - 1
            keys = span_rows(None, key, span, -lead, lead + span.width)
            values = (
                keys
                if value is None
                else span_rows(None, value, span, -lead, lead + span.width)
            )
            position = jnp.arange(-lead, span.width, dtype=jnp.int32)
            position = jnp.broadcast_to(position, keys.shape[:2])
            return attention(
                inputs.query,
                keys,
                values,
                position[:, lead:],
                position,
                contiguous=True,
                visible_from=begins,
            ), {}
        size = state.key.shape[1]
        key = key.astype(state.key.dtype)
        value = None if value is None else value.astype(state.value.dtype)
        written = state.replace(
            key=ring_write(state.key, key, span),
            value=None if value is None else ring_write(state.value, value, span),
        )
        if span.width <= size - (window - 1):
            # The written ring still holds the whole window of every new query: read
            # it where it lies, whatever the order of its slots.
            position = ring_positions(size, span.end)
            # After a rewind some slots hold what was taken back: counts say which.
            least = jnp.maximum(span.length - (window - 1), 0)[:, None]
            position = jnp.where(position >= least, position, -1)
            partial = attention(
                inputs.query,
                written.key,
                written.key if value is None else written.value,
                span.positions,
                position,
                contiguous=False,
                visible_from=read_from,
            )
        else:
            first = span.start - (window - 1)
            count = window - 1 + span.width
            reach = window - 1
            keys = span_rows(state.key, key, span, first, count, reach)
            values = (
                keys
                if value is None
                else span_rows(state.value, value, span, first, count, reach)
            )
            position = first[:, None] + jnp.arange(count, dtype=jnp.int32)
            partial = attention(
                inputs.query,
                keys,
                values,
                span.positions,
                position,
                contiguous=True,
                visible_from=read_from,
            )
        return partial, {"window": written}


def merged(first: Partial, *rest: Partial) -> Partial:
    """The joint softmax sums over several sources of keys."""
    for partial in rest:
        first = merge(first, partial)
    return first
