"""Cases of pooling, records, codes and transforms, beside what one would write."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_kernels.case import (
    Arrays,
    Case,
    Contender,
    Given,
    ours,
    uniform,
)
from pallas_kernels.codec_transform import api as codec
from pallas_kernels.kv_quant import api as kv_quant
from pallas_kernels.kv_quant.formats import format_named, record_layout
from pallas_kernels.morton import api as morton
from pallas_kernels.pool import api as pooling

PLAIN = "plain jax.numpy"


def pool(
    name: str, groups: int, slots: int, channels: int, dtype: Any, *, overlap: bool
) -> Case:
    """Groups of rows pooled to entries; the baseline materialises the softmax."""
    shape = (1, groups, slots, channels)
    dispatch, call = pooling.DISPATCH, pooling.pool
    if overlap:
        shape = (1, groups + 1, slots, 2 * channels)
        dispatch, call = pooling.OVERLAPPING_DISPATCH, pooling.overlapping_pool

    def own(arrays: Arrays, *, implementation: str):
        return call(arrays["content"], arrays["score"], implementation=implementation)

    def plain(arrays: Arrays):
        content, score = arrays["content"], arrays["score"].astype(jnp.float32)
        if overlap:
            content, score = (
                jnp.concatenate([x[:, :-1, :, :channels], x[:, 1:, :, channels:]], 2)
                for x in (content, score)
            )
        weights = jax.nn.softmax(score, axis=2)
        return jnp.einsum("bgsc,bgsc->bgc", weights, content.astype(jnp.float32))

    read = 2 * math.prod(shape)
    counts: dict[str, Any] = dict(
        bytes=read * jnp.dtype(dtype).itemsize + 4 * groups * channels,
        flops=3 * read,
        reads="content and scores",
    )
    return Case(
        op="pool",
        name=name,
        shape=f"{groups} groups of {slots}, {channels} channels, "
        f"{jnp.dtype(dtype).name}",
        arrays={"content": Given(shape, dtype), "score": Given(shape, dtype)},
        contenders=[
            *ours(dispatch, own, **counts),
            Contender(name=PLAIN, function=plain, **counts),
        ],
        ratios={"ratio": (PLAIN, "ours")},
    )


# -- records ---------------------------------------------------------------------------


def pack(rows: int, channels: int, format: str, rotary: int, dtype: Any) -> Case:
    """Rows to records; the baseline leaves codes and scales in arrays of their own."""
    layout = record_layout(format, channels, rotary=rotary, leading=("n",))
    size = layout.sizes[-1]
    assert size is not None

    def own(arrays: Arrays, *, implementation: str):
        return kv_quant.pack(
            arrays["x"],
            format=format,
            rotary=rotary,
            implementation=implementation,
        )

    counts: dict[str, Any] = dict(
        bytes=rows * (channels * jnp.dtype(dtype).itemsize + size),
        flops=4 * rows * channels,
        reads=f"rows, and writes records of {size} bytes",
    )
    return Case(
        op="kv_quant",
        name=f"pack_{format}",
        shape=f"{rows} rows of {channels} ({rotary} rotary), {jnp.dtype(dtype).name}",
        arrays={"x": Given((rows, channels), dtype)},
        contenders=[
            *ours(kv_quant.PACK_DISPATCH, own, **counts),
            Contender(
                name=PLAIN,
                function=lambda arrays: plain_pack(arrays["x"], format, rotary),
                **counts,
            ),
        ],
        ratios={"ratio": (PLAIN, "ours")},
        tolerance=None,
    )


def unpack(rows: int, channels: int, format: str, rotary: int, dtype: Any) -> Case:
    """Records to rows; the baseline reads arrays of codes and scales."""
    layout = record_layout(format, channels, rotary=rotary, leading=("n",))
    size = layout.sizes[-1]
    assert size is not None

    def parts(x: jax.Array) -> dict[str, jax.Array]:
        codes, scales, tail = plain_pack(x, format, rotary)
        records = kv_quant.pack(x, format=format, rotary=rotary, implementation="xla")
        return {"records": records, "codes": codes, "scales": scales, "tail": tail}

    def given(part: str, like: jax.ShapeDtypeStruct) -> Given:
        def fill(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
            del rng, shape
            # Packed numbers, because random bytes would hold infinite scales; of one
            # seed, so that every part is of the same rows.
            x = np.random.default_rng(7).standard_normal((rows, channels), np.float32)
            return np.asarray(jax.jit(lambda x: parts(x)[part])(jnp.asarray(x, dtype)))

        return Given(like.shape, like.dtype, fill)

    stored = jax.eval_shape(parts, jax.ShapeDtypeStruct((rows, channels), dtype))

    def own(arrays: Arrays, *, implementation: str):
        return kv_quant.unpack(
            arrays["records"],
            layout,
            dtype=dtype,
            implementation=implementation,
        )

    def plain(arrays: Arrays):
        values = arrays["codes"].astype(jnp.float32) * arrays["scales"].astype(
            jnp.float32
        )
        body = values.reshape(rows, channels - rotary)
        tail = arrays["tail"].astype(jnp.float32)
        return jnp.concatenate([body, tail], axis=1).astype(dtype)

    counts: dict[str, Any] = dict(
        bytes=rows * (channels * jnp.dtype(dtype).itemsize + size),
        flops=rows * channels,
        reads=f"records of {size} bytes, and writes rows",
    )
    return Case(
        op="kv_quant",
        name=f"unpack_{format}",
        shape=f"{rows} rows of {channels} ({rotary} rotary), {jnp.dtype(dtype).name}",
        arrays={part: given(part, like) for part, like in stored.items()},
        contenders=[
            *ours(kv_quant.UNPACK_DISPATCH, own, **counts),
            Contender(name=PLAIN, function=plain, **counts),
        ],
        ratios={"ratio": (PLAIN, "ours")},
        tolerance=None,
    )


def plain_pack(x: jax.Array, format: str, rotary: int) -> tuple[Any, Any, Any]:
    """(codes, scales, rotary channels): JAX's own small types, scaled by the largest.

    No power of two for a scale, no care for infinities, denormal numbers or ties.
    """
    spec = format_named(format)
    kinds = {
        "fp8": jnp.float8_e4m3fn,
        "fp4": jnp.float4_e2m1fn,
        "int8": jnp.int8,
        "int4": jnp.int4,
    }
    body = x[:, : x.shape[1] - rotary].astype(jnp.float32)
    blocks = body.reshape(len(x), -1, spec.block)
    scale = jnp.max(jnp.abs(blocks), axis=2, keepdims=True) / spec.largest
    scale = scale.astype(jnp.bfloat16)
    scaled = blocks / jnp.maximum(scale.astype(jnp.float32), 1e-30)
    if format.startswith("int"):
        scaled = jnp.clip(jnp.round(scaled), -spec.largest, spec.largest)
    return (
        scaled.astype(kinds[format]),
        scale,
        x[:, x.shape[1] - rotary :].astype(jnp.bfloat16),
    )


# -- codes and transforms --------------------------------------------------------------


def morton_encode(points: int, dimensions: int, bits: int) -> Case:
    """Interleaved codes; the baseline moves one bit at a time."""

    def own(arrays: Arrays, *, implementation: str):
        return morton.encode(arrays["points"], bits=bits, implementation=implementation)

    def plain(arrays: Arrays):
        code = jnp.zeros(points, jnp.uint32)
        for bit in range(bits):
            for axis in range(dimensions):
                value = arrays["points"][axis] >> bit & 1
                code = code | value << (bit * dimensions + axis)
        return code

    return _morton("encode", points, dimensions, bits, own, plain)


def morton_decode(points: int, dimensions: int, bits: int) -> Case:
    """The inverse."""

    def own(arrays: Arrays, *, implementation: str):
        return morton.decode(
            arrays["codes"],
            dimensions=dimensions,
            bits=bits,
            implementation=implementation,
        )

    def plain(arrays: Arrays):
        axes = []
        for axis in range(dimensions):
            value = jnp.zeros(points, jnp.uint32)
            for bit in range(bits):
                from_bit = arrays["codes"] >> (bit * dimensions + axis) & 1
                value = value | from_bit << bit
            axes.append(value)
        return jnp.stack(axes)

    return _morton("decode", points, dimensions, bits, own, plain)


def _morton(name, points, dimensions, bits, own, plain) -> Case:
    counts: dict[str, Any] = dict(
        bytes=4 * points * (dimensions + 1),
        flops=16 * points * dimensions,
        reads="coordinates and codes",
    )
    encode = name == "encode"
    coordinates = Given((dimensions, points), jnp.uint32, uniform(0, 1 << bits))
    codes = Given((points,), jnp.uint32, uniform(0, 1 << bits * dimensions))
    return Case(
        op="morton",
        name=name,
        shape=f"{points} points, {dimensions} coordinates of {bits} bits",
        arrays={"points": coordinates} if encode else {"codes": codes},
        contenders=[
            *ours(
                morton.ENCODE_DISPATCH if encode else morton.DECODE_DISPATCH,
                own,
                **counts,
            ),
            Contender(name="one bit at a time", function=plain, **counts),
        ],
        ratios={"ratio": ("one bit at a time", "ours")},
        tolerance=0.0,
    )


def transform(groups: int, tokens: int, channels: int, dtype: Any) -> Case:
    """A cosine basis along tokens; the baseline is `jax.scipy.fft.dct`."""

    def own(arrays: Arrays, *, implementation: str):
        return codec.transform(
            arrays["x"], tokens="cosine", implementation=implementation
        )

    def plain(arrays: Arrays):
        return jax.scipy.fft.dct(arrays["x"].astype(jnp.float32), axis=1, norm="ortho")

    return _codec("cosine", (groups, tokens, channels), tokens, dtype, own, plain)


def hadamard(rows: int, channels: int, dtype: Any) -> Case:
    """The indexer's rotation; the baseline adds and subtracts halves."""

    def own(arrays: Arrays, *, implementation: str):
        return codec.hadamard(arrays["x"], implementation=implementation)

    def plain(arrays: Arrays):
        x, half = arrays["x"].astype(jnp.float32), 1
        while half < channels:
            x = x.reshape(rows, channels // (2 * half), 2, half)
            x = jnp.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], axis=2)
            half *= 2
        return x.reshape(rows, channels) / math.sqrt(channels)

    return _codec("hadamard", (rows, channels), channels, dtype, own, plain)


def _codec(name, shape, depth, dtype, own, plain) -> Case:
    size = math.prod(shape)
    counts: dict[str, Any] = dict(
        bytes=size * (4 + jnp.dtype(dtype).itemsize),
        flops=2 * size * depth,
        reads="rows, and writes coefficients in float32",
    )
    baseline = "jax.scipy.fft.dct" if name == "cosine" else "butterflies"
    return Case(
        op="codec_transform",
        name=name,
        shape=f"{' × '.join(map(str, shape))}, {jnp.dtype(dtype).name}",
        arrays={"x": Given(shape, dtype)},
        contenders=[
            *ours(codec.DISPATCH, own, **counts),
            Contender(name=baseline, function=plain, **counts),
        ],
        ratios={"ratio": (baseline, "ours")},
        tolerance=1e-2 if jnp.dtype(dtype).itemsize < 4 else 1e-4,
    )
