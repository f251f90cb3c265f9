"""Two batch sizes through one compiled kernel, none at all, and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codec_transform import api as codec
from pallas_kernels.codec_transform import mosaic_gpu as codec_kernel
from pallas_kernels.codec_transform.product_sm90 import Plan
from pallas_kernels.codec_transform.reference import reference_transform
from pallas_kernels.indexer_topk.api import indexer_scores
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.api import FORMATS, pack, unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.kv_quant.reference import reference_pack, reference_unpack
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.pool.api import overlapping_pool, pool
from pallas_kernels.pool.reference import reference as reference_pool
from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention.api import (
    sparse_attention,
    sparse_attention_packed,
)
from pallas_kernels.sparse_attention.reference import reference as reference_sparse
from tests.pallas_kernels.kernel_arrays import (
    ATOL,
    abstract,
    rounded,
    same_gradients,
    sees_nothing,
)

NAMED = dict(implementation="mosaic_gpu")


def test_pool_batches(normal):
    """bfloat16 content; a poisoned group in one row; no rows, no groups."""
    run = jax.jit(functools.partial(pool, **NAMED))
    with interpreted():
        for b in (2, 1):
            content, score = rounded(normal(b, 2, 3, 128)), normal(b, 2, 3, 128)
            want = reference_pool(content, score)
            content[0, 1], want[0, 1] = np.nan, np.nan
            got = run(jnp.asarray(content, jnp.bfloat16), jnp.asarray(score))
            np.testing.assert_allclose(np.asarray(got), want, atol=3e-6)
        for shape in ((0, 2, 3, 128), (2, 0, 3, 128)):
            assert run(jnp.zeros(shape), jnp.zeros(shape)).shape == (*shape[:2], 128)


@pytest.mark.parametrize("function", [pool, overlapping_pool])
def test_pool_gradient(function, normal):
    channels = 128 if function is pool else 256
    arrays = [jnp.asarray(normal(1, 2, 3, channels)) for _ in range(2)]

    def gradient(implementation):
        def loss(*arrays):
            return jnp.sum(jnp.sin(function(*arrays, implementation=implementation)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*arrays)

    with interpreted():
        got = jax.block_until_ready(gradient("mosaic_gpu"))
    for a, b in zip(got, gradient("xla"), strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


def test_scores_gradient(normal):
    shapes = ((1, 2, 3, 16), (1, 2, 3), (1, 16, 144))
    arrays = [jnp.asarray(normal(*shape), jnp.bfloat16) for shape in shapes]

    def gradient(implementation):
        def loss(*arrays):
            scores = indexer_scores(*arrays, implementation=implementation)
            return jnp.sum(jnp.sin(scores / 8))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)

    with interpreted():
        got = jax.block_until_ready(gradient("mosaic_gpu"))
    same_gradients(got, gradient("xla"))


def test_transform_gradient(normal):
    x = jnp.asarray(normal(4, 16, 32), jnp.bfloat16)

    def gradient(implementation):
        def loss(x):
            rows = codec.transform(
                x, tokens="cosine", channels="hadamard", implementation=implementation
            )
            return jnp.sum(jnp.sin(rows))

        return (jax.jit(jax.grad(loss))(x),)

    with interpreted():
        got = jax.block_until_ready(gradient("mosaic_gpu"))
    same_gradients(got, gradient("xla"))


def test_transform_batches(normal):
    run = jax.jit(functools.partial(codec.transform, tokens="cosine", **NAMED))
    with interpreted():
        for n in (5, 4, 1):
            x = jnp.asarray(normal(n, 16, 32), jnp.bfloat16)
            want = reference_transform(x, "cosine", None)
            np.testing.assert_allclose(np.asarray(run(x)), want, atol=3e-6)


def test_record_batches(normal):
    """Rows of two leading shapes through one function; one row; none; NaN in one."""
    spec, layout = FORMATS["fp8"], record_layout("fp8", 64, leading=("b", "e"))
    size = spec.record_bytes(64, 0)
    write = jax.jit(functools.partial(pack, format="fp8", **NAMED))
    read = jax.jit(
        functools.partial(unpack, layout=layout, dtype=jnp.bfloat16, **NAMED)
    )
    with interpreted():
        for shape in ((2, 33), (1, 64), (1, 1), (2, 0)):
            x = rounded(normal(*shape, 64))
            x.reshape(-1, 64)[:1] = np.nan
            records = np.asarray(write(jnp.asarray(x, jnp.bfloat16)))
            want = reference_pack(x.reshape(-1, 64), "fp8", 0, size)
            np.testing.assert_array_equal(records, want.reshape(*shape, size))
            back = np.asarray(read(jnp.asarray(records)), np.float32)
            want = rounded(reference_unpack(want, "fp8", 64, 0))
            np.testing.assert_array_equal(back, want.reshape(x.shape))


def test_chosen_batches(normal):
    """Entries and records; lists of only -1; NaN in entries that nobody chose."""
    layout = record_layout("fp8", 64, alignment=16)
    options = dict(scale=0.3, **NAMED)
    plain = jax.jit(functools.partial(sparse_attention, **options))
    packed = jax.jit(
        functools.partial(sparse_attention_packed, layout=layout, **options)
    )
    with interpreted():
        for b in (2, 1):
            query, key = rounded(normal(b, 2, 4, 64)), normal(b, 9, 64)
            chosen = np.full((b, 2, 5), -1, np.int32)
            chosen[-1, 1, 1:4] = 8, 0, 3
            records = pack(jnp.asarray(key), format="fp8", alignment=16)
            # Values of fp8 records are exact in bfloat16.
            key = np.asarray(unpack(records, layout))[:, :, None]
            want = reference_sparse(query, key, key, chosen, scale=0.3)[0]
            unused = ~np.isin(np.arange(9), chosen[-1])
            key, records = key.copy(), np.array(records)
            key[:, unused], records[:, unused] = np.nan, 0xFF
            query, key = (jnp.asarray(x, jnp.bfloat16) for x in (query, key))
            for got in (
                plain(query, key, key, jnp.asarray(chosen)),
                packed(query, jnp.asarray(records), chosen=jnp.asarray(chosen)),
            ):
                out = np.asarray(finish(got, None))
                np.testing.assert_allclose(out, want, atol=ATOL * np.abs(want).max())
                np.testing.assert_array_equal(out[:, 0], 0)


@pytest.mark.parametrize(("t", "e", "c"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_no_records(t, e, c, normal):
    layout = record_layout("fp8", 64)
    with interpreted():
        got, mass = sparse_attention_packed(
            jnp.asarray(normal(2, t, 4, 64), jnp.bfloat16),
            jnp.zeros((2, e, layout.sizes[-1]), jnp.uint8),
            layout,
            jnp.full((2, t, c), -1),
            scale=1.0,
            mass_block=2,
            **NAMED,
        )
        sees_nothing(got, (2, t, 4, 64))
    np.testing.assert_array_equal(np.asarray(mass), np.zeros((2, t, -(-e // 2))))


@pytest.mark.parametrize("format", FORMATS)
def test_configurations_of_records_lower(format):
    """Every one of packing and of unpacking, along both axes."""
    group, width = 16, 128
    bases = [abstract(size, size, dtype=jnp.float32) for size in (group, width)]
    size = FORMATS[format].record_bytes(width, 0)
    x, records = abstract(64, group, width), abstract(64, group, size, dtype=jnp.uint8)
    for plan, run, array, options in (
        ("packs", codec_kernel.transform_pack, x, {"size": size}),
        ("unpacks", codec_kernel.unpack_inverse, records, {"width": width}),
    ):
        work = {plan: FORMATS[format]}
        legal = codec_kernel.configurations(
            Plan(width=width, tokens=group, channels=True, **work)
        )
        assert legal
        for number, config in enumerate(legal):
            call = functools.partial(run, format=format, config=config, **options)
            device = ("h100", "h200")[number % 2]
            assert kernels(lower(call, array, *bases, device=device)) == 1
