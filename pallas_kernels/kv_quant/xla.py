"""Packing and unpacking of records in XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.array_typing import typed
from pallas_kernels.kv_quant.formats import Format, format_named

_TINY = 2.0**-126
_NAN_SCALE = 255


@typed
def pack(
    x: Float[Array, "n c"], *, format: str, rotary: int, size: int
) -> UInt8[Array, "n r"]:
    """uint8[n, size] records of the rows; see ``api.pack``."""
    spec = format_named(format)
    body, tail = x[:, : x.shape[1] - rotary], x[:, x.shape[1] - rotary :]
    shape = (len(x), body.shape[1] // spec.block, spec.block)
    blocks = body.astype(jnp.float32).reshape(shape)
    # Denormal numbers are zero on some devices and not on others: zero on all.
    blocks = jnp.where(jnp.abs(blocks) < _TINY, jnp.copysign(0.0, blocks), blocks)
    # As integers: a vectorised maximum of floats may lose a NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = jax.lax.bitcast_convert_type(jnp.max(bits, axis=2), jnp.float32)
    encode = _encode_power if spec.scale_bytes == 1 else _encode_integer
    codes, scales = encode(spec, blocks, largest)
    codes = jnp.where(jnp.isfinite(largest)[..., None], codes, 0)
    codes = codes.astype(jnp.uint8).reshape(body.shape)
    if spec.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    parts = [codes, _bytes(tail.astype(jnp.bfloat16)), scales]
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
    codes = records[:, :code_bytes]
    if spec.bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=2).reshape(n, 2 * code_bytes)
    scales = records[:, scale_at : scale_at + count * spec.scale_bytes]
    if spec.scale_bytes == 1:
        exponent = jnp.maximum(scales, 1).astype(jnp.int32)
        scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
        scale = jnp.where(scales == _NAN_SCALE, jnp.nan, scale)
    else:
        scale = _floats(scales).astype(jnp.float32)
    values = _decode(spec, codes).reshape(n, count, spec.block) * scale[..., None]
    tail = _floats(records[:, code_bytes:scale_at]).astype(jnp.float32)
    return jnp.concatenate([values.reshape(n, channels - rotary), tail], axis=1)


def _encode_power(spec: Format, blocks: Array, largest: Array) -> tuple[Array, Array]:
    # The least power of two with largest <= spec.largest · scale, from the bits alone:
    # a logarithm would err next to the powers.
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    limit = jax.lax.bitcast_convert_type(jnp.float32(spec.largest), jnp.int32)
    mantissa = 0x7FFFFF
    exponent = (bits >> 23) - (limit >> 23)
    exponent = exponent + ((bits & mantissa) > (limit & mantissa))
    byte = jnp.maximum(exponent + 127, 1)
    inverse = jax.lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)
    scaled = blocks * inverse[..., None]
    if spec.bits == 8:
        codes = jax.lax.bitcast_convert_type(
            scaled.astype(jnp.float8_e4m3fn), jnp.uint8
        )
    else:
        size = jnp.abs(scaled)
        # Half way between two codes lies with the even one.
        codes = (size > 0.25).astype(jnp.uint8)
        for half, even_above in (
            (0.75, True),
            (1.25, False),
            (1.75, True),
            (2.5, False),
            (3.5, True),
            (5.0, False),
        ):
            codes = codes + (size >= half if even_above else size > half)
        codes = codes | jnp.signbit(scaled).astype(jnp.uint8) << 3
    byte = jnp.where(jnp.isfinite(largest), byte, _NAN_SCALE)
    return codes, byte.astype(jnp.uint8)


def _encode_integer(spec: Format, blocks: Array, largest: Array) -> tuple[Array, Array]:
    scale = (largest / spec.largest).astype(jnp.bfloat16)
    scale = jnp.where(scale < _TINY, 0, scale)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1, scale).astype(jnp.float32)[..., None]
    codes = jnp.round(jnp.where(scale[..., None] == 0, 0, blocks) / divisor)
    codes = jnp.clip(codes, -spec.largest, spec.largest)
    codes = jnp.where(jnp.isfinite(codes), codes, 0).astype(jnp.int32)
    return codes & ((1 << spec.bits) - 1), _bytes(scale)


def _decode(spec: Format, codes: Array) -> Array:
    if spec.name == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(
            jnp.float32
        )
    wide = codes.astype(jnp.int32)
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
