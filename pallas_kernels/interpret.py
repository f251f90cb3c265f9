"""Mosaic GPU kernels run on the host, one thread at a time, with race detection."""

import contextlib
from collections.abc import Iterator

import jax

# The reset has no public name in JAX 0.11 and 0.12.
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import assumed_target, target_of
from pallas_kernels.lowering import DEVICES

_LEAST_JAX = (0, 12)


class CannotInterpret(RuntimeError):
    """This JAX does not interpret kernels as their tests need it."""


@contextlib.contextmanager
def interpreted(device: str = "h200", *, detect_races: bool = True) -> Iterator[None]:
    """Kernels called inside are interpreted; dispatch sees ``device``.

    Functions must be traced and finished inside: jit does not cache by it, and
    results are asynchronous. Copies and barriers are simulated with vector clocks;
    wgmma runs synchronously, so races around it are not seen.

    Args:
      device: a name of ``lowering.DEVICES``.
      detect_races: raise when two threads touch one address without order.

    Raises:
      CannotInterpret: before JAX 0.12, which prints races and goes on, and refuses
        barriers whose last phase one thread need not see.
    """
    if jax.__version_info__ < _LEAST_JAX:
        raise CannotInterpret(f"needs JAX 0.12, this is {jax.__version__}")
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    target = target_of(DEVICES[device])._replace(interpreted=True)
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with assumed_target(target), plgpu.force_gpu_interpret_mode(params):
            yield
    finally:
        # An interrupted kernel leaves its shared memory behind.
        gpu_callbacks.reset_gpu_interpret_mode_state()
