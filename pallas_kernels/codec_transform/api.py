"""Decorrelation of groups of rows by orthonormal transforms, alone or with packing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt8

from pallas_kernels.abi import Layout, LayoutError
from pallas_kernels.array_typing import typed
from pallas_kernels.codec_transform import mosaic_gpu, xla
from pallas_kernels.codec_transform.bases import basis
from pallas_kernels.dispatch import SM90, Dispatch, Implementation
from pallas_kernels.kv_quant.api import record_format
from pallas_kernels.kv_quant.formats import record_layout

DISPATCH = Dispatch(
    "codec_transform",
    Implementation("mosaic_gpu", mosaic_gpu.transform, SM90, mosaic_gpu.refuses),
    Implementation("xla", xla.transform),
)
INVERSE_DISPATCH = Dispatch(
    "codec_transform.inverse",
    Implementation("mosaic_gpu", mosaic_gpu.inverse, SM90, mosaic_gpu.refuses),
    Implementation("xla", xla.inverse),
)
PACK_DISPATCH = Dispatch(
    "codec_transform.pack",
    Implementation(
        "mosaic_gpu", mosaic_gpu.transform_pack, SM90, mosaic_gpu.refuses_pack
    ),
    Implementation("xla", xla.transform_pack),
)
UNPACK_DISPATCH = Dispatch(
    "codec_transform.unpack",
    Implementation(
        "mosaic_gpu", mosaic_gpu.unpack_inverse, SM90, mosaic_gpu.refuses_unpack
    ),
    Implementation("xla", xla.unpack_inverse),
)

TokenBasis = str | Float[Array, "s s"] | None
ChannelBasis = str | Float[Array, "c c"] | None


@typed
def transform(
    x: Float[Array, "n s c"],
    *,
    tokens: TokenBasis = None,
    channels: ChannelBasis = None,
    implementation: str | None = None,
) -> Float[Array, "n s c"]:
    """The coefficients of groups of rows in an orthonormal basis, in float32.

    Args:
      x: float[n, s, c]: n groups of s tokens by c channels.
      tokens, channels: a name of ``bases.BASES`` or a matrix with orthonormal rows
        ([s, s], [c, c]); None leaves the axis as it is.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Returns:
      float32[n, s, c], tokens · x · channelsᵀ. Norms and inner products are kept, so
      that an error of the coefficients is the error of the rows.

    Raises:
      ValueError: the basis is unknown or has no such size.
    """
    matrices = _matrices(x.shape, tokens, channels)
    return DISPATCH(x, *matrices, implementation=implementation)


@typed
def inverse(
    x: Float[Array, "n s c"],
    *,
    tokens: TokenBasis = None,
    channels: ChannelBasis = None,
    implementation: str | None = None,
) -> Float[Array, "n s c"]:
    """The rows that have these coefficients; arguments as `transform`."""
    matrices = _matrices(x.shape, tokens, channels)
    return INVERSE_DISPATCH(x, *matrices, implementation=implementation)


@typed
def hadamard(
    x: Float[Array, "*n c"], *, implementation: str | None = None
) -> Float[Array, "*n c"]:
    """The indexer's rotation of queries and keys: float32, its own inverse.

    Args:
      x: float[..., c], c a power of two.

    Queries and keys need it both: the product is then unchanged, and no channel
    dominates a block of 4-bit codes. Source: DeepSeek-V4 (arXiv 2606.19348).
    """
    rows = x.reshape(1, x.size // x.shape[-1], x.shape[-1])
    out = transform(rows, channels="hadamard", implementation=implementation)
    return out.reshape(x.shape)


@typed
def transform_pack(
    x: Float[Array, "n s c"],
    *,
    format: str,
    tokens: TokenBasis = None,
    channels: ChannelBasis = None,
    alignment: int = 1,
    implementation: str | None = None,
) -> UInt8[Array, "n s r"]:
    """`transform`, then ``kv_quant.pack`` of each row of coefficients, in one function.

    Args:
      x, tokens, channels: as `transform`.
      format, alignment: as ``kv_quant.pack``.
      implementation: a name of ``PACK_DISPATCH.names``; None for the best supported.

    Returns:
      uint8[n, s, r], of the layout ``record_layout(format, c, alignment=alignment)``.

    The error of a group is that of its coefficients' records: see ``kv_quant.pack``.
    One format for all coefficients errs as much as without `transform` along tokens;
    what decorrelation gains comes from fewer bits for the small ones.
    """
    size = record_layout(format, x.shape[2], alignment=alignment).sizes[-1]
    # Bytes have no gradient, of which a kernel would have to know.
    x, *matrices = jax.lax.stop_gradient((x, *_matrices(x.shape, tokens, channels)))
    return PACK_DISPATCH(
        x, *matrices, format=format, size=size, implementation=implementation
    )


@typed
def unpack_inverse(
    records: UInt8[Array, "n s r"],
    layout: Layout,
    *,
    tokens: TokenBasis = None,
    channels: ChannelBasis = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "n s c"]:
    """The rows that `transform_pack` stored, as ``dtype``.

    Args:
      records, layout: as ``kv_quant.unpack``; no rotary channels.
      tokens, channels: that they were stored with.
      implementation: a name of ``UNPACK_DISPATCH.names``; None for the best supported.

    Raises:
      LayoutError: the records do not lie as described, or are no such records.
      Unsupported: the named implementation does not serve the call.
    """
    layout.check(records, "codec_transform.unpack_inverse records")
    format, width, rotary = record_format(layout)
    if rotary:
        raise LayoutError(
            f"unpack_inverse records: {rotary} rotary channels, expected 0"
        )
    matrices = _matrices((*records.shape[:2], width), tokens, channels)
    rows = UNPACK_DISPATCH(
        records, *matrices, format=format, width=width, implementation=implementation
    )
    return rows.astype(dtype)


def _matrices(
    shape: tuple[int, ...], tokens: TokenBasis, channels: ChannelBasis
) -> tuple[jax.Array | None, jax.Array | None]:
    def matrix(given: str | jax.Array | None, size: int) -> jax.Array | None:
        if isinstance(given, str):
            return jnp.asarray(basis(given, size))
        return given

    return matrix(tokens, shape[1]), matrix(channels, shape[2])
