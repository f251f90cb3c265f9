"""Cases of the indexer's choice, beside scores in memory and `jax.lax.top_k`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_kernels.case import Arrays, Case, Contender, Given, count, ours
from pallas_kernels.indexer_topk import api as indexer


def choose(
    name: str, *, t: int, entries: int, heads: int, dim: int, k: int, dtype: Any
) -> Case:
    """The k best of all entries for each query.

    Baselines: keys as a user would keep them, [entries, dim], and as ours are,
    [dim, entries].
    """

    def call(arrays: Arrays, *, implementation: str):
        index, best = indexer.indexer_topk(
            arrays["query"],
            arrays["weight"],
            arrays["key"],
            arrays["visible"],
            k=k,
            implementation=implementation,
        )
        return {"best": best, "index": index}

    size = jnp.dtype(dtype).itemsize
    counts: dict[str, Any] = dict(
        bytes=entries * dim * size + t * (heads * (dim * size + 4) + 8 * k),
        flops=2 * t * entries * heads * (dim + 1),
        reads=f"{entries} keys for {t} queries",
    )
    return Case(
        op="indexer_topk",
        name=name,
        shape=f"{t} queries, {entries} entries, {heads} × {dim}, best {k}, "
        f"{jnp.dtype(dtype).name}",
        arrays={
            "query": Given((1, t, heads, dim), dtype),
            "weight": Given((1, t, heads), jnp.float32),
            "key": same_keys(entries, dim, dtype, rows=False),
            "row_key": same_keys(entries, dim, dtype, rows=True),
            "visible": Given((1, t), jnp.int32, count(entries, 0)),
        },
        contenders=[
            *ours(indexer.DISPATCH, call, **counts),
            Contender(
                name="top_k of dim × entries",
                function=lambda arrays: scores_top_k(arrays, k, rows=False),
                **counts,
            ),
            Contender(
                name="top_k of entries × dim",
                function=lambda arrays: scores_top_k(arrays, k, rows=True),
                **counts,
            ),
        ],
        ratios={
            "ratio": ("top_k of entries × dim", "ours"),
            "same_layout_ratio": ("top_k of dim × entries", "ours"),
        },
        tolerance=2e-2 if size < 4 else 1e-4,
        # Rounding may exchange the indices of near ties.
        compare=lambda result: result["best"],
        seconds=1.5,
        expected=6.0,
    )


def same_keys(entries: int, dim: int, dtype: Any, *, rows: bool) -> Given:
    """The same keys in either layout: [1, entries, dim] if ``rows``."""

    def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        del rng, shape
        keys = np.random.default_rng(7).standard_normal((entries, dim), np.float32)
        return (keys if rows else np.ascontiguousarray(keys.T))[None]

    return Given((1, entries, dim) if rows else (1, dim, entries), dtype, fill)


def scores_top_k(arrays: Arrays, k: int, *, rows: bool) -> Any:
    """What a user writes: all scores, then the k best."""
    key = arrays["row_key" if rows else "key"]
    products = jnp.einsum(
        "btic,bec->btie" if rows else "btic,bce->btie",
        arrays["query"],
        key,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.einsum("bti,btie->bte", arrays["weight"], jax.nn.relu(products))
    entry = jnp.arange(scores.shape[-1])
    scores = jnp.where(entry < arrays["visible"][..., None], scores, -jnp.inf)
    best, index = jax.lax.top_k(scores, k)
    return {"best": best, "index": index}
