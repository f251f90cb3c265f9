"""Chosen entries in packed fp8 records, unpacked on their way to the matrix products.

A record's 32-bit words are split into their bytes, each in one place of its word: 16
columns of a tile are every fourth channel. The order of channels does not matter to
a logit as long as the query has it too, and the sums get the old order back outside.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import flash_config
from pallas_kernels.device import Target
from pallas_kernels.kv_quant.formats import format_named
from pallas_kernels.softmax import Partial
from pallas_kernels.sparse_attention import mosaic_gpu, xla
from pallas_kernels.sparse_attention.config import Config, Sizes, best, legal
from pallas_kernels.sparse_attention.gather_sm90 import Fetch, attend

# Words whose bytes fill the columns of one swizzled row each.
_WORDS = 16
# Most elements along an axis that one bulk copy moves.
_MOST_COPIED = 256


def sizes_of(query: Any, records: Any, chosen: Any) -> Sizes:
    """The `Sizes` of a call."""
    b, t, n, h = query.shape
    _, e, record = records.shape
    return Sizes(b, t, 1, n, e, h, chosen.shape[2], 1, record)


def configurations(query: Any, records: Any, chosen: Any) -> tuple[Config, ...]:
    """The configurations of a call; arrays may be abstract."""
    return legal(sizes_of(query, records, chosen))


def default(query: Any, records: Any, chosen: Any) -> Config:
    """The configuration of a call that no table knows."""
    return best(
        configurations(query, records, chosen), sizes_of(query, records, chosen)
    )


def refuses(
    target: Target,
    query: Any,
    records: Any,
    chosen: Any,
    *,
    format: str,
    rotary: int,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> str | None:
    """Why a call is not served, or None."""
    del target, scale, mass_block, config
    b, e, record = records.shape
    if format != "fp8":
        return f"reads fp8 records, not {format}"
    if rotary % (2 * _WORDS):
        return f"takes a multiple of {2 * _WORDS} rotary channels, not {rotary}"
    # Bulk copies want rows at multiples of 16 bytes: of one record, or of two.
    if record % 8 or (record % 16 and b * e % 2):
        return f"copies records of 16 bytes, or pairs of 8, not {b * e} of {record}"
    if _copied_words(record) > _MOST_COPIED:
        return f"copies records of up to {4 * _MOST_COPIED} bytes, not {record}"
    reason = flash_config.refuses(query, query, query)
    if reason is None and not legal(sizes_of(query, records, chosen)):
        reason = f"keeps lists in shared memory, not {chosen.shape[2]} entries each"
    return reason


def sparse_attention(
    query: Array,
    records: Array,
    chosen: Array,
    *,
    format: str,
    rotary: int,
    scale: float,
    mass_block: int | None = None,
    config: Config | None = None,
) -> Partial | tuple[Partial, Array]:
    """Softmax sums over chosen records; the query's gradient is XLA's.

    Args:
      query: bfloat16; the others as ``api.sparse_attention_packed``.
      format, rotary: of the records, see `kv_quant`.
      config: of `configurations`; None for the tuned or the default one.
    """
    sizes = sizes_of(query, records, chosen)
    options = _Options(format, rotary, scale, mass_block)
    if sizes.empty:
        return _xla(options, query, records, chosen)
    config = config or mosaic_gpu.choose("sparse_attention_packed", sizes)
    return _attend(options, config, query, records, chosen)


class _Options(NamedTuple):
    format: str
    rotary: int
    scale: float
    mass_block: int | None


def _xla(options: _Options, query: Array, records: Array, chosen: Array) -> Any:
    return xla.sparse_attention_packed(query, records, chosen, **options._asdict())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    options: _Options, config: Config, query: Array, records: Array, chosen: Array
) -> Partial | tuple[Partial, Array]:
    sizes, rotary = sizes_of(query, records, chosen), options.rotary
    result = attend(
        split_words(query, rotary),
        chosen,
        sizes,
        _fetch(options.format, rotary, records, sizes, config),
        scale=options.scale,
        mass_block=options.mass_block,
        config=config,
        name="sparse_attention_packed",
    )
    partial = result if isinstance(result, Partial) else result[0]
    joined = partial._replace(weighted=join_words(partial.weighted, rotary))
    return joined if isinstance(result, Partial) else (joined, result[1])


def _forward(options, config, *saved):
    return _attend(options, config, *saved), saved


def _backward(options, config, saved, slope):
    del config
    query, records, chosen = saved
    _, pull = jax.vjp(lambda query: _xla(options, query, records, chosen), query)
    return *pull(slope), None, None


_attend.defvjp(_forward, _backward)


def split_words(x: Array, rotary: int) -> Array:
    """Channels [..., h] in the order of the tiles' columns."""
    return _reordered(x, rotary, (_WORDS, 4), (_WORDS, 2))


def join_words(x: Array, rotary: int) -> Array:
    """Columns of the tiles [..., h] in the order of channels."""
    return _reordered(x, rotary, (4, _WORDS), (2, _WORDS))


def _reordered(
    x: Array, rotary: int, codes: tuple[int, int], floats: tuple[int, int]
) -> Array:
    quantised = x.shape[-1] - rotary
    return jnp.concatenate(
        [
            part.reshape(*x.shape[:-1], -1, *shape).swapaxes(-1, -2).reshape(part.shape)
            for part, shape in (
                (x[..., :quantised], codes),
                (x[..., quantised:], floats),
            )
        ],
        axis=-1,
    )


def _copied_words(record: int) -> int:
    """32-bit words that are copied to read a record.

    One of 8 bytes more than a multiple of 16 is copied with what follows it.
    """
    return -(-record // 16) * 4


def _fetch(
    format: str, rotary: int, records: Array, sizes: Sizes, config: Config
) -> Fetch:
    spec, channels = format_named(format), sizes.flash.channels
    swizzle = sizes.swizzle(config)
    blocks = (sizes.h - rotary) // spec.block
    scales_at = spec.scale_at(sizes.h, rotary) // 4
    words = sizes.record // 4
    copied = _copied_words(sizes.record)
    paired = copied != words
    rows = sizes.b * sizes.e
    shape = (rows // 2, 2 * words) if paired else (rows, words)
    array = jax.lax.bitcast_convert_type(
        records.reshape(rows, words, 4), jnp.uint32
    ).reshape(shape)

    def copies(array: Any, entry: Any, head: Any, staged: Any, row: Any) -> Any:
        del head
        first = 0
        if paired:
            entry, first = jax.lax.div(entry, 2), jax.lax.rem(entry, 2) * words
        source = array.at[pl.ds(entry, 1), pl.ds(first, copied)]
        # Of two axes: layout inference fails for a part of a row.
        return source, staged.at[pl.ds(row, 1), pl.ds(0, copied)]

    def ready(staged: Any, tile: Any) -> None:
        part = staged.shape[0]
        layout = plgpu.Layout.SMEM_GMEM_COPY((part, _WORDS), jnp.bfloat16, swizzle)

        def store(column: int, values: Array) -> None:
            warpgroup, column = divmod(column, channels)
            target = tile.at[warpgroup, :, pl.ds(column, _WORDS)]
            target[...] = values.astype(jnp.bfloat16)

        def load(word: int) -> Array:
            source = staged.at[:, pl.ds(word, _WORDS)]
            # Rows lie at multiples of 128 bytes, so that two of them share banks.
            return plgpu.load(source, layout=layout, optimized=False)

        # The scales, a word of four each, are found in their rows by a sum: layout
        # inference takes no column of a scratch.
        tail = _signed(load(scales_at))
        column = plgpu.broadcasted_iota(jnp.int32, (part, _WORDS), 1, layout=layout)
        scales = [
            jnp.sum(jnp.where(column == i, tail, jnp.zeros_like(tail)), axis=1)
            for i in range(-(-blocks // 4))
        ]
        for block in range(blocks):
            scale = scales[block // 4].astype(jnp.uint32)
            factor = _power(scale >> 8 * (block % 4) & 255)
            factor = jax.lax.broadcast_in_dim(factor, (part, _WORDS), (0,))
            codes = load(block * _WORDS)
            for i in range(4):
                value = _e4m3(codes >> 8 * i & 255)
                store(block * spec.block + i * _WORDS, value * factor)
        start = sizes.h - rotary
        for chunk in range(rotary // (2 * _WORDS)):
            pair = load(start // 4 + chunk * _WORDS)
            for i, bits in enumerate((pair << 16, pair & jnp.uint32(0xFFFF0000))):
                column = start + (2 * chunk + i) * _WORDS
                store(column, jax.lax.bitcast_convert_type(bits, jnp.float32))

    return Fetch(
        (array,),
        lambda *lead: plgpu.SMEM((*lead, sizes.staged // 4), jnp.uint32),
        copies,
        ready,
    )


def _signed(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _power(byte: Array) -> Array:
    """The scale of a byte: 2^(byte - 127), 255 is NaN."""
    bits = jnp.maximum(byte, jnp.ones_like(byte)) << 23
    bits = jnp.where(byte == 255, jnp.full_like(bits, 0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _e4m3(code: Array) -> Array:
    """float32 of codes 0..255 in uint32."""
    size = code & 0x7F
    value = jax.lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    # Denormal numbers lack the leading one.
    value = jnp.where(size < 8, 2 * value - 2.0**-6, value)
    value = jnp.where(size == 0x7F, jnp.full_like(value, jnp.nan), value)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) | (code >> 7 << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
