"""Decorrelation of groups of rows by orthonormal transforms, alone or with packing."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, UInt8

from pallas_kernels.abi import Layout
from pallas_kernels.codec_transform import xla
from pallas_kernels.codec_transform.bases import basis
from pallas_kernels.dispatch import Dispatch, Implementation
from pallas_kernels.kv_quant import api as kv_quant

DISPATCH = Dispatch("codec_transform", Implementation("xla", xla.transform))
INVERSE_DISPATCH = Dispatch(
    "codec_transform.inverse", Implementation("xla", xla.inverse)
)

Basis = str | Float[Array, "p q"] | None


def transform(
    x: Float[Array, "n s c"],
    *,
    tokens: Basis = None,
    channels: Basis = None,
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


def inverse(
    x: Float[Array, "n s c"],
    *,
    tokens: Basis = None,
    channels: Basis = None,
    implementation: str | None = None,
) -> Float[Array, "n s c"]:
    """The rows that have these coefficients; arguments as `transform`."""
    matrices = _matrices(x.shape, tokens, channels)
    return INVERSE_DISPATCH(x, *matrices, implementation=implementation)


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


def transform_pack(
    x: Float[Array, "n s c"],
    *,
    format: str,
    tokens: Basis = None,
    channels: Basis = None,
    alignment: int = 1,
) -> UInt8[Array, "n s r"]:
    """`transform`, then ``kv_quant.pack`` of each row of coefficients, in one function.

    The error of a group is that of its coefficients' records: see ``kv_quant.pack``.
    One format for all coefficients errs as much as without `transform` along tokens;
    what decorrelation gains comes from fewer bits for the small ones.
    """
    coefficients = transform(x, tokens=tokens, channels=channels)
    return kv_quant.pack(coefficients, format=format, alignment=alignment)


def unpack_inverse(
    records: UInt8[Array, "n s r"],
    layout: Layout,
    *,
    tokens: Basis = None,
    channels: Basis = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "n s c"]:
    """The rows that `transform_pack` stored, as ``dtype``."""
    coefficients = kv_quant.unpack(records, layout)
    return inverse(coefficients, tokens=tokens, channels=channels).astype(dtype)


def _matrices(
    shape: tuple[int, ...], tokens: Basis, channels: Basis
) -> tuple[jax.Array | None, jax.Array | None]:
    def matrix(given: Basis, size: int) -> jax.Array | None:
        if isinstance(given, str):
            return jnp.asarray(basis(given, size))
        return given

    return matrix(tokens, shape[1]), matrix(channels, shape[2])
