"""`init_cache`: an empty cache for a configuration."""

import jax.numpy as jnp

from hybrid_attn.cache.cuts import empty_cuts
from hybrid_attn.cache.spec import make_spec
from hybrid_attn.cache.states import Cache, LayerCache, check_state
from hybrid_attn.config import ModelConfig
from hybrid_attn.mixers import mixer_class


def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    undo: int = 16,
    dtypes=None,
) -> Cache:
    """An empty cache.

    Args:
      config: the model's configuration.
      batch: rows.
      capacity: tokens a row can hold; rounded up to a multiple of block_tokens.
      undo: how many tokens `rewind` can take back.
      dtypes: stored dtypes: None (float32), one dtype for entries, window and index,
        or a mapping over {entries, window, index, frontier, accumulator}.

    Raises:
      ValueError: batch, capacity or undo out of range; an unknown role or kind.
    """
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch={batch!r}: expected a whole number from 1")
    spec = make_spec(config, capacity, undo, dtypes)
    layers = []
    for layer in config.layers:
        states = mixer_class(layer.kind).init_states(config, layer, spec, batch)
        for state in states.values():
            check_state(state)
        layers.append(LayerCache(states, layer.kind))
    # Separate buffers: a donated tree must not hold one array twice.
    return Cache(
        layers=tuple(layers),
        length=jnp.zeros((batch,), jnp.int32),
        floor=jnp.zeros((batch,), jnp.int32),
        sealed=jnp.zeros((batch,), jnp.int32),
        faults=jnp.zeros((batch,), jnp.uint8),
        cut=jnp.zeros((batch,), jnp.int32),
        on_grid=jnp.zeros((batch,), jnp.int32),
        cuts=empty_cuts(tuple(layers), undo),
        spec=spec,
    )
