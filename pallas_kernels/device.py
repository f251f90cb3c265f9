"""The device that a computation is traced for."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Target(NamedTuple):
    """What dispatch knows of a device.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the vendor's name, as in ``jax.Device.device_kind``.
      capability: CUDA compute capability (major, minor); None where unknown.
      interpreted: Mosaic GPU kernels are interpreted on the host.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None
    interpreted: bool = False

    def __str__(self) -> str:
        name = f"{self.kind} ({self.platform}"
        if self.capability is not None:
            name += f", compute capability {self.capability[0]}.{self.capability[1]}"
        return name + ")"


# Device kinds whose abstract description carries no compute capability. The names are
# matched as prefixes after "NVIDIA ".
_CAPABILITIES = {
    "A100": (8, 0),
    "A10": (8, 6),
    "A40": (8, 6),
    "B200": (10, 0),
    "GB200": (10, 0),
    "GH200": (9, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "L4": (8, 9),
    "L40": (8, 9),
    "T4": (7, 5),
    "Tesla T4": (7, 5),
    "Tesla V100": (7, 0),
}

_override: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "target", default=None
)


def target_of(device: Any) -> Target:
    """The target of a ``jax.Device`` or ``jax.sharding.AbstractDevice``."""
    capability = getattr(device, "compute_capability", None)
    if isinstance(capability, str):
        parts = capability.split(".")
        known = len(parts) == 2 and all(part.isdigit() for part in parts)
        capability = (int(parts[0]), int(parts[1])) if known else None
    elif device.platform == "gpu":
        capability = _capability_of_kind(device.device_kind)
    else:
        capability = None
    return Target(device.platform, device.device_kind, capability)


def _capability_of_kind(kind: str) -> tuple[int, int] | None:
    words = kind.removeprefix("NVIDIA ").replace("-", " ")
    matches = [
        name for name in _CAPABILITIES if words == name or words.startswith(name + " ")
    ]
    return _CAPABILITIES[max(matches, key=len)] if matches else None


def current_target() -> Target:
    """The device of the abstract mesh in use, else JAX's default device."""
    if (override := _override.get()) is not None:
        return override
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return target_of(abstract)
    default = jax.config.jax_default_device  # pyright: ignore
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return target_of(default if default is not None else jax.devices()[0])


@contextlib.contextmanager
def assumed_target(target: Target) -> Iterator[None]:
    """Functions traced inside dispatch as if for ``target``.

    jit's cache does not know of it: trace a function that was not traced before.
    """
    token = _override.set(target)
    try:
        yield
    finally:
        _override.reset(token)
