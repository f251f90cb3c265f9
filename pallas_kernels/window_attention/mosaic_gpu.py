"""Sliding-window attention on the tensor cores of compute capability 9.0.

With contiguous keys a tile of rows reads the blocks of its own band and no others. From
a ring it reads every slot, in whatever order, and compares the slots' positions.

Few queries fill few rows of a tile of 64. By an H100's peak rates (not measured) the
empty rows cost nothing that matters: the products of 64 keys of 128 channels take a
multiprocessor a quarter of the time in which it gets them from memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import flash_config, flash_rows, flash_sm90, tuned
from pallas_kernels.device import Target
from pallas_kernels.flash_config import Config, shape_of
from pallas_kernels.softmax import Partial
from pallas_kernels.window_attention import xla


def refuses(
    target: Target, query: Any, key: Any, value: Any, *args: Any, **options: Any
) -> str | None:
    """Why a call is not served, or None; arguments as `window_attention`."""
    del target, args, options
    return flash_config.refuses(query, key, value)


def configurations(query: Any, key: Any, value: Any) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract.

    The keys of a window are too few to be divided.
    """
    return flash_config.legal(shape_of(query, key, value))


def default(query: Any, key: Any, value: Any) -> Config:
    """The configuration of a call that no table knows."""
    return flash_config.best(configurations(query, key, value))


def window_attention(
    query: Array,
    key: Array,
    value: Array,
    query_position: Array,
    key_position: Array,
    *,
    window: int,
    scale: float,
    decay: Array | None,
    contiguous: bool,
    visible_from: Array | None = None,
    config: Config | None = None,
) -> Partial:
    """Softmax sums over a window; the gradient is XLA's.

    Args:
      query, key, value: bfloat16; the others as ``api.window_attention``, which
        replaces keys that no query sees: here they must be finite.
      config: of `configurations`; None for the tuned or the default one.

    Copies are of 8 keys, so keys of another number are copied once before.
    """
    if config is None:
        legal = configurations(query, key, value)
        shape = shape_of(query, key, value)
        if not shape.empty:
            config = tuned.choose("window_attention", shape.sizes, query.dtype, legal)
        config = config or default(query, key, value)
    options = _Options(window, scale, contiguous, config)
    numbers = (query, key, None if value is key else value, decay)
    return _attention(options, numbers, (query_position, key_position, visible_from))


class _Options(NamedTuple):
    window: int
    scale: float
    contiguous: bool
    config: Config


Numbers = tuple[Array, Array, Array | None, Array | None]
Places = tuple[Array, Array, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, numbers: Numbers, places: Places) -> Partial:
    query, key, value, decay = numbers
    query_position, key_position, visible_from = places
    least = jnp.zeros_like(query_position) if visible_from is None else visible_from
    low = jnp.maximum(jnp.maximum(query_position - (options.window - 1), least), 0)
    high = query_position + 1
    if options.contiguous:
        first = key_position[:, :1]
        low, high = low - first, high - first
    rows = flash_rows.rows_of(query, key.shape[2], low, high, decay)
    partial, _ = flash_sm90.attend(
        rows,
        key,
        value,
        scale=options.scale,
        config=options.config,
        key_position=None if options.contiguous else key_position,
        name="window_attention",
    )
    return flash_rows.by_token(partial, query.shape[2] // key.shape[2])


def _forward(
    options: _Options, numbers: Numbers, places: Places
) -> tuple[Partial, tuple[Numbers, Places]]:
    return _attention(options, numbers, places), (numbers, places)


def _backward(
    options: _Options, saved: tuple[Numbers, Places], slope: Partial
) -> tuple[Numbers, None]:
    numbers, (query_position, key_position, visible_from) = saved

    def differentiable(numbers: Numbers) -> Partial:
        query, key, value, decay = numbers
        return xla.window_attention(
            query,
            key,
            key if value is None else value,
            query_position,
            key_position,
            window=options.window,
            scale=options.scale,
            decay=decay,
            contiguous=options.contiguous,
            visible_from=visible_from,
        )

    return jax.vjp(differentiable, numbers)[1](slope)[0], None


_attention.defvjp(_forward, _backward)
