"""How stored keys lie in memory: what every call of an operation is checked against."""

from typing import Any

import jax.numpy as jnp

from hybrid_attn.config import LayerSpec
from pallas_kernels.abi import Layout


def rows_layout(layer: LayerSpec, dtype: Any) -> Layout:
    """[b, s, k, h], one row a token: the keys or values of a window."""
    return _heads(layer, "s", dtype, ratio=1)


def entries_layout(layer: LayerSpec, dtype: Any) -> Layout:
    """[b, e, k, h], one row an entry of the layer's ratio."""
    return _heads(layer, "e", dtype, ratio=layer.ratio)


def index_layout(layer: LayerSpec, dim: int, dtype: Any) -> Layout:
    """[b, c, e], entries densest: an indexer reads one channel of many entries."""
    return Layout(
        axes=("b", "c", "e"),
        sizes=(None, dim, None),
        dtype=jnp.dtype(dtype).name,
        ratio=layer.ratio,
    )


def _heads(layer: LayerSpec, rows: str, dtype: Any, *, ratio: int) -> Layout:
    return Layout(
        axes=("b", rows, "k", "h"),
        sizes=(None, None, layer.kv_heads, layer.head_dim),
        dtype=jnp.dtype(dtype).name,
        ratio=ratio,
    )
