"""Codes of rows held in registers, without tensor cores.

A tile of `TILE` rows lies in one warpgroup, four lanes a row, so the largest magnitude
of a block of channels is a reduction within the row. The even and the odd channels of a
block are two arrays: the codes of a pair then meet in one lane.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.kv_quant import codes
from pallas_kernels.kv_quant.codes import INFINITY, TINY, flush, from_bits, to_bits
from pallas_kernels.kv_quant.formats import Format
from pallas_kernels.register_tiles import ROWS, over_columns

TILE = ROWS


def word(spec: Format) -> Any:
    """The type that the codes of two channels fill."""
    return jnp.uint16 if spec.bits == 8 else jnp.uint8


def encode(spec: Format, even: Array, odd: Array) -> tuple[Array, list[Array]]:
    """Codes and scale of one block of channels.

    Args:
      even, odd: uint32[TILE, pairs], the bits of float32 numbers.

    Returns:
      (codes uint32[TILE, pairs], of the even channel in the low bits; the bytes of the
      scale, uint32[TILE] each, of which the low 8 bits count).
    """
    pairs = even.shape[1]
    even, odd = flush(even), flush(odd)
    largest = jnp.max(_signed(jnp.maximum(even & 0x7FFFFFFF, odd & 0x7FFFFFFF)), axis=1)
    codes_of = _power_codes if spec.scale_bytes == 1 else _integer_codes
    halves, scale = codes_of(spec, (even, odd), largest, pairs)
    finite = over_columns(largest, pairs) < INFINITY
    joined = halves[0] | halves[1] << spec.bits
    joined = jnp.where(finite, joined, jnp.zeros_like(joined))
    return joined, [scale >> 8 * i & 255 for i in range(spec.scale_bytes)]


def put_scales(
    put: Callable[[int, Array], None], spec: Format, scales: list[Array], first: int
) -> None:
    """Stores bytes of scales as words.

    Args:
      put: stores uint32[TILE] in the column of words that it is given.
      scales: uint32[TILE] each, a whole number of words.
      first: byte of the record.
    """
    width = jnp.dtype(word(spec)).itemsize
    for i in range(0, len(scales), width):
        low = scales[i]
        put((first + i) // width, low if width == 1 else low | scales[i + 1] << 8)


def decode(spec: Format, codes: Array, scale: list[Array]) -> tuple[Array, Array]:
    """float32[TILE, pairs] of the even and of the odd channels of a block.

    Args:
      codes: uint32[TILE, pairs]; scale: its bytes, uint32[TILE] each.
    """
    if spec.scale_bytes == 2:
        bits = (scale[0] | scale[1] << 8) << 16
    else:
        bits = jnp.where(
            scale[0] == 255,
            jnp.full_like(scale[0], 0x7FC00000),
            jnp.maximum(scale[0], jnp.ones_like(scale[0])) << 23,
        )
    factor = over_columns(from_bits(bits), codes.shape[1])
    mask = (1 << spec.bits) - 1
    even = _value(spec, codes & mask) * factor
    return even, _value(spec, codes >> spec.bits & mask) * factor


def _signed(x: Array) -> Array:
    return x.astype(jnp.int32)


def _power_codes(
    spec: Format, halves: tuple[Array, Array], largest: Array, pairs: int
) -> tuple[tuple[Array, Array], Array]:
    limit = int.from_bytes(np.float32(spec.largest).tobytes(), "little")
    mantissa = 0x7FFFFF
    above = (largest & mantissa) > (limit & mantissa)
    byte = (largest >> 23) - (limit >> 23) + 127 + above.astype(jnp.int32)
    byte = jnp.maximum(byte, jnp.ones_like(byte))
    finite = largest < INFINITY
    inverse = over_columns(from_bits((254 - byte).astype(jnp.uint32) << 23), pairs)
    encode = codes.e4m3 if spec.bits == 8 else codes.e2m1
    even, odd = (encode(to_bits(from_bits(half) * inverse)) for half in halves)
    byte = jnp.where(finite, byte, jnp.full_like(byte, 255))
    return (even, odd), byte.astype(jnp.uint32)


def _integer_codes(
    spec: Format, halves: tuple[Array, Array], largest: Array, pairs: int
) -> tuple[tuple[Array, Array], Array]:
    top = jnp.float32(spec.largest)
    scale = bfloat16_bits(from_bits(largest.astype(jnp.uint32)) / top)
    scale = jnp.where(scale < TINY >> 16, jnp.zeros_like(scale), scale)
    finite = largest < INFINITY
    divisor = over_columns(from_bits(scale << 16), pairs)
    empty = divisor == 0.0
    divisor = jnp.where(empty, jnp.ones_like(divisor), divisor)

    def encode(half: Array) -> Array:
        ratio = jnp.where(empty, jnp.zeros_like(divisor), from_bits(half)) / divisor
        return codes.integer(ratio, spec.largest, spec.bits)

    scale = jnp.where(finite, scale, jnp.full_like(scale, 0x7FC0))
    return (encode(halves[0]), encode(halves[1])), scale


def _value(spec: Format, code: Array) -> Array:
    if spec.scale_bytes == 2:
        sign = 1 << spec.bits - 1
        return ((code ^ sign).astype(jnp.int32) - sign).astype(jnp.float32)
    exponent_bits, mantissa_bits = (4, 3) if spec.bits == 8 else (2, 1)
    bias = (1 << exponent_bits - 1) - 1
    size = code & ((1 << spec.bits - 1) - 1)
    normal = from_bits((size << 23 - mantissa_bits) + (127 - bias << 23))
    step = 2.0 ** (1 - bias - mantissa_bits)
    denormal = size.astype(jnp.int32).astype(jnp.float32) * step
    value = jnp.where(size < 1 << mantissa_bits, denormal, normal)
    if spec.bits == 8:
        value = jnp.where(size == 0x7F, jnp.full_like(value, jnp.nan), value)
    sign = code >> spec.bits - 1 << 31
    return from_bits(to_bits(value) | sign)


def bfloat16_bits(x: Array) -> Array:
    """The upper half of float32, to nearest and ties to even; NaN stays NaN."""
    bits = to_bits(x)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    nan = (bits & 0x7FFFFFFF) > INFINITY
    return jnp.where(nan, jnp.full_like(rounded, 0x7FC0), rounded)
