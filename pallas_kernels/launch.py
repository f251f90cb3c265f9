"""What Mosaic GPU kernels need, for every JAX that the project allows."""

import inspect
import math
from collections.abc import Callable
from typing import Any

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200 (SXM)."""

# JAX 0.11 takes no cost estimate.
_ESTIMATES = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
# What CUDA takes along the last axis of a grid, the one before it, and the others.
_MOST_BLOCKS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
# Of a multiprocessor, and of a thread: some of the 255 that an instruction can name are
# the compiler's own.
_REGISTERS = 2**16
_MOST_REGISTERS = 232


def kernel(
    body: Callable[..., Any],
    *,
    grid: tuple[int, ...],
    cost_estimate: pl.CostEstimate,
    **kwargs: Any,
) -> Callable[..., Any]:
    """``plgpu.kernel(body, grid=grid, cost_estimate=cost_estimate, **kwargs)``.

    Raises:
      ValueError: CUDA would not launch so many blocks, which lowering does not check.
    """
    *others, second, last = (1, 1, *grid)
    blocks = (last, second, math.prod(others))
    if any(size > most for size, most in zip(blocks, _MOST_BLOCKS, strict=True)):
        raise ValueError(
            f"grid {grid}: expected at most {_MOST_BLOCKS[0]} blocks along the last "
            f"axis, {_MOST_BLOCKS[1]} along the one before and the others together"
        )
    kwargs["grid"] = grid
    if _ESTIMATES:
        kwargs["cost_estimate"] = cost_estimate
    return plgpu.kernel(body, **kwargs)


def store(ref: Any, value: Array) -> None:
    """Writes registers to global memory, in whatever layout they are."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # JAX 0.11
        ref[...] = value


def computing_registers(warpgroups: int, copying: int) -> int:
    """Registers that a thread of each computing warpgroup can have.

    Args:
      warpgroups: that compute; one more copies.
      copying: registers that a thread of that one keeps.

    A block starts with all registers divided evenly, a multiple of 8 to each thread.
    ``set_max_registers`` moves them between warpgroups; for more it waits forever.
    """
    every = warpgroups + 1
    each = _REGISTERS // (128 * every) // 8 * 8
    return min((each * every - copying) // warpgroups // 8 * 8, _MOST_REGISTERS)


def divide_warpgroups(
    member: Array,
    warpgroups: int,
    copying: int,
    compute: Callable[[], None],
    copy: Callable[[], None],
) -> None:
    """Runs ``compute`` in the first warpgroups of a block and ``copy`` in one more.

    Args:
      member: int32[], which warpgroup this is.
      warpgroups, copying: as `computing_registers`. One warpgroup that computes has
        registers enough as a block starts, and none are moved then.
    """

    @pl.when(member < warpgroups)
    def _() -> None:
        if warpgroups > 1:
            registers = computing_registers(warpgroups, copying)
            plgpu.set_max_registers(registers, action="increase")
        compute()

    @pl.when(member == warpgroups)
    def _() -> None:
        if warpgroups > 1:
            plgpu.set_max_registers(copying, action="decrease")
        copy()
