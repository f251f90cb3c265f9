"""Raises the capacity of a cache. EXACT."""

import dataclasses

import jax.numpy as jnp

from hybrid_attn.cache.states import Cache, LayerCache, check_state


def grow(cache: Cache, capacity: int | None = None) -> Cache:
    """A cache with room for ``capacity`` tokens a row (default: twice as many).

    The capacity is rounded up to a multiple of block_tokens. Growing is exact; later
    steps run in other compiled shapes and agree within tolerance.

    Raises:
      ValueError: less than the present capacity.
    """
    old = cache.spec.capacity
    wanted = 2 * old if capacity is None else capacity
    if not isinstance(wanted, int) or wanted < old:
        raise ValueError(f"capacity={wanted!r}: expected at least the present {old}")
    block = cache.spec.block_tokens
    new = -(-wanted // block) * block

    def longer(array, axis):
        if array is None:
            return None
        size = array.shape[axis]
        pad = [(0, 0)] * array.ndim
        pad[axis] = (0, size * new // old - size)
        return jnp.pad(array, pad)

    layers = []
    for layer in cache.layers:
        states = {
            name: check_state(state).replace(
                **{
                    field: longer(getattr(state, field), axis)
                    for field, axis in state.growing.items()
                }
            )
            for name, state in layer.states.items()
        }
        layers.append(LayerCache(states, layer.kind))
    return cache.replace(
        layers=tuple(layers), spec=dataclasses.replace(cache.spec, capacity=new)
    )
