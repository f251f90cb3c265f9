"""Transforms on tensor cores, alone or in one kernel with packing or unpacking."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import tuned
from pallas_kernels.abi import MEMORY_RULES
from pallas_kernels.codec_transform import product_sm90, xla
from pallas_kernels.codec_transform.product_sm90 import Config, Plan
from pallas_kernels.device import Target
from pallas_kernels.kv_quant.formats import format_named
from pallas_kernels.kv_quant.registers import TILE
from pallas_kernels.tiles import by_tiles

_CAPABILITY = (9, 0)
_MOST_CHANNELS = 128


def refuses(target: Target, x: Any, tokens: Any, channels: Any) -> str | None:
    """Why a transform is not served, or None; arguments as `transform`."""
    del target
    if x.dtype != jnp.bfloat16:
        return f"transforms bfloat16, not {x.dtype}"
    if tokens is None and channels is None:
        return "has no product to compute"
    return _refuses(x.shape[1], x.shape[2], tokens)


def refuses_pack(
    target: Target, x: Any, tokens: Any, channels: Any, **options: Any
) -> str | None:
    """Why packing is not served, or None; arguments as `transform_pack`."""
    del target, channels, options
    if x.dtype != jnp.bfloat16:
        return f"transforms bfloat16, not {x.dtype}"
    return _refuses(x.shape[1], x.shape[2], tokens)


def refuses_unpack(
    target: Target,
    records: Any,
    tokens: Any,
    channels: Any,
    *,
    width: int,
    **options: Any,
) -> str | None:
    """Why unpacking is not served, or None; arguments as `unpack_inverse`."""
    del target, channels, options
    return _refuses(records.shape[1], width, tokens)


def _refuses(group: int, width: int, tokens: Any) -> str | None:
    if width % 16 or not 0 < width <= _MOST_CHANNELS:
        return f"takes a multiple of 16 up to {_MOST_CHANNELS} channels, not {width}"
    if tokens is not None and (group == 0 or TILE % group):
        return f"takes groups of a divisor of {TILE} tokens, not {group}"
    return None


def configurations(plan: Plan) -> tuple[Config, ...]:
    """The configurations of a kernel."""
    most = MEMORY_RULES[_CAPABILITY].shared_memory
    configs = [
        Config(blocks=blocks, stages=stages)
        for blocks in (1, 2, 4)
        for stages in ((1, 2, 4) if plan.unpacks is None else (1,))
    ]
    # Barriers, and what the compiler keeps for itself.
    return tuple(
        config
        for config in configs
        if config.blocks * (plan.shared_bytes(config) + 2560) <= most
    )


def default(plan: Plan) -> Config:
    """The configuration of a kernel that no table knows: most tiles in flight."""
    legal = configurations(plan)
    return max(legal, key=lambda config: (config.blocks * config.stages, config.blocks))


def transform(
    x: Array,
    tokens: Array | None,
    channels: Array | None,
    *,
    config: Config | None = None,
) -> Array:
    """float32[n, s, c] as ``xla.transform``; the gradient is XLA's.

    Args:
      x: bfloat16[n, s, c]; tokens: float32[s, s]; channels: float32[c, c].
      config: of `configurations`; None for the tuned or the default one.

    A number that is not finite makes NaN of what depends on it: its row, where channels
    are transformed, and its group, where tokens are.
    """
    return _transform(config, x, tokens, channels)


def inverse(
    x: Array,
    tokens: Array | None,
    channels: Array | None,
    *,
    config: Config | None = None,
) -> Array:
    """float32[n, s, c] as ``xla.inverse``; arguments as `transform`."""
    tokens, channels = (None if m is None else m.T for m in (tokens, channels))
    return _transform(config, x, tokens, channels)


def transform_pack(
    x: Array,
    tokens: Array | None,
    channels: Array | None,
    *,
    format: str,
    size: int,
    config: Config | None = None,
) -> Array:
    """uint8[n, s, size] as ``xla.transform_pack``; x bfloat16."""
    n, group, width = x.shape
    plan = Plan(
        width=width,
        tokens=0 if tokens is None else group,
        channels=True,
        packs=format_named(format),
    )
    # A product divides the channels for the codes, be it with the unit matrix.
    basis = jnp.eye(width) if channels is None else channels.T
    rest = functools.partial(xla.transform_pack, format=format, size=size)

    def run(rows: Array, bases: list[Array], config: Config) -> Array:
        words = product_sm90.run(plan, rows, bases, size, config=config)
        out = jax.lax.bitcast_convert_type(words, jnp.uint8)
        return out.reshape(len(rows), size)

    def others(rows: Array) -> Array:
        groups = _groups(rows, plan)
        return rest(groups, tokens, channels).reshape(len(rows), size)

    rows = x.reshape(n * group, width)
    out = _by_tiles(plan, run, others, rows, basis, tokens, config)
    return out.reshape(n, group, size)


def unpack_inverse(
    records: Array,
    tokens: Array | None,
    channels: Array | None,
    *,
    format: str,
    width: int,
    config: Config | None = None,
) -> Array:
    """float32[n, s, width] as ``xla.unpack_inverse``; the gradient is XLA's."""
    return _unpack_inverse((format, width, config), records, tokens, channels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpack_inverse(
    options: tuple[str, int, Config | None],
    records: Array,
    tokens: Array | None,
    channels: Array | None,
) -> Array:
    format, width, config = options
    n, group, size = records.shape
    plan = Plan(
        width=width,
        tokens=0 if tokens is None else group,
        channels=True,
        unpacks=format_named(format),
    )
    basis = jnp.eye(width) if channels is None else channels

    def run(rows: Array, bases: list[Array], config: Config) -> Array:
        return product_sm90.run(plan, rows, bases, 0, config=config)

    def others(rows: Array) -> Array:
        groups = _groups(rows, plan)
        out = xla.unpack_inverse(groups, tokens, channels, format=format, width=width)
        return out.reshape(len(rows), width)

    turned = None if tokens is None else tokens.T
    rows = records.reshape(n * group, size)
    out = _by_tiles(plan, run, others, rows, basis, turned, config)
    return out.reshape(n, group, width)


def _unpack_forward(options: Any, *arrays: Any) -> tuple[Array, Any]:
    return _unpack_inverse(options, *arrays), arrays


def _unpack_backward(options: Any, saved: Any, slope: Array) -> Any:
    format, width, _ = options
    records, *bases = saved

    def differentiable(*bases: Any) -> Array:
        return xla.unpack_inverse(records, *bases, format=format, width=width)

    return None, *jax.vjp(differentiable, *bases)[1](slope)


_unpack_inverse.defvjp(_unpack_forward, _unpack_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transform(
    config: Config | None, x: Array, tokens: Array | None, channels: Array | None
) -> Array:
    n, group, width = x.shape
    plan = Plan(
        width=width,
        tokens=0 if tokens is None else group,
        channels=channels is not None,
    )

    def run(rows: Array, bases: list[Array], config: Config) -> Array:
        return product_sm90.run(plan, rows, bases, 0, config=config)

    def others(rows: Array) -> Array:
        groups = _groups(rows, plan)
        return xla.transform(groups, tokens, channels).reshape(rows.shape)

    basis = None if channels is None else channels.T
    rows = x.reshape(n * group, width)
    return _by_tiles(plan, run, others, rows, basis, tokens, config).reshape(x.shape)


def _forward(config: Config | None, *arrays: Any) -> tuple[Array, Any]:
    return _transform(config, *arrays), arrays


def _backward(config: Config | None, saved: Any, slope: Array) -> Any:
    del config
    return jax.vjp(xla.transform, *saved)[1](slope)


_transform.defvjp(_forward, _backward)


def _groups(rows: Array, plan: Plan) -> Array:
    """[n, s, c] of rows; a tile may end within a group whose tokens stay apart."""
    group = max(1, plan.tokens)
    return rows.reshape(len(rows) // group, group, rows.shape[1])


def _by_tiles(
    plan: Plan,
    run: Any,
    others: Any,
    rows: Array,
    channels: Array | None,
    tokens: Array | None,
    config: Config | None,
) -> Array:
    if config is None:
        sizes = {"c": plan.width, "s": max(1, plan.tokens), "n": max(1, len(rows))}
        op = "codec_transform"
        if plan.packs or plan.unpacks:
            op += ".pack" if plan.packs else ".unpack"
        legal = configurations(plan)
        config = tuned.choose(op, sizes, rows.dtype, legal) or default(plan)
    bases = product_sm90.products(plan, channels, tokens)
    kernel = functools.partial(run, bases=bases, config=config)
    return by_tiles(kernel, others, TILE, rows)
