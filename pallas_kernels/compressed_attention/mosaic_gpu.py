"""Attention over visible entries on the tensor cores of compute capability 9.0.

A tile of rows reads the blocks of entries from the first to the last that any of its
rows sees. A step of few queries divides them between blocks of the grid and merges the
sums by their maxima, so that one long history occupies the whole device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import flash_config, flash_rows, flash_sm90, tuned
from pallas_kernels.compressed_attention import xla
from pallas_kernels.device import Target
from pallas_kernels.flash_config import Config, shape_of
from pallas_kernels.softmax import Partial

# The smallest block of keys, whose shares are the finest that are summed.
_LEAST_MASS = 64


def refuses(
    target: Target,
    query: Any,
    key: Any,
    value: Any,
    *args: Any,
    mass_block: int | None = None,
    **options: Any,
) -> str | None:
    """Why a call is not served, or None; arguments as `compressed_attention`."""
    del target, args, options
    if mass_block is not None and mass_block % _LEAST_MASS:
        return f"sums the mass of multiples of {_LEAST_MASS} entries, not {mass_block}"
    return flash_config.refuses(query, key, value)


def configurations(
    query: Any, key: Any, value: Any, *, mass_block: int | None = None
) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract."""
    shape = shape_of(query, key, value)
    most = flash_config.usual_splits(shape)
    splits = tuple(sorted({max(most // 2, 1), most}))
    return tuple(
        config
        for config in flash_config.legal(shape, splits)
        if mass_block is None or mass_block % config.block_k == 0
    )


def default(
    query: Any, key: Any, value: Any, *, mass_block: int | None = None
) -> Config:
    """The configuration of a call that no table knows."""
    legal = configurations(query, key, value, mass_block=mass_block)
    most = flash_config.usual_splits(shape_of(query, key, value))
    return flash_config.best([config for config in legal if config.splits == most])


def compressed_attention(
    query: Array,
    key: Array,
    value: Array,
    visible: Array,
    *,
    scale: float,
    static: bool,
    visible_from: Array | None = None,
    mass_block: int | None = None,
    config: Config | None = None,
) -> Partial | tuple[Partial, Array]:
    """Softmax sums over visible entries; the gradient is XLA's.

    Args:
      query, key, value: bfloat16; the others as ``api.compressed_attention``. Entries
        from the last that a query of a row sees may hold NaN.
      static: makes no difference: both are differentiable and read what is visible.
      config: of `configurations`; None for the tuned or the default one.

    Copies are of 8 entries: keep a multiple of them, or all are copied once before.
    """
    del static
    if config is None:
        legal = configurations(query, key, value, mass_block=mass_block)
        shape = shape_of(query, key, value)
        if not shape.empty:
            config = tuned.choose(
                "compressed_attention", shape.sizes, query.dtype, legal
            )
        config = config or default(query, key, value, mass_block=mass_block)
    numbers = (query, key, None if value is key else value)
    options = _Options(scale, mass_block, config)
    partial, mass = _attention(options, numbers, (visible, visible_from))
    return partial if mass is None else (partial, mass)


class _Options(NamedTuple):
    scale: float
    mass_block: int | None
    config: Config


Numbers = tuple[Array, Array, Array | None]
Places = tuple[Array, Array | None]
Sums = tuple[Partial, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: _Options, numbers: Numbers, places: Places) -> Sums:
    query, key, value = numbers
    visible, visible_from = places
    k = key.shape[2]
    group = query.shape[2] // k
    low = jnp.zeros_like(visible) if visible_from is None else visible_from
    partial, mass = flash_sm90.attend(
        flash_rows.rows_of(query, k, low, visible),
        key,
        value,
        scale=options.scale,
        config=options.config,
        poisoned=True,
        mass_block=options.mass_block,
        name="compressed_attention",
    )
    if mass is not None:
        b, t = visible.shape
        mass = mass.reshape(b, k, t, group, mass.shape[3])
        mass = jnp.mean(mass, axis=(1, 3))
    return flash_rows.by_token(partial, group), mass


def _forward(
    options: _Options, numbers: Numbers, places: Places
) -> tuple[Sums, tuple[Numbers, Places]]:
    return _attention(options, numbers, places), (numbers, places)


def _backward(
    options: _Options, saved: tuple[Numbers, Places], slope: Sums
) -> tuple[Numbers, None]:
    numbers, (visible, visible_from) = saved

    def differentiable(numbers: Numbers) -> Any:
        query, key, value = numbers
        return xla.compressed_attention(
            query,
            key,
            key if value is None else value,
            visible,
            scale=options.scale,
            static=True,
            visible_from=visible_from,
            mass_block=options.mass_block,
        )

    given = slope[0] if options.mass_block is None else slope
    return jax.vjp(differentiable, numbers)[1](given)[0], None


_attention.defvjp(_forward, _backward)
