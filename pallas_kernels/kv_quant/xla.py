"""Packing and unpacking of records in XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels.array_typing import typed
from pallas_kernels.kv_quant import codes
from pallas_kernels.kv_quant.codes import (
    INFINITY,
    MAGNITUDE,
    TINY,
    flush,
    from_bits,
    to_bits,
)
from pallas_kernels.kv_quant.formats import Format, format_named

_NAN_SCALE = 255
# Numbers of a block that one vector instruction compares.
_LANES = 8


@typed
def pack(
    x: Float[Array, "n c"], *, format: str, rotary: int, size: int
) -> UInt8[Array, "n r"]:
    """uint8[n, size] records of the rows; see ``api.pack``."""
    spec = format_named(format)
    body, tail = x[:, : x.shape[1] - rotary], x[:, x.shape[1] - rotary :]
    shape = (len(x), body.shape[1] // spec.block, spec.block)
    bits = to_bits(body.astype(jnp.float32)).reshape(shape)
    largest = _largest(bits)
    encode = _encode_power if spec.scale_bytes == 1 else _encode_integer
    code, scales = encode(spec, flush(bits), largest)
    finite = (largest < INFINITY)[..., None]
    code = jnp.where(finite, code.astype(jnp.uint8), jnp.uint8(0))
    code = code.reshape(body.shape)
    if spec.bits == 4:
        code = code[:, ::2] | code[:, 1::2] << 4
    parts = [code, _bytes(tail.astype(jnp.bfloat16)), scales]
    used = sum(part.shape[1] for part in parts)
    parts.append(jnp.zeros((len(x), size - used), jnp.uint8))
    return jnp.concatenate(parts, axis=1)


@typed
def unpack(
    records: UInt8[Array, "n r"], *, format: str, channels: int, rotary: int
) -> Float[Array, "n c"]:
    """float32[n, channels] of the records; see ``api.unpack``."""
    spec = format_named(format)
    code_bytes = spec.code_bytes(channels, rotary)
    scale_at = spec.scale_at(channels, rotary)
    count = (channels - rotary) // spec.block
    n = len(records)
    code = records[:, :code_bytes]
    if spec.bits == 4:
        code = jnp.stack([code & 15, code >> 4], axis=2).reshape(n, 2 * code_bytes)
    scales = records[:, scale_at : scale_at + count * spec.scale_bytes]
    if spec.scale_bytes == 1:
        exponent = jnp.maximum(scales, 1).astype(jnp.int32)
        scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
        scale = jnp.where(scales == _NAN_SCALE, jnp.nan, scale)
    else:
        scale = _floats(scales).astype(jnp.float32)
    values = _decode(spec, code).reshape(n, count, spec.block) * scale[..., None]
    tail = _floats(records[:, code_bytes:scale_at]).astype(jnp.float32)
    return jnp.concatenate([values.reshape(n, channels - rotary), tail], axis=1)


def _largest(bits: Array) -> Array:
    """int32[n, blocks], the bits of the largest magnitude of each block.

    As integers, because a vectorised maximum of floats may lose a NaN; by halves,
    because the CPU compiler does not vectorise one of integers along the last axis.
    """
    sizes = (bits & MAGNITUDE).astype(jnp.int32)
    while sizes.shape[2] > _LANES:
        half = sizes.shape[2] // 2
        sizes = jnp.maximum(sizes[..., :half], sizes[..., half:])
    largest = jnp.max(sizes, axis=2)
    return jnp.where(largest < TINY, 0, largest)


def _encode_power(spec: Format, bits: Array, largest: Array) -> tuple[Array, Array]:
    # The least power of two with largest <= spec.largest · scale, from the bits alone:
    # a logarithm would err next to the powers.
    limit = int(np.float32(spec.largest).view(np.int32))
    mantissa = 0x7FFFFF
    exponent = (largest >> 23) - (limit >> 23)
    exponent = exponent + ((largest & mantissa) > (limit & mantissa))
    byte = jnp.maximum(exponent + 127, 1)
    inverse = from_bits((254 - byte) << 23)
    scaled = to_bits(from_bits(bits) * inverse[..., None])
    byte = jnp.where(largest < INFINITY, byte, _NAN_SCALE)
    encode = codes.e4m3 if spec.bits == 8 else codes.e2m1
    return encode(scaled), byte.astype(jnp.uint8)


def _encode_integer(spec: Format, bits: Array, largest: Array) -> tuple[Array, Array]:
    scale = (from_bits(largest) / spec.largest).astype(jnp.bfloat16)
    scale = jnp.where(scale < jnp.finfo(jnp.bfloat16).tiny, 0, scale)
    scale = jnp.where(largest < INFINITY, scale, jnp.nan).astype(jnp.bfloat16)
    # Magnitudes beside a scale of zero are far below one.
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
    ratio = from_bits(bits) / divisor
    return codes.integer(ratio, spec.largest, spec.bits), _bytes(scale)


def _decode(spec: Format, code: Array) -> Array:
    if spec.name == "fp8":
        return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)
    wide = code.astype(jnp.int32)
    if spec.name == "fp4":
        size = wide & 7
        normal = jax.lax.bitcast_convert_type(
            ((size >> 1) + 126) << 23 | (size & 1) << 22, jnp.float32
        )
        value = jnp.where(size < 2, size * jnp.float32(0.5), normal)
        return jnp.where(wide & 8 != 0, -value, value)
    shift = 32 - spec.bits
    return (wide << shift >> shift).astype(jnp.float32)


def _bytes(x: Array) -> Array:
    """uint8[n, 2c] of bfloat16[n, c]."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), 2 * x.shape[1])


def _floats(data: Array) -> Array:
    """bfloat16[n, c] of uint8[n, 2c]."""
    pairs = data.reshape(len(data), data.shape[1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.bfloat16)
