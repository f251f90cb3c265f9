"""Packing and unpacking of bfloat16 rows on registers, without tensor cores.

A block of `TILE` rows lies in one warpgroup, four lanes a row, so the largest magnitude
of a block of channels is a reduction within the row. Two neighbouring channels are read
as one 32-bit word: their codes then meet in one lane and are stored together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Target
from pallas_kernels.kv_quant import xla
from pallas_kernels.kv_quant.formats import Format, format_named
from pallas_kernels.tiles import by_tiles

TILE = 64
_TINY_BITS = 0x00800000
_INFINITY_BITS = 0x7F800000


def refuses_pack(
    target: Target, x: Any, *, format: str, rotary: int, size: int
) -> str | None:
    """Why rows are not packed by the kernel, or None."""
    del target, size
    if x.dtype != jnp.bfloat16:
        return f"packs bfloat16, not {x.dtype}"
    return _refuses_rotary(format_named(format), rotary)


def refuses_unpack(
    target: Target,
    records: Any,
    *,
    format: str,
    channels: int,
    rotary: int,
    dtype: Any,
) -> str | None:
    """Why records are not unpacked by the kernel, or None."""
    del target, channels
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"unpacks to bfloat16, not {jnp.dtype(dtype)}"
    spec = format_named(format)
    if records.shape[1] % 4:
        return f"reads records of whole 32-bit words, not {records.shape[1]} bytes"
    return _refuses_rotary(spec, rotary)


def _refuses_rotary(spec: Format, rotary: int) -> str | None:
    if rotary % 16:
        return f"takes a multiple of 16 rotary channels, not {rotary}"
    if rotary and spec.bits == 4:
        return f"keeps no rotary channels beside {spec.name} codes"
    return None


def pack(x: Array, *, format: str, rotary: int, size: int) -> Array:
    """uint8[n, size] records of bfloat16[n, c]."""
    rest = functools.partial(xla.pack, format=format, rotary=rotary, size=size)
    run = functools.partial(_pack, format_named(format), rotary=rotary, size=size)
    return by_tiles(run, rest, TILE, x)


def unpack(
    records: Array, *, format: str, channels: int, rotary: int, dtype: Any
) -> Array:
    """bfloat16[n, channels] of uint8[n, r] records."""

    def rest(rows: Array) -> Array:
        values = xla.unpack(rows, format=format, channels=channels, rotary=rotary)
        return values.astype(dtype)

    run = functools.partial(
        _unpack, format_named(format), channels=channels, rotary=rotary
    )
    return by_tiles(run, rest, TILE, records)


def _pack(spec: Format, x: Array, *, rotary: int, size: int) -> Array:
    n, channels = x.shape
    # Codes of two channels fill this word; a record is a whole number of words.
    word = jnp.uint16 if spec.bits == 8 else jnp.uint8
    width = jnp.dtype(word).itemsize
    words = -(-size // width)
    blocks, pairs = (channels - rotary) // spec.block, spec.block // 2
    code_bytes, scale_at = (
        spec.code_bytes(channels, rotary),
        spec.scale_at(channels, rotary),
    )
    used = scale_at + blocks * spec.scale_bytes

    def body(pair_ref, half_ref, out_ref):
        rows = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)

        def put(column: Any, value: Array) -> None:
            plgpu.store(out_ref.at[rows, column], value.astype(word), optimized=False)

        scales: list[Array] = []
        for block in range(blocks):
            pair = _load(pair_ref.at[rows, pl.ds(block * pairs, pairs)])
            low, high = _flush(pair << 16), _flush(pair & jnp.uint32(0xFFFF0000))
            size_bits = jnp.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF)
            largest = jnp.max(_signed(size_bits), axis=1)
            encode = _power_codes if spec.scale_bytes == 1 else _integer_codes
            codes, scale = encode(spec, (low, high), largest, pairs)
            finite = _over_columns(largest, pairs) < _INFINITY_BITS
            joined = codes[0] | codes[1] << spec.bits
            joined = jnp.where(finite, joined, jnp.zeros_like(joined))
            put(pl.ds(block * pairs, pairs), joined)
            scales += [scale >> 8 * i & 255 for i in range(spec.scale_bytes)]
        if rotary:
            start = channels - rotary
            tail = _load(half_ref.at[rows, pl.ds(start, rotary)])
            put(pl.ds(code_bytes // width, rotary), tail)
        # Zeros, but not a constant: those cannot be stored as one value a row.
        scales += [scales[0] >> 8] * (words * width - used)
        for i in range(0, len(scales), width):
            value = scales[i] if width == 1 else scales[i] | scales[i + 1] << 8
            put(scale_at // width + i // width, value)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, words), word),
        grid=(n // TILE,),
        grid_names=("tile",),
        kernel_name=f"kv_quant_pack_{spec.name}",
        cost_estimate=pl.CostEstimate(
            flops=8 * n * channels,
            transcendentals=0,
            bytes_accessed=n * (2 * channels + size),
        ),
    )(_words(x, jnp.uint32), _words(x, jnp.uint16))
    return _words(out, jnp.uint8)[:, :size]


def _unpack(spec: Format, records: Array, *, channels: int, rotary: int) -> Array:
    n, size = records.shape
    word = jnp.uint16 if spec.bits == 8 else jnp.uint8
    blocks, pairs = (channels - rotary) // spec.block, spec.block // 2
    code_bytes, scale_at = (
        spec.code_bytes(channels, rotary),
        spec.scale_at(channels, rotary),
    )

    def body(word_ref, byte_ref, tail_ref, out_ref):
        rows = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)

        def put(column: Any, value: Array) -> None:
            plgpu.store(out_ref.at[rows, column], value, optimized=False)

        for block in range(blocks):
            codes = _load(word_ref.at[rows, pl.ds(block * pairs, pairs)])
            codes = codes.astype(jnp.uint32)
            at = scale_at + block * spec.scale_bytes
            scale = _row(byte_ref.at[rows, at])
            if spec.scale_bytes == 2:
                scale = scale | _row(byte_ref.at[rows, at + 1]) << 8
                bits = scale << 16
            else:
                bits = jnp.where(
                    scale == 255,
                    jnp.full_like(scale, 0x7FC00000),
                    jnp.maximum(scale, jnp.ones_like(scale)) << 23,
                )
            factor = _over_columns(_float(bits), pairs)
            mask = (1 << spec.bits) - 1
            low = _bfloat16_bits(_value(spec, codes & mask) * factor)
            high = _bfloat16_bits(_value(spec, codes >> spec.bits & mask) * factor)
            put(pl.ds(block * pairs, pairs), low | high << 16)
        if rotary:
            tail = _load(tail_ref.at[rows, pl.ds(code_bytes // 4, rotary // 2)])
            put(pl.ds((channels - rotary) // 2, rotary // 2), tail)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, channels // 2), jnp.uint32),
        grid=(n // TILE,),
        grid_names=("tile",),
        kernel_name=f"kv_quant_unpack_{spec.name}",
        cost_estimate=pl.CostEstimate(
            flops=6 * n * channels,
            transcendentals=0,
            bytes_accessed=n * (2 * channels + size),
        ),
    )(_words(records, word), records, _words(records, jnp.uint32))
    return _words(out, jnp.bfloat16)


def _words(x: Array, dtype: Any) -> Array:
    """Rows seen as elements of another width: no bytes move."""
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if new > old:
        x = x.reshape(len(x), x.shape[1] * old // new, new // old)
    width = x.size * old // len(x) // new
    return jax.lax.bitcast_convert_type(x, dtype).reshape(len(x), width)


def _load(ref: Any) -> Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def _row(ref: Any) -> Array:
    value = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return value.astype(jnp.uint32)


def _over_columns(x: Array, columns: int) -> Array:
    return jax.lax.broadcast_in_dim(x, (TILE, columns), (0,))


def _float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _signed(x: Array) -> Array:
    return x.astype(jnp.int32)


def _flush(bits: Array) -> Array:
    """Denormal numbers become zeros of their sign, as everywhere."""
    tiny = (bits & 0x7FFFFFFF) < _TINY_BITS
    return jnp.where(tiny, bits & jnp.uint32(0x80000000), bits)


def _power_codes(
    spec: Format, halves: tuple[Array, Array], largest: Array, pairs: int
) -> tuple[tuple[Array, Array], Array]:
    limit = int.from_bytes(np.float32(spec.largest).tobytes(), "little")
    mantissa = 0x7FFFFF
    above = (largest & mantissa) > (limit & mantissa)
    byte = (largest >> 23) - (limit >> 23) + 127 + above.astype(jnp.int32)
    byte = jnp.maximum(byte, jnp.ones_like(byte))
    finite = largest < _INFINITY_BITS
    inverse = _over_columns(_float((254 - byte).astype(jnp.uint32) << 23), pairs)
    encode = _e4m3 if spec.bits == 8 else _e2m1
    codes = tuple(encode(_bits(_float(half) * inverse)) for half in halves)
    byte = jnp.where(finite, byte, jnp.full_like(byte, 255))
    return (codes[0], codes[1]), byte.astype(jnp.uint32)


def _e4m3(bits: Array) -> Array:
    """Codes of float32 bits of at most 448, to nearest and ties to even."""
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    # Adding 2^14 leaves multiples of the denormal step 2^-9 in the low bits.
    denormal = _bits(_float(size) + 16384.0) & 0xFF
    code = jnp.where(size < 121 << 23, denormal, normal)
    return code | bits >> 24 & 0x80


def _e2m1(bits: Array) -> Array:
    size = bits & 0x7FFFFFFF
    normal = (size + 0x1FFFFF + (size >> 22 & 1) >> 22) - (126 << 1)
    # Adding 2^22 leaves multiples of 1/2 in the low bits.
    denormal = _bits(_float(size) + 4194304.0) & 0x7
    code = jnp.where(size < 127 << 23, denormal, normal)
    return code | bits >> 28 & 0x8


def _integer_codes(
    spec: Format, halves: tuple[Array, Array], largest: Array, pairs: int
) -> tuple[tuple[Array, Array], Array]:
    top = jnp.float32(spec.largest)
    scale = _bfloat16_bits(_float(largest.astype(jnp.uint32)) / top)
    scale = jnp.where(scale < _TINY_BITS >> 16, jnp.zeros_like(scale), scale)
    finite = largest < _INFINITY_BITS
    divisor = _over_columns(_float(scale << 16), pairs)
    empty = divisor == 0.0
    divisor = jnp.where(empty, jnp.ones_like(divisor), divisor)

    def encode(half: Array) -> Array:
        ratio = jnp.where(empty, jnp.zeros_like(divisor), _float(half)) / divisor
        ratio = jnp.minimum(jnp.maximum(ratio, -top), top)
        # Adding 1.5 · 2^23 rounds to an integer, to nearest and ties to even, and
        # leaves its two's complement in the low bits.
        return _bits(ratio + 12582912.0) & ((1 << spec.bits) - 1)

    scale = jnp.where(finite, scale, jnp.full_like(scale, 0x7FC0))
    return (encode(halves[0]), encode(halves[1])), scale


def _value(spec: Format, code: Array) -> Array:
    if spec.scale_bytes == 2:
        sign = 1 << spec.bits - 1
        return ((code ^ sign).astype(jnp.int32) - sign).astype(jnp.float32)
    exponent_bits, mantissa_bits = (4, 3) if spec.bits == 8 else (2, 1)
    bias = (1 << exponent_bits - 1) - 1
    size = code & ((1 << spec.bits - 1) - 1)
    normal = _float((size << 23 - mantissa_bits) + (127 - bias << 23))
    step = 2.0 ** (1 - bias - mantissa_bits)
    denormal = size.astype(jnp.int32).astype(jnp.float32) * step
    value = jnp.where(size < 1 << mantissa_bits, denormal, normal)
    if spec.bits == 8:
        value = jnp.where(size == 0x7F, jnp.full_like(value, jnp.nan), value)
    sign = code >> spec.bits - 1 << 31
    return _float(_bits(value) | sign)


def _bfloat16_bits(x: Array) -> Array:
    """The upper half of float32, to nearest and ties to even; NaN stays NaN."""
    bits = _bits(x)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    nan = (bits & 0x7FFFFFFF) > _INFINITY_BITS
    return jnp.where(nan, jnp.full_like(rounded, 0x7FC0), rounded)
