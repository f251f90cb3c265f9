"""Interleaved (z-order) codes of integer coordinates."""

from jaxtyping import Array, UInt32

from pallas_kernels.array_typing import typed
from pallas_kernels.dispatch import PORTABLE, Dispatch, Implementation
from pallas_kernels.morton import mosaic_gpu, xla

ENCODE_DISPATCH = Dispatch(
    "morton.encode",
    Implementation("mosaic_gpu", mosaic_gpu.encode, PORTABLE),
    Implementation("xla", xla.encode),
)
DECODE_DISPATCH = Dispatch(
    "morton.decode",
    Implementation("mosaic_gpu", mosaic_gpu.decode, PORTABLE),
    Implementation("xla", xla.decode),
)


@typed
def encode(
    coordinates: UInt32[Array, "d n"],
    *,
    bits: int,
    implementation: str | None = None,
) -> UInt32[Array, " n"]:
    """Codes whose order is the z-order of points.

    Args:
      coordinates: uint32[d, n], d of 2, 3 or 4; bits above ``bits`` are dropped.
      bits: of each coordinate; d · bits is at most 32.
      implementation: a name of ``ENCODE_DISPATCH.names``; None for the best supported.

    Returns:
      uint32[n]; bit i of coordinate j is bit i·d + j.

    Raises:
      ValueError: the coordinates do not fit a code.

    Source: G. M. Morton, 1966.
    """
    check(len(coordinates), bits)
    return ENCODE_DISPATCH(coordinates, bits=bits, implementation=implementation)


@typed
def decode(
    codes: UInt32[Array, " n"],
    *,
    dimensions: int,
    bits: int,
    implementation: str | None = None,
) -> UInt32[Array, "d n"]:
    """The coordinates of codes: the exact inverse of `encode`.

    Args:
      codes: uint32[n]; bits above dimensions · bits are dropped.
      dimensions, bits: as encoded.
      implementation: a name of ``DECODE_DISPATCH.names``; None for the best supported.

    Raises:
      ValueError: the coordinates do not fit a code.
    """
    check(dimensions, bits)
    return DECODE_DISPATCH(
        codes, dimensions=dimensions, bits=bits, implementation=implementation
    )


def check(dimensions: int, bits: int) -> None:
    """Refuses coordinates that no 32-bit code holds."""
    if dimensions not in (2, 3, 4):
        raise ValueError(f"{dimensions} dimensions: expected 2, 3 or 4")
    if not 1 <= bits <= 32 // dimensions:
        raise ValueError(
            f"{bits} bits of {dimensions} dimensions: expected 1..{32 // dimensions}"
        )
