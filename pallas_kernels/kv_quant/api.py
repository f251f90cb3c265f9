"""Packing of rows of channels into records, and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt8

from pallas_kernels.abi import Layout, LayoutError
from pallas_kernels.array_typing import typed
from pallas_kernels.dispatch import PORTABLE, Dispatch, Implementation
from pallas_kernels.kv_quant import mosaic_gpu, xla
from pallas_kernels.kv_quant.formats import FORMATS, format_named, record_layout


def _unpack_xla(records: Array, *, dtype: Any, **options: Any) -> Array:
    return xla.unpack(records, **options).astype(dtype)


PACK_DISPATCH = Dispatch(
    "kv_quant.pack",
    Implementation("mosaic_gpu", mosaic_gpu.pack, PORTABLE, mosaic_gpu.refuses_pack),
    Implementation("xla", xla.pack),
)
UNPACK_DISPATCH = Dispatch(
    "kv_quant.unpack",
    Implementation(
        "mosaic_gpu", mosaic_gpu.unpack, PORTABLE, mosaic_gpu.refuses_unpack
    ),
    Implementation("xla", _unpack_xla),
)

__all__ = ["FORMATS", "PACK_DISPATCH", "UNPACK_DISPATCH", "pack", "unpack"]


@typed
def pack(
    x: Float[Array, "*n c"],
    *,
    format: str,
    rotary: int = 0,
    alignment: int = 1,
    implementation: str | None = None,
) -> UInt8[Array, "*n r"]:
    """Records of rows of channels, rounded to nearest, ties to the even code.

    Args:
      x: float[..., c].
      format: a name of `FORMATS`. Scales are the least power of two that reaches the
        largest magnitude of a block (fp8: blocks of 64, fp4: of 32) or bfloat16 (int8:
        of 64, int4: of 32).
      rotary: trailing channels that stay in bfloat16.
      alignment: bytes; records are zero-padded to a multiple, a power of two.
      implementation: a name of ``PACK_DISPATCH.names``; None for the best supported.

    Returns:
      uint8[..., r]: codes, rotary channels, scales, zeros. With fp8, 512 channels and
      64 rotary ones r = 584; with fp4 and 128 channels r = 68.

    The error of a channel, for A the largest magnitude of its block: fp8 at most
    max(|x| / 16, A / 229376), fp4 max(|x| / 4, A / 12), int8 A / 253, int4 A / 13.9;
    rotary channels |x| / 256. A block that holds an infinity or a NaN decodes to NaN as
    a whole and leaves other blocks alone. Denormal float32 numbers count as zero.

    Raises:
      ValueError: the format is unknown or the channels fill no whole blocks.
      Unsupported: the named implementation does not serve the call.

    Source: the cache records of DeepSeek-V4 (arXiv 2606.19348) and OCP Microscaling
    Formats 1.0.
    """
    *leading, channels = x.shape
    # Bytes have no gradient, of which a kernel would have to know.
    x = jax.lax.stop_gradient(x)
    layout = record_layout(format, channels, rotary=rotary, alignment=alignment)
    size = layout.sizes[-1]
    records = PACK_DISPATCH(
        x.reshape(math.prod(leading), channels),
        format=format,
        rotary=rotary,
        size=size,
        implementation=implementation,
    )
    return records.reshape(*leading, size)


@typed
def unpack(
    records: UInt8[Array, "*n r"],
    layout: Layout,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "*n c"]:
    """The rows that records hold.

    Args:
      records: uint8[..., r].
      layout: what they were packed with, from `record_layout`.
      dtype: of the result. fp8 and fp4 values are exact in bfloat16.
      implementation: a name of ``UNPACK_DISPATCH.names``; None for the best supported.

    Raises:
      LayoutError: the records do not lie as described, or are no records.
      Unsupported: the named implementation does not serve the call.
    """
    layout.check(records, "kv_quant.unpack records")
    format, channels, rotary = record_format(layout)
    *leading, size = records.shape
    rows = UNPACK_DISPATCH(
        records.reshape(math.prod(leading), size),
        format=format,
        channels=channels,
        rotary=rotary,
        dtype=dtype,
        implementation=implementation,
    )
    return rows.reshape(*leading, channels)


def record_format(layout: Layout) -> tuple[str, int, int]:
    """(format, channels, rotary channels) of a layout of records.

    Raises:
      LayoutError: the layout is not one of `record_layout`.
    """
    name, *numbers = layout.quantization.split("/")
    if name in FORMATS and len(numbers) == 2:
        channels, rotary = (int(number) for number in numbers)
        expected = record_layout(
            name,
            channels,
            rotary=rotary,
            leading=layout.axes[:-1],
            alignment=layout.alignment,
            ratio=layout.ratio,
        )
        expected.expect(layout, "kv_quant records")
        return format_named(name).name, channels, rotary
    raise LayoutError(
        f"kv_quant records: quantization {layout.quantization!r}, expected "
        f"'<format>/<channels>/<rotary>' of {', '.join(FORMATS)}"
    )
