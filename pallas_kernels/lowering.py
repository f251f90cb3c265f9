"""Lowering for a GPU that is not there.

Tracing and lowering a Mosaic GPU kernel needs no device: layout inference, the MLIR
verifier and every shape rule of the instructions run on the host. Interpret mode
accepts shapes that lowering refuses, so a kernel is tested in both. Neither shows that
the code assembles or is fast.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh


@dataclasses.dataclass(frozen=True, repr=False)
class _Device(AbstractDevice):
    # Mosaic GPU takes a device without this attribute for a compute capability of 9.0.
    compute_capability: str


DEVICES = {
    "a100": _Device("NVIDIA A100-SXM4-80GB", 108, "gpu", "8.0"),
    "h100": _Device("NVIDIA H100 80GB HBM3", 132, "gpu", "9.0"),
    "h200": _Device("NVIDIA H200", 132, "gpu", "9.0"),
    "b200": _Device("NVIDIA B200", 148, "gpu", "10.0"),
}


def abstract_mesh(device: str) -> AbstractMesh:
    """A mesh of no axes on an abstract device.

    Args:
      device: a name of `DEVICES`.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r}: expected one of {sorted(DEVICES)}")
    return AbstractMesh((), (), abstract_device=DEVICES[device])


def lower(
    function: Callable[..., Any], *args: Any, device: str = "h100", **kwargs: Any
) -> str:
    """The StableHLO text of a function lowered for CUDA on an abstract device.

    Args:
      function: traced anew; dispatch inside it sees the abstract device.
      *args: arrays, or ``jax.ShapeDtypeStruct`` of any size.
      device: a name of `DEVICES`.
      **kwargs: static arguments.

    Raises:
      Whatever tracing, layout inference or the verifier raise.
    """
    # A wrapper of its own, because jit caches traces by function and mesh only.
    wrapped = jax.jit(lambda *arrays: function(*arrays, **kwargs))
    with jax.sharding.use_abstract_mesh(abstract_mesh(device)):
        return wrapped.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    """How many Mosaic GPU kernels a lowered module calls."""
    return text.count("custom_call @mosaic_gpu")
