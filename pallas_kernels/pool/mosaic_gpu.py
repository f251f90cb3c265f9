"""Gated pooling on registers: each number is read once, each lane keeps its channels.

A block pools up to 512 channels of one group with a running maximum, so that long
groups need no second pass and no shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.device import Target
from pallas_kernels.launch import kernel
from pallas_kernels.pool import xla

_LANES = 128
_MOST_CHANNELS = 512
# Slots read before any is used: enough reads in flight to cover the memory's latency.
_SLOTS = 8


def refuses(target: Target, content: Any, score: Any) -> str | None:
    """Why a pooling is not served, or None."""
    return _refuses(target, content, score, content.shape[3])


def refuses_overlapping(target: Target, content: Any, score: Any) -> str | None:
    """Why an overlapping pooling is not served, or None."""
    return _refuses(target, content, score, content.shape[3] // 2)


def _refuses(target: Target, content: Any, score: Any, channels: int) -> str | None:
    del target
    if channels % _LANES:
        return f"pools a multiple of {_LANES} channels, not {channels}"
    for x in (content, score):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"pools float32 or bfloat16, not {x.dtype}"
    return None


@jax.custom_vjp
def pool(content: Array, score: Array) -> Array:
    """float32[b, g, c] of [b, g, s, c]; the gradient is XLA's."""
    return _pool(content, score, ((0, 0),), content.shape[1], content.shape[3])


@jax.custom_vjp
def overlapping_pool(content: Array, score: Array) -> Array:
    """float32[b, g, c] of [b, 1 + g, s, 2c]; the gradient is XLA's."""
    half = content.shape[3] // 2
    return _pool(content, score, ((0, 0), (1, half)), content.shape[1] - 1, half)


def _with_xla_gradient(kernel: Any, differentiable: Any) -> None:
    def forward(content: Array, score: Array) -> tuple[Array, tuple[Array, Array]]:
        return kernel(content, score), (content, score)

    def backward(saved: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
        return jax.vjp(differentiable, *saved)[1](slope)

    kernel.defvjp(forward, backward)


_with_xla_gradient(pool, xla.pool)
_with_xla_gradient(overlapping_pool, xla.overlapping_pool)


def _pool(
    content: Array,
    score: Array,
    sources: tuple[tuple[int, int], ...],
    groups: int,
    channels: int,
) -> Array:
    """Pools the slots of several sources, each (group offset, first channel)."""
    b, _, slots, _ = content.shape
    if b * groups * slots * channels == 0:
        return jnp.zeros((b, groups, channels), jnp.float32)
    width = max(
        w for w in range(_LANES, _MOST_CHANNELS + 1, _LANES) if not channels % w
    )
    step = max(n for n in range(1, _SLOTS + 1) if slots % n == 0)

    def body(content_ref, score_ref, out_ref):
        row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
        first = jax.lax.axis_index("channels") * width
        carry = None
        for offset, start in sources:
            at = (row, group + offset)
            lanes = pl.ds(start + first, width)

            def read(ref, slot, at=at, lanes=lanes):
                return ref[*at, slot, lanes].astype(jnp.float32)

            def fold(base, carry, read=read):
                logits = [read(score_ref, base + i) for i in range(step)]
                values = [read(content_ref, base + i) for i in range(step)]
                highest = logits[0]
                for logit in logits[1:]:
                    highest = jnp.maximum(highest, logit)
                if carry is None:
                    total, weighted = jnp.zeros_like(highest), jnp.zeros_like(highest)
                else:
                    highest = jnp.maximum(highest, carry[0])
                    scale = jnp.exp(carry[0] - highest)
                    total, weighted = carry[1] * scale, carry[2] * scale
                for logit, value in zip(logits, values, strict=True):
                    weight = jnp.exp(logit - highest)
                    total, weighted = total + weight, weighted + weight * value
                return highest, total, weighted

            carry = fold(0, carry)
            if slots > step:
                carry = jax.lax.fori_loop(
                    1,
                    slots // step,
                    lambda i, carry, fold=fold: fold(i * step, carry),
                    carry,
                )
        assert carry is not None
        out_ref[row, group, pl.ds(first, width)] = carry[2] / carry[1]

    read = b * groups * slots * channels * len(sources)
    return kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, groups, channels), jnp.float32),
        # Groups last: CUDA takes 2^31 blocks along that axis and 2^16 along others.
        grid=(b, channels // width, groups),
        grid_names=("row", "channels", "group"),
        kernel_name="pool" if len(sources) == 1 else "overlapping_pool",
        cost_estimate=pl.CostEstimate(
            flops=5 * read,
            transcendentals=read,
            bytes_accessed=read * (content.dtype.itemsize + score.dtype.itemsize)
            + 4 * b * groups * channels,
        ),
    )(content, score)
