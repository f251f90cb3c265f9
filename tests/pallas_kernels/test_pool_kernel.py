"""The pooling kernel: interpreted, lowered, and its overlapping form in XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.pool.api import overlapping_pool, pool
from pallas_kernels.pool.reference import reference


def _overlapping(content, score):
    half = content.shape[3] // 2
    slots = [
        np.concatenate([x[:, :-1, :, :half], x[:, 1:, :, half:]], axis=2)
        for x in (content, score)
    ]
    return reference(*slots)


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (1, 1, 4, 2), (1, 2, 1, 8)])
def test_overlapping(shape, normal):
    content, score = normal(*shape), 3 * normal(*shape)
    got = overlapping_pool(jnp.asarray(content), jnp.asarray(score))
    np.testing.assert_allclose(np.asarray(got), _overlapping(content, score), atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 2, 1, 128), (1, 1, 12, 128), (1, 0, 4, 128)])
def test_kernel(shape, normal):
    content, score = normal(*shape), 100 * normal(*shape)
    with interpreted():
        got = pool(
            jnp.asarray(content), jnp.asarray(score), implementation="mosaic_gpu"
        )
        got = np.asarray(got)
    np.testing.assert_allclose(got, reference(content, score), atol=3e-6)


def test_overlapping_kernel(normal):
    """No group before the first, and a poisoned open group that stays alone."""
    content, score = normal(1, 3, 4, 256), normal(1, 3, 4, 256)
    score[:, 0] = -1e30
    want = _overlapping(content, score)
    content[:, 2, :, 128:] = np.nan
    with interpreted():
        got = overlapping_pool(
            jnp.asarray(content), jnp.asarray(score), implementation="mosaic_gpu"
        )
        got = np.asarray(got)
    np.testing.assert_allclose(got[:, 0], want[:, 0], atol=3e-6)
    assert np.isnan(got[:, 1]).all()


def test_refusal(normal):
    x = jnp.asarray(normal(1, 1, 4, 64))
    with (
        interpreted(),
        pytest.raises(Unsupported, match="a multiple of 128 channels, not 64"),
    ):
        pool(x, x, implementation="mosaic_gpu")


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize(
    ("function", "slots", "channels", "dtype"),
    [
        (pool, 128, 512, jnp.float32),
        (pool, 4, 128, jnp.bfloat16),
        (overlapping_pool, 4, 1024, jnp.float32),
        (overlapping_pool, 4, 256, jnp.float32),
    ],
)
def test_lowers(function, slots, channels, dtype, device):
    """Main entries and index keys of V4; 2^20 groups, offsets beyond 2^31."""
    x = jax.ShapeDtypeStruct((2, 2**20, slots, channels), dtype)
    text = lower(function, x, x, device=device, implementation="mosaic_gpu")
    assert kernels(text) == 1


def test_gradient_lowers():
    def loss(content, score):
        return jnp.sum(pool(content, score, implementation="mosaic_gpu") ** 2)

    x = jax.ShapeDtypeStruct((1, 2, 4, 128), jnp.float32)
    assert kernels(lower(jax.grad(loss, argnums=(0, 1)), x, x)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 4, 12, 128])
def test_on_a_device(slots, normal):
    content, score = normal(2, 3, slots, 512), 3 * normal(2, 3, slots, 512)
    for function, want in ((pool, reference), (overlapping_pool, _overlapping)):
        got = function(
            jnp.asarray(content), jnp.asarray(score), implementation="mosaic_gpu"
        )
        np.testing.assert_allclose(np.asarray(got), want(content, score), atol=1e-5)
