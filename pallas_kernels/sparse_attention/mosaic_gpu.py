"""Attention over chosen bfloat16 entries for compute capability 9.0."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import flash_config, tuned
from pallas_kernels.device import Target
from pallas_kernels.softmax import Partial
from pallas_kernels.sparse_attention import xla
from pallas_kernels.sparse_attention.config import Config, Sizes, best, legal
from pallas_kernels.sparse_attention.gather_sm90 import Fetch, attend


def sizes_of(query: Any, key: Any, value: Any, chosen: Any) -> Sizes:
    """The `Sizes` of a call."""
    b, t, n, h = query.shape
    _, e, k, _ = key.shape
    return Sizes(b, t, k, n // k, e, h, chosen.shape[2], 1 if value is key else 2)


def configurations(query: Any, key: Any, value: Any, chosen: Any) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract."""
    return legal(sizes_of(query, key, value, chosen))


def default(query: Any, key: Any, value: Any, chosen: Any) -> Config:
    """The configuration of a call that no table knows."""
    return best(
        configurations(query, key, value, chosen),
        sizes_of(query, key, value, chosen),
    )


def refuses(
    target: Target,
    query: Any,
    key: Any,
    value: Any,
    chosen: Any,
    *,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> str | None:
    """Why a call is not served, or None."""
    del target, scale, mass_block, config
    reason = flash_config.refuses(query, key, value)
    if reason is None and not legal(sizes_of(query, key, value, chosen)):
        reason = f"keeps lists in shared memory, not {chosen.shape[2]} entries each"
    return reason


def sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    chosen: Array,
    *,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> Partial | tuple[Partial, Array]:
    """Softmax sums over chosen entries; the gradient is XLA's.

    Args:
      query, key, value: bfloat16; the others as ``api.sparse_attention``.
      config: of `configurations`; None for the tuned or the default one.
    """
    sizes = sizes_of(query, key, value, chosen)
    if sizes.empty:
        return xla.sparse_attention(
            query, key, value, chosen, scale=scale, mass_block=mass_block
        )
    config = config or choose("sparse_attention", sizes)
    entries = (key,) if value is key else (key, value)
    return _attend(scale, mass_block, config, query, entries, chosen)


def choose(op: str, sizes: Sizes) -> Config:
    """The tuned configuration, or the default one."""
    configs = legal(sizes)
    return tuned.choose(op, sizes.names, jnp.bfloat16, configs) or best(configs, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
    scale: float,
    mass_block: int | None,
    config: Config,
    query: Array,
    entries: tuple[Array, ...],
    chosen: Array,
) -> Partial | tuple[Partial, Array]:
    key, value = entries[0], entries[-1]
    sizes = sizes_of(query, key, value, chosen)
    shape, swizzle = sizes.flash, sizes.swizzle(config)

    def copies(array: Any, entry: Any, head: Any, staged: Any, row: Any) -> Any:
        return array.at[entry, head], staged.at[row]

    def ready(staged: Any, tile: Any) -> None:
        for part in range(shape.parts):
            rows = staged.at[:, part]
            layout = plgpu.Layout.SMEM_GMEM_COPY(rows.shape, rows.dtype, swizzle)
            tile.at[part][...] = plgpu.load(rows, layout=layout)

    fetch = Fetch(
        tuple(
            x.reshape(sizes.b * sizes.e, sizes.k, shape.parts, shape.channels)
            for x in entries
        ),
        lambda *lead: plgpu.SMEM(
            (*lead, shape.parts, shape.channels), entries[0].dtype
        ),
        copies,
        ready,
    )
    return attend(
        query,
        chosen,
        sizes,
        fetch,
        scale=scale,
        mass_block=mass_block,
        config=config,
        name="sparse_attention",
    )


def _forward(scale, mass_block, config, *saved):
    return _attend(scale, mass_block, config, *saved), saved


def _backward(scale, mass_block, config, saved, slope):
    del config
    query, entries, chosen = saved

    def differentiable(query, entries):
        return xla.sparse_attention(
            query,
            entries[0],
            entries[-1],
            chosen,
            scale=scale,
            mass_block=mass_block,
        )

    return *jax.vjp(differentiable, query, entries)[1](slope), None


_attend.defvjp(_forward, _backward)
