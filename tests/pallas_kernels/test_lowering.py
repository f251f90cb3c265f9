"""Lowering without a device, and interpretation with race detection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_target
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower


def _double(x):
    def body(x_ref, y_ref):
        rows = pl.ds(jax.lax.axis_index("i") * 128, 128)
        y_ref[rows] = x_ref[rows] * 2

    return plgpu.kernel(body, out_type=x, grid=(x.shape[0] // 128,), grid_names=("i",))(
        x
    )


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200"])
def test_lowers_without_a_device(device):
    text = lower(_double, jax.ShapeDtypeStruct((256,), jnp.float32), device=device)
    assert kernels(text) == 1


def test_lowering_refuses_what_interpretation_takes():
    """A vector must fill whole warpgroups."""

    def narrow(x):
        def body(x_ref, y_ref):
            y_ref[...] = x_ref[...] * 2

        return plgpu.kernel(body, out_type=x)(x)

    with interpreted():
        np.testing.assert_array_equal(np.asarray(narrow(jnp.ones(48))), 2)
    with pytest.raises(Exception, match=r"128|layout"):
        lower(narrow, jax.ShapeDtypeStruct((48,), jnp.float32))


def test_abstract_size_beyond_memory():
    """Offsets past 2**31 elements are lowered without any array."""
    assert kernels(lower(_double, jax.ShapeDtypeStruct((2**33,), jnp.float32))) == 1


def test_unknown_device():
    with pytest.raises(ValueError, match="'h300': expected one of"):
        lower(_double, jnp.ones(128), device="h300")


def test_interpreted():
    with interpreted("b200"):
        assert current_target().capability == (10, 0)
        got = np.asarray(_double(jnp.arange(256.0)))
    np.testing.assert_array_equal(got, 2 * np.arange(256.0))
    assert not current_target().interpreted


def test_race_is_found():
    """Two blocks write the same row."""

    def racing(x):
        def body(x_ref, y_ref):
            y_ref[...] = x_ref[...] + jax.lax.axis_index("i")

        return plgpu.kernel(body, out_type=x, grid=(2,), grid_names=("i",))(x)

    with interpreted(), pytest.raises(Exception, match="race"):
        jax.block_until_ready(racing(jnp.ones(128)))
    with interpreted():
        np.testing.assert_array_equal(np.asarray(_double(jnp.ones(128))), 2)
