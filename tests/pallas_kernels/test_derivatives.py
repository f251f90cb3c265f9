"""Derivatives of operations that choose or round, the same by every implementation."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codec_transform import api as codec
from pallas_kernels.codec_transform.bases import basis
from pallas_kernels.indexer_topk.api import indexer_scores, indexer_topk
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.api import pack, unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.lowering import kernels, lower

IMPLEMENTATIONS = ["xla", "mosaic_gpu"]


def _run(implementation, function, *arrays):
    """function(*arrays) as numpy arrays, interpreted where it is a kernel."""
    kernel = implementation == "mosaic_gpu"
    with interpreted() if kernel else contextlib.nullcontext():
        return jax.tree.map(np.asarray, jax.jit(function)(*arrays))


@pytest.fixture
def indexer(normal):
    """Query, weight, key and visible of 272 entries: queries see all, 3 and none."""
    query, weight = normal(1, 3, 4, 16), normal(1, 3, 4)
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (query, weight, normal(1, 16, 272)))
    return (*arrays, jnp.array([[272, 3, 0]], jnp.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scores_of_the_chosen(implementation, indexer):
    """Their gradient is that of all scores at the chosen; also in forward mode."""
    *arrays, visible = indexer
    choose = functools.partial(
        indexer_topk, visible=visible, k=5, implementation=implementation
    )

    def loss(*arrays):
        index, best = choose(*arrays)
        return jnp.sum(jnp.sin(jnp.where(index >= 0, best, 0.0))), index

    slopes, index = _run(
        implementation,
        jax.grad(loss, argnums=(0, 1, 2), has_aux=True),
        *arrays,
    )
    assert (index[0, 1, 3:] == -1).all() and (index[0, 2] == -1).all()

    def plain(*arrays):
        scores = indexer_scores(*arrays, implementation="xla")
        best = jnp.take_along_axis(scores, jnp.maximum(index, 0), axis=2)
        return jnp.sum(jnp.sin(jnp.where(index >= 0, best, 0.0)))

    for got, want in zip(
        slopes, jax.grad(plain, argnums=(0, 1, 2))(*arrays), strict=True
    ):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, atol=2e-2, rtol=2e-2)

    weight = arrays[1]
    along = _run(
        implementation,
        lambda weight: jax.jvp(
            lambda weight: choose(arrays[0], weight, arrays[2])[1][0, 0],
            (weight,),
            (weight,),
        ),
        weight,
    )
    # Scores are linear in the weights.
    np.testing.assert_allclose(along[0], along[1], rtol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_choice_without_gradient(implementation, indexer):
    """What the choice is used for is differentiated, the choice is not."""
    query, weight, key, visible = indexer

    def loss(query, values):
        index, best = indexer_topk(
            query, weight, key, visible, k=5, implementation=implementation
        )
        best = jnp.where(index >= 0, jax.lax.stop_gradient(best), 0.0)
        return jnp.sum(best * values[jnp.maximum(index, 0)])

    values = jnp.arange(272.0)
    slopes = _run(implementation, jax.grad(loss, argnums=(0, 1)), query, values)
    np.testing.assert_array_equal(np.asarray(slopes[0], np.float32), 0)
    assert np.abs(slopes[1]).max() > 0


def test_no_kernel_is_lowered_twice():
    """The choice of a step that is differentiated is made once."""

    def loss(query, weight, key, visible):
        _, best = indexer_topk(query, weight, key, visible, k=64)
        return jnp.sum(best)

    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((1, 128, 8, 64), (1, 128, 8), (1, 64, 4096))
    ]
    text = lower(jax.grad(loss), *arrays, jax.ShapeDtypeStruct((1, 128), jnp.int32))
    assert kernels(text) == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_records_have_no_gradient(implementation, normal):
    """A straight-through estimate: rows rounded by records, with a slope of one."""
    x = jnp.asarray(normal(64, 64), jnp.bfloat16)
    layout = record_layout("fp8", 64, leading=("n",))
    named = dict(implementation=implementation)

    def loss(x):
        rounded = unpack(pack(x, format="fp8", **named), layout, dtype=x.dtype, **named)
        return jnp.sum(x + (rounded - jax.lax.stop_gradient(x)))

    slope = _run(implementation, jax.grad(loss), x)
    np.testing.assert_array_equal(np.asarray(slope, np.float32), 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_transformed_records(implementation, normal):
    """Packing has no gradient; unpacking has that of the bases."""
    x = jnp.asarray(normal(4, 16, 32), jnp.bfloat16)
    layout = record_layout("int4", 32, leading=("n", "s"))
    bases = [jnp.asarray(basis("cosine", size)) for size in (16, 32)]

    def loss(x, tokens, channels, named):
        options = dict(tokens=tokens, channels=channels, implementation=named)
        records = codec.transform_pack(x, format="int4", **options)
        rows = codec.unpack_inverse(records, layout, **options)
        return jnp.sum(jnp.sin(rows))

    def slopes(named):
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        return _run(named, functools.partial(gradient, named=named), x, *bases)

    got, want = slopes(implementation), slopes("xla")
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), 0)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max())
