"""Helpers for the operations' tests."""

import numpy as np
import pytest

from pallas_kernels.interpret import CannotInterpret
from pallas_kernels.softmax import Partial, finish


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Kernels are interpreted where JAX can; they are lowered everywhere."""
    try:
        return (yield)
    except CannotInterpret as reason:
        pytest.skip(str(reason))


@pytest.fixture
def normal():
    """draw(*shape): float32 numbers of a fixed seed."""
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def agrees():
    """agrees(partial, (output, log sum)): normalised output and mass are the same."""

    def check(partial: Partial, want, atol: float = 2e-6) -> None:
        output, log_sum = want[:2]
        got = np.asarray(finish(partial, None))
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, output, atol=atol)
        b, k, t, g = partial.total.shape
        with np.errstate(divide="ignore"):
            mass = np.log(np.asarray(partial.total, np.float64))
        mass = mass + np.asarray(partial.maximum, np.float64) * np.log(2)
        mass = mass.transpose(0, 2, 1, 3).reshape(b, t, k * g)
        np.testing.assert_allclose(mass, log_sum, atol=atol)

    return check


@pytest.fixture
def per_block():
    """per_block(shares, size): shares [b, t, e] summed over each ``size`` entries."""
    return lambda shares, size: np.add.reduceat(
        shares, np.arange(0, shares.shape[2], size), axis=2
    )
