"""Cases of compressed and sparse attention, beside dense attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench_kernels.case import (
    Arrays,
    Case,
    Contender,
    Given,
    count,
    distinct,
    ours,
)
from experiments.bench_kernels.heads import Heads, mass_case, value
from pallas_kernels.compressed_attention import api as compressed
from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention import api as sparse


def _call(
    operation: Callable[..., Any], entries: str, heads: Heads, **fixed: Any
) -> Callable[..., Any]:
    """Attention over the entries that one array names, normalised.

    With the mass of each block where ``mass_block`` is among the fixed arguments.
    """

    def call(arrays: Arrays, *, implementation: str):
        result = operation(
            arrays["query"],
            arrays["key"],
            value(arrays),
            arrays[entries],
            scale=heads.h**-0.5,
            implementation=implementation,
            **fixed,
        )
        if "mass_block" in fixed:
            return finish(result[0], None), result[1]
        return finish(result, None)

    return call


# -- compressed ------------------------------------------------------------------------


def compressed_call(heads: Heads, **fixed: Any) -> Callable[..., Any]:
    """Attention over all visible entries."""
    operation = compressed.compressed_attention
    return _call(operation, "visible", heads, static=False, **fixed)


def dense_entries(arrays: Arrays):
    """Dense attention over the entries under the mask of what each query sees."""
    entry = jnp.arange(arrays["key"].shape[1])
    out = jax.nn.dot_product_attention(
        arrays["query"],
        arrays["key"],
        value(arrays),
        mask=(entry < arrays["visible"][..., None])[:, None],
        implementation="xla",
    )
    return out.astype(jnp.float32)


def prefill_compressed(name: str, heads: Heads, length: int, ratio: int) -> Case:
    """A prompt whose query t sees the (t + 1) // ratio entries that are closed."""
    entries = length // ratio
    pairs = sum((t + 1) // ratio for t in range(length))
    moved = heads.output_bytes(length) + heads.key_bytes(entries)
    visible = Given(
        (1, length),
        jnp.int32,
        lambda rng, shape: count(1)(rng, shape) // ratio,
    )
    return Case(
        op="compressed_attention",
        name=name,
        shape=f"{length} tokens, {entries} entries, {heads}",
        arrays={
            "query": heads.queries(length),
            **heads.keys(entries),
            "visible": visible,
        },
        contenders=[
            *ours(
                compressed.DISPATCH,
                compressed_call(heads),
                bytes=moved,
                flops=heads.flops(pairs),
                reads="the entries that each query sees",
            ),
            Contender(
                name="dot_product_attention",
                function=dense_entries,
                bytes=moved,
                flops=heads.flops(length * entries),
                reads="every entry for every query, masked",
            ),
        ],
        ratios={"ratio": ("dot_product_attention", "ours")},
        tolerance=heads.tolerance,
        # The first queries see nothing, which dense attention answers with a mean.
        compare=lambda out: out[:, ratio:],
    )


def decode_compressed(name: str, heads: Heads, entries: int, *, batch: int = 1) -> Case:
    """One token of each row over all entries."""
    counts: dict[str, Any] = dict(
        bytes=batch * (heads.output_bytes(1) + heads.key_bytes(entries)),
        flops=heads.flops(batch * entries),
        reads=f"{entries} entries a row",
    )
    return Case(
        op="compressed_attention",
        name=name,
        shape=f"{batch} rows, 1 token, {entries} entries, {heads}",
        arrays={
            "query": heads.queries(1, batch),
            **heads.keys(entries, batch),
            "visible": Given((batch, 1), jnp.int32, count(entries, 0)),
        },
        contenders=[
            *ours(compressed.DISPATCH, compressed_call(heads), **counts),
            Contender(name="dot_product_attention", function=dense_entries, **counts),
        ],
        ratios={"ratio": ("dot_product_attention", "ours")},
        tolerance=heads.tolerance,
    )


def mass_compressed(
    name: str, heads: Heads, length: int, entries: int, block: int
) -> Case:
    """With and without the attention mass of each block of entries."""
    return mass_case(
        "compressed_attention",
        name,
        f"{length} tokens, {entries} entries, blocks of {block}, {heads}",
        {
            "query": heads.queries(length),
            **heads.keys(entries),
            "visible": Given((1, length), jnp.int32, count(entries - length + 1)),
        },
        compressed.DISPATCH,
        compressed_call(heads, mass_block=block),
        compressed_call(heads),
        bytes=heads.output_bytes(length) + heads.key_bytes(entries),
        flops=heads.flops(length * entries),
        reads=f"{entries} entries",
    )


# -- sparse ----------------------------------------------------------------------------


def sparse_call(heads: Heads, **fixed: Any) -> Callable[..., Any]:
    """Attention over chosen entries."""
    return _call(sparse.sparse_attention, "chosen", heads, **fixed)


def decode_sparse(
    name: str, heads: Heads, context: int, ratio: int, chosen: int
) -> Case:
    """One token over chosen entries of a long context, and dense attention over it."""
    entries = context // ratio

    def dense(arrays: Arrays):
        # The keys before they were compressed, so many times as many.
        out = jax.nn.dot_product_attention(
            arrays["query"],
            arrays["token_key"],
            arrays.get("token_value", arrays["token_key"]),
            implementation="xla",
        )
        return out.astype(jnp.float32)

    tokens = {f"token_{name}": each for name, each in heads.keys(context).items()}
    return Case(
        op="sparse_attention",
        name=name,
        shape=f"1 token, {chosen} of {entries} entries ({context} tokens), {heads}",
        arrays={
            "query": heads.queries(1),
            **heads.keys(entries),
            "chosen": Given((1, 1, chosen), jnp.int32, distinct(entries)),
            **tokens,
        },
        contenders=[
            *ours(
                sparse.DISPATCH,
                sparse_call(heads),
                bytes=heads.output_bytes(1) + heads.key_bytes(chosen) + 4 * chosen,
                flops=heads.flops(chosen),
                reads=f"{chosen} chosen entries; the choice itself is not counted",
            ),
            Contender(
                name="dot_product_attention",
                function=dense,
                bytes=heads.output_bytes(1) + heads.key_bytes(context),
                flops=heads.flops(context),
                reads=f"all {context} keys and values, uncompressed",
            ),
        ],
        ratios={"ratio": ("dot_product_attention", "ours")},
        tolerance=None,
    )


def prefill_sparse(
    name: str, heads: Heads, length: int, entries: int, chosen: int
) -> Case:
    """A piece of a prompt, each query with its own entries."""

    def dense(arrays: Arrays):
        index = arrays["chosen"]
        row = jnp.arange(length)[None, :, None]
        mask = jnp.zeros((1, length, entries), bool).at[0, row[0], index[0]].set(True)
        out = jax.nn.dot_product_attention(
            arrays["query"],
            arrays["key"],
            value(arrays),
            mask=mask[:, None],
            implementation="xla",
        )
        return out.astype(jnp.float32)

    moved = heads.output_bytes(length)
    return Case(
        op="sparse_attention",
        name=name,
        shape=f"{length} tokens, {chosen} of {entries} entries each, {heads}",
        arrays={
            "query": heads.queries(length),
            **heads.keys(entries),
            "chosen": Given((1, length, chosen), jnp.int32, distinct(entries)),
        },
        contenders=[
            *ours(
                sparse.DISPATCH,
                sparse_call(heads),
                bytes=moved + length * (heads.key_bytes(chosen) + 4 * chosen),
                flops=heads.flops(length * chosen),
                reads=f"{chosen} entries for each query",
            ),
            Contender(
                name="dot_product_attention",
                function=dense,
                bytes=moved + heads.key_bytes(entries),
                flops=heads.flops(length * entries),
                reads=f"{entries} entries for each query, all but {chosen} masked",
            ),
        ],
        ratios={"ratio": ("dot_product_attention", "ours")},
        tolerance=heads.tolerance,
    )


def mass_sparse(
    name: str, heads: Heads, length: int, entries: int, chosen: int, block: int
) -> Case:
    """With and without the attention mass of each block of entries."""
    return mass_case(
        "sparse_attention",
        name,
        f"{length} tokens, {chosen} of {entries} entries, blocks of {block}, {heads}",
        {
            "query": heads.queries(length),
            **heads.keys(entries),
            "chosen": Given((1, length, chosen), jnp.int32, distinct(entries)),
        },
        sparse.DISPATCH,
        sparse_call(heads, mass_block=block),
        sparse_call(heads),
        bytes=heads.output_bytes(length) + length * heads.key_bytes(chosen),
        flops=heads.flops(length * chosen),
        reads=f"{chosen} entries for each query",
    )
