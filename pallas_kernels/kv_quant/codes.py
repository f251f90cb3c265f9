"""Codes of numbers, by integer arithmetic on the bits of float32.

The same for arrays and for registers: no branch, and no conversion to a small type,
which compilers write out at length.
"""

import jax
import jax.numpy as jnp
from jax import Array

SIGN = 0x80000000
MAGNITUDE = 0x7FFFFFFF
# Of the least normal number, and of infinity; those of a NaN are larger.
TINY = 0x00800000
INFINITY = 0x7F800000


def from_bits(bits: Array) -> Array:
    """float32 of uint32 or int32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def to_bits(x: Array) -> Array:
    """uint32 of float32."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def flush(bits: Array) -> Array:
    """Denormal numbers become zeros of their sign, as everywhere.

    Some devices count them as zero and others do not.
    """
    return jnp.where((bits & MAGNITUDE) < TINY, bits & jnp.uint32(SIGN), bits)


def e4m3(bits: Array) -> Array:
    """Codes of float32 bits of at most 448, to nearest and ties to even."""
    size = bits & MAGNITUDE
    normal = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
    # Adding 2^14 leaves multiples of the denormal step 2^-9 in the low bits.
    denormal = to_bits(from_bits(size) + 16384.0) & 0xFF
    code = jnp.where(size < 121 << 23, denormal, normal)
    return code | bits >> 24 & 0x80


def e2m1(bits: Array) -> Array:
    """Codes of float32 bits of at most 6, to nearest and ties to even."""
    size = bits & MAGNITUDE
    normal = (size + 0x1FFFFF + (size >> 22 & 1) >> 22) - (126 << 1)
    # Adding 2^22 leaves multiples of 1/2 in the low bits.
    denormal = to_bits(from_bits(size) + 4194304.0) & 0x7
    code = jnp.where(size < 127 << 23, denormal, normal)
    return code | bits >> 28 & 0x8


def integer(x: Array, largest: float, bits: int) -> Array:
    """Two's complement of float32 cut to ±largest, to nearest and ties to even."""
    # Scalars of the type: registers take no weakly typed bounds.
    top = jnp.float32(largest)
    x = jnp.minimum(jnp.maximum(x, -top), top)
    # Adding 1.5 · 2^23 leaves the integer in the low bits.
    return to_bits(x + 12582912.0) & ((1 << bits) - 1)
