"""Cases of window attention, beside dense attention under the same mask."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench_kernels.case import Arrays, Case, Contender, Given, count, ours
from experiments.bench_kernels.heads import Heads, value
from pallas_kernels.softmax import finish
from pallas_kernels.window_attention import api as window


def window_prefill_call(
    length: int, heads: Heads, size: int, *, decayed: bool = False
) -> Callable[..., Any]:
    """Window attention over a prompt from its first token: no key is before it."""

    def call(arrays: Arrays, *, implementation: str):
        def led(x):
            return jnp.pad(x, ((0, 0), (size - 1, 0), (0, 0), (0, 0)))

        key = led(arrays["key"])
        position = jnp.arange(length, dtype=jnp.int32)[None]
        partial = window.window_attention(
            arrays["query"],
            key,
            led(arrays["value"]) if "value" in arrays else key,
            position,
            jnp.arange(1 - size, length, dtype=jnp.int32)[None],
            window=size,
            scale=heads.h**-0.5,
            decay=arrays["decay"] if decayed else None,
            contiguous=True,
            implementation=implementation,
        )
        return finish(partial, None)

    return call


def dense_window(size: int, implementation: str) -> Callable[..., Any]:
    """What a user calls: dense attention under the same causal, local mask."""

    def call(arrays: Arrays):
        out = jax.nn.dot_product_attention(
            arrays["query"],
            arrays["key"],
            value(arrays),
            is_causal=True,
            local_window_size=(size - 1, 0),
            implementation=implementation,  # pyright: ignore
        )
        return out.astype(jnp.float32)

    return call


def tokamax_window(size: int) -> Callable[..., Any]:
    """The same through tokamax; ImportError where it is not installed."""

    def call(arrays: Arrays):
        import tokamax  # pyright: ignore

        out = tokamax.dot_product_attention(
            arrays["query"],
            arrays["key"],
            value(arrays),
            is_causal=True,
            local_window_size=(size - 1, 0),
        )
        return out.astype(jnp.float32)

    return call


def prefill_window(
    name: str, heads: Heads, length: int, size: int, *, expected: float = 3.0
) -> Case:
    """A prompt through a window; XLA's dense attention reads every pair and masks."""
    pairs = length * size - size * (size - 1) // 2
    counts: dict[str, Any] = dict(
        bytes=heads.output_bytes(length) + heads.key_bytes(length),
        flops=heads.flops(pairs),
        reads=f"the last {size} keys of each query",
    )
    dense = dict(counts, flops=heads.flops(length * length))
    dense["reads"] = f"{length} keys for each query, all but {size} masked"
    return Case(
        op="window_attention",
        name=name,
        shape=f"{length} tokens, window {size}, {heads}",
        arrays={"query": heads.queries(length), **heads.keys(length)},
        contenders=[
            *ours(window.DISPATCH, window_prefill_call(length, heads, size), **counts),
            Contender(
                name="cudnn",
                function=dense_window(size, "cudnn"),
                platform="gpu",
                **counts,
            ),
            Contender(
                name="tokamax", function=tokamax_window(size), platform="gpu", **counts
            ),
            Contender(
                name="dot_product_attention",
                function=dense_window(size, "xla"),
                **dense,
            ),
        ],
        ratios={
            "ratio": ("dot_product_attention", "ours"),
            "cudnn_ratio": ("cudnn", "ours"),
            "tokamax_ratio": ("tokamax", "ours"),
        },
        tolerance=heads.tolerance,
        # The first calls pay for fresh memory, so that few would not be enough; but one
        # of the baseline takes seconds and gigabytes.
        seconds=1.5,
        least=1,
        expected=expected,
    )


def decode_window(name: str, heads: Heads, size: int, *, batch: int) -> Case:
    """One token of each row against a full ring, in no order."""
    # Such as the ring of a row that holds 1000 tokens.
    newest = 1000

    def call(arrays: Arrays, *, implementation: str):
        partial = window.window_attention(
            arrays["query"],
            arrays["key"],
            value(arrays),
            jnp.full((batch, 1), newest, jnp.int32),
            arrays["position"],
            window=size,
            scale=heads.h**-0.5,
            decay=None,
            contiguous=False,
            implementation=implementation,
        )
        return finish(partial, None)

    def dense(arrays: Arrays):
        position = arrays["position"]
        seen = (position > newest - size) & (position <= newest)
        out = jax.nn.dot_product_attention(
            arrays["query"],
            arrays["key"],
            value(arrays),
            mask=seen[:, None, None, :],
            implementation="xla",
        )
        return out.astype(jnp.float32)

    moved = batch * (heads.output_bytes(1) + heads.key_bytes(size))
    counts: dict[str, Any] = dict(
        bytes=moved, flops=heads.flops(batch * size), reads=f"a ring of {size} keys"
    )
    return Case(
        op="window_attention",
        name=name,
        shape=f"{batch} rows, 1 token, ring of {size}, {heads}",
        arrays={
            "query": heads.queries(1, batch),
            **heads.keys(size, batch),
            "position": Given((batch, size), jnp.int32, count(newest - size + 1)),
        },
        contenders=[
            *ours(window.DISPATCH, call, **counts),
            Contender(name="dot_product_attention", function=dense, **counts),
        ],
        ratios={"ratio": ("dot_product_attention", "ours")},
        tolerance=heads.tolerance,
    )


def decay(
    name: str, heads: Heads, length: int, size: int, *, expected: float = 3.0
) -> Case:
    """The same window with and without time decay."""
    pairs = length * size - size * (size - 1) // 2
    counts: dict[str, Any] = dict(
        bytes=heads.output_bytes(length) + heads.key_bytes(length),
        flops=heads.flops(pairs),
        reads=f"the last {size} keys of each query",
    )
    return Case(
        op="window_attention",
        name=name,
        shape=f"{length} tokens, window {size}, {heads}",
        arrays={
            "query": heads.queries(length),
            **heads.keys(length),
            "decay": Given((heads.n,), jnp.float32, lambda rng, s: rng.random(s) / 9),
        },
        contenders=[
            *ours(
                window.DISPATCH,
                window_prefill_call(length, heads, size, decayed=True),
                suffix=" with decay",
                **counts,
            ),
            *ours(window.DISPATCH, window_prefill_call(length, heads, size), **counts),
        ],
        ratios={"ratio": ("{} with decay", "{}")},
        tolerance=None,
        seconds=3.0,
        expected=expected,
    )
