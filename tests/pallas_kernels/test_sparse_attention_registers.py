"""Decoding over chosen entries on registers: interpreted, lowered and dispatched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention.api import sparse_attention
from pallas_kernels.sparse_attention.reference import reference
from tests.pallas_kernels.kernel_arrays import abstract, integers, sees_nothing

NAME = "mosaic_gpu_registers"


def _run(query, key, value, chosen):
    arrays = (query, key, value, chosen)
    with interpreted():
        partial = sparse_attention(*arrays, scale=0.4, implementation=NAME)
        return jax.tree.map(np.asarray, partial)


@pytest.mark.parametrize(
    ("b", "t", "e", "n", "k", "h", "c"),
    [(1, 2, 9, 4, 2, 64, 5), (2, 2, 9, 4, 2, 64, 5), (1, 1, 200, 2, 1, 16, 130)],
)
def test_reference(b, t, e, n, k, h, c, normal, agrees):
    """Two batch sizes; a list in two splits; -1, duplicates, NaN that nobody chose."""
    query, key, value = normal(b, t, n, h), normal(b, e, k, h), normal(b, e, k, h)
    chosen = np.random.default_rng(1).integers(-1, e, (b, t, c))
    chosen[-1, -1, :2] = 3
    chosen[0, 0] = -1 if b * t > 1 else chosen[0, 0]
    want = reference(query, key, value, chosen, scale=0.4)
    for row in range(b):
        dead = np.setdiff1d(np.arange(e), chosen[row])
        key[row, dead], value[row, dead] = np.nan, np.nan
    query, key, value, chosen = (jnp.asarray(x) for x in (query, key, value, chosen))
    agrees(_run(query, key, value, chosen), want, atol=1e-5)


def test_shared_and_short(normal, agrees):
    """bfloat16 entries that are both key and value; one of one; none; none chosen."""
    query, key = normal(1, 1, 2, 8), normal(1, 1, 1, 8)
    chosen = np.zeros((1, 1, 1), np.int32)
    key = jnp.asarray(key, jnp.bfloat16)
    want = reference(query, key, key, chosen, scale=0.4)
    query = jnp.asarray(query)
    agrees(_run(query, key, key, jnp.asarray(chosen)), want, atol=1e-5)
    for empty, list_size in ((key[:, :0], 1), (key, 0)):
        none = jnp.full((1, 1, list_size), -1)
        partial = _run(query, empty, empty, none)
        sees_nothing(partial, query.shape)


def _call(query, key, chosen, implementation=NAME, **options):
    return sparse_attention(
        query, key, key + 1, chosen, scale=0.1, implementation=implementation, **options
    )


# The one for matrix units is passed over, of which dispatch warns once.
@pytest.mark.filterwarnings("ignore:sparse_attention. mosaic_gpu needs:RuntimeWarning")
@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize(("h", "dtype"), [(64, jnp.bfloat16), (128, jnp.float32)])
def test_lowers(device, h, dtype):
    """Entries beyond 2^31 elements."""
    arrays = (
        abstract(2, 1, 32, h, dtype=dtype),
        abstract(2, 2**22, 8, h, dtype=dtype),
        integers(2, 1, 512),
    )
    assert kernels(lower(_call, *arrays, device=device)) == 1
    if device in ("a100", "b200"):
        text = lower(
            lambda q, k, c: _call(q, k, c, implementation=None),
            *arrays,
            device=device,
        )
        assert "sparse_attention_registers" in text


@pytest.mark.parametrize(("name", "rounding"), [(NAME, 1e-5), ("mosaic_gpu", 2e-2)])
def test_gradient(name, rounding, normal):
    """Through the kernel's sums, with a sink, against XLA's own."""
    dtype = jnp.float32 if name == NAME else jnp.bfloat16
    query, key = (jnp.asarray(normal(1, s, 2, 64), dtype) for s in (1, 9))
    chosen = jnp.array([[[0, 5, -1, 8, 5]]])

    def loss(query, key, implementation):
        out = sparse_attention(
            query, key, key, chosen, scale=0.2, implementation=implementation
        )
        return jnp.sum(jnp.sin(finish(out, jnp.zeros(2))))

    want = jax.grad(loss, argnums=(0, 1))(query, key, "xla")
    with interpreted():
        got = jax.grad(loss, argnums=(0, 1))(query, key, name)
        got = jax.tree.map(np.asarray, got)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=rounding * np.abs(b).max())


def test_gradient_lowers():
    def loss(query, key, chosen):
        return jnp.sum(finish(_call(query, key, chosen), None) ** 2)

    arrays = (abstract(1, 1, 4, 64), abstract(1, 9, 1, 64))
    chosen = integers(1, 1, 4)
    gradient = jax.grad(loss, argnums=(0, 1))
    assert kernels(lower(gradient, *arrays, chosen)) == 1


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (abstract(1, 17, 4, 64), "up to 16 queries"),
        (abstract(1, 1, 4, 512), "multiple of 8 up to 128"),
        (abstract(1, 1, 65, 64), "up to 64 heads a group, not 65"),
        (abstract(1, 1, 4, 64, dtype=jnp.float16), "float32 or bfloat16"),
    ],
)
def test_refusals(query, reason):
    b, t, _, h = query.shape
    with pytest.raises(Unsupported, match=reason):
        lower(
            _call,
            query,
            abstract(b, 9, 1, h),
            integers(b, t, 4),
        )


def test_refuses_mass():
    arrays = (abstract(1, 1, 4, 64), abstract(1, 9, 1, 64))
    chosen = integers(1, 1, 4)
    with pytest.raises(Unsupported, match="attention mass"):
        lower(lambda q, k, c: _call(q, k, c, mass_block=4), *arrays, chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 128])
def test_on_a_device(h, normal):
    query, key, value = normal(2, 2, 32, h), normal(2, 999, 8, h), normal(2, 999, 8, h)
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (query, key, value))
    chosen = np.random.default_rng(1).integers(-1, 999, (2, 2, 512))
    got, want = (
        finish(
            sparse_attention(
                query, key, value, jnp.asarray(chosen), scale=0.1, implementation=name
            ),
            None,
        )
        for name in (NAME, "xla")
    )
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4)
