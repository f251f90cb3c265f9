"""What a launch needs that neither interpretation nor lowering checks."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.launch import computing_registers, kernel


@pytest.mark.parametrize(
    ("warpgroups", "copying", "want"),
    # Two that compute and 40 or 88: as in CUTLASS and FlashMLA, 504 in all. Four: 480.
    [
        (2, 40, 232),
        (2, 88, 208),
        (2, 72, 216),
        (3, 32, 160),
        (4, 32, 112),
        (4, 40, 104),
    ],
)
def test_registers(warpgroups, copying, want):
    assert computing_registers(warpgroups, copying) == want


@pytest.mark.parametrize(
    ("grid", "fits"),
    [
        ((2**31 - 1,), True),
        ((2**31,), False),
        ((2**16 - 1, 2**20), True),
        ((2**16, 2), False),
        ((2**8, 2**7, 1, 3), True),
        ((2**8, 2**8, 1, 3), False),
    ],
)
def test_grid(grid, fits):
    def call():
        return kernel(
            lambda *refs: None,
            out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
            grid=grid,
            grid_names=tuple("abcd"[: len(grid)]),
            cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        )

    if fits:
        call()
    else:
        with pytest.raises(ValueError, match="along the last axis"):
            call()
