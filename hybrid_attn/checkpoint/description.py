"""A cache as named arrays and as JSON: what is stored, and the check of what is asked.

Arrays are named "layers/<layer>/<state>/<field>", "cuts/<layer>/<state>.<field>" and
"counts/<count>".
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.layout import layout_of
from hybrid_attn.cache.states import Cache, check_state
from hybrid_attn.config import ModelConfig
from hybrid_attn.initial import init_cache

COUNTS = ("length", "floor", "sealed", "faults", "cut", "on_grid")


def named(cache: Cache) -> dict[str, Any]:
    """Every array of a cache by name, in a fixed order.

    Raises:
      TypeError: a state of an unknown kind.
    """
    out = {f"counts/{name}": getattr(cache, name) for name in COUNTS}
    for index, layer in enumerate(cache.layers):
        for name, state in sorted(layer.states.items()):
            for field, array in vars(check_state(state)).items():
                if array is not None:
                    out[f"layers/{index}/{name}/{field}"] = array
    for index, cut in enumerate(cache.cuts):
        for name, array in sorted(cut.items()):
            out[f"cuts/{index}/{name}"] = array
    return out


def rebuilt(like: Cache, arrays: Mapping[str, Any]) -> Cache:
    """A cache of the structure of ``like`` (which may be abstract) with ``arrays``."""
    layers = tuple(
        dataclasses.replace(
            layer,
            states={
                name: state.replace(
                    **{
                        field: arrays[f"layers/{index}/{name}/{field}"]
                        for field, array in vars(state).items()
                        if array is not None
                    }
                )
                for name, state in layer.states.items()
            },
        )
        for index, layer in enumerate(like.layers)
    )
    cuts = tuple(
        {name: arrays[f"cuts/{index}/{name}"] for name in cut}
        for index, cut in enumerate(like.cuts)
    )
    counts = {name: arrays[f"counts/{name}"] for name in COUNTS}
    return like.replace(layers=layers, cuts=cuts, **counts)


def growing_axes(cache: Cache) -> dict[str, int]:
    """By name, the axis of entries of each history array."""
    return {
        f"layers/{index}/{name}/{field}": axis
        for index, layer in enumerate(cache.layers)
        for name, state in layer.states.items()
        for field, axis in state.growing.items()
        if getattr(state, field) is not None
    }


def ring_of(cut: str) -> str:
    """The name of the ring that a cut was taken from."""
    _, index, name = cut.split("/")
    state, field = name.split(".")
    return f"layers/{index}/{state}/{field}"


def describe(cache: Cache) -> dict[str, Any]:
    """JSON of everything static about a cache: spec, states, shapes and dtypes."""
    return {
        "spec": dataclasses.asdict(cache.spec),
        "layout": layout_of(cache).fingerprint,
        "batch": cache.batch,
        "layers": [
            {
                "kind": layer.kind,
                "states": {
                    name: type(check_state(state)).__name__
                    for name, state in sorted(layer.states.items())
                },
            }
            for layer in cache.layers
        ],
        "arrays": {
            name: [list(array.shape), jnp.dtype(array.dtype).name]
            for name, array in named(cache).items()
        },
    }


def check(name: str, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Compares two descriptions of a cache.

    Raises:
      ValueError: they differ; names the place and both sides.
    """
    found = _first(_plain(stored), _plain(asked), "")
    if found is not None:
        place, one, other = found
        raise ValueError(f"cache {name!r}: {place} is {one} as stored, {other} asked")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _first(a: Any, b: Any, place: str) -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        # What is asked gives the order; JSON has lost that of what is stored.
        for key in [*b, *(key for key in a if key not in b)]:
            one, other = (x.get(key, "(absent)") for x in (a, b))
            found = _first(one, other, f"{place}.{key}" if place else key)
            if found:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            found = _first(one, other, f"{place}[{index}]")
            if found:
                return found
        return None
    return None if a == b else (place, _short(a), _short(b))


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} of them"
    return repr(value)


def abstract(config: ModelConfig, stored: Mapping[str, Any]) -> Cache:
    """The abstract cache of a configuration in the size that was stored.

    Raises:
      ValueError: the description has no such size.
    """
    spec = stored["spec"]
    return jax.eval_shape(
        lambda: init_cache(
            config,
            int(stored["batch"]),
            int(spec["capacity"]),
            int(spec["undo"]),
            dict(spec["dtypes"]),
        )
    )


def place(
    like: Cache,
    arrays: Mapping[str, np.ndarray],
    sharding: jax.sharding.Sharding
    | Callable[[str, Any], jax.sharding.Sharding]
    | None,
) -> Cache:
    """The cache on devices: every array in the sharding that the caller names."""

    def put(name: str, array: np.ndarray):
        where = sharding(name, array) if callable(sharding) else sharding
        # A copy: the host arrays stay the base of the log, and zero-copy would alias.
        return jax.device_put(np.array(array), where)

    return rebuilt(like, {name: put(name, arrays[name]) for name in named(like)})
