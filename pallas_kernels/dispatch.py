"""Choice of an operation's implementation: by name, or the best that is supported."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jaxtyping

from pallas_kernels.device import Target, current_target

SM90 = frozenset({(9, 0)})
# Kernels of plain arithmetic on registers, without tensor-core instructions.
PORTABLE = frozenset({(8, 0), (9, 0), (10, 0)})
# A warning is shown where the code of a user calls.
_OWN = tuple(
    os.path.dirname(file) for file in (__file__, jax.__file__, jaxtyping.__file__)
)


class Unsupported(ValueError):
    """An implementation was named that cannot serve the call; the text says why."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: "xla", "mosaic_gpu", ...
      function: takes the operation's arguments.
      capabilities: CUDA compute capabilities that it runs on; None for any device.
      refuses: given the target and the operation's arguments, None or the reason why
        they are not served (a shape, a dtype).
    """

    name: str
    function: Callable[..., Any]
    capabilities: frozenset[tuple[int, int]] | None = None
    refuses: Callable[..., str | None] = lambda target, *args, **kwargs: None

    def refusal(self, target: Target, *args: Any, **kwargs: Any) -> str | None:
        """Why the call is not served on ``target``, or None."""
        if self.capabilities is not None:
            # The compute capability decides, never whether lowering would succeed:
            # for an abstract device, lowering takes wgmma for any GPU.
            if target.platform != "gpu":
                return f"needs a CUDA device, not {target}"
            if target.capability not in self.capabilities:
                wanted = ", ".join(f"{a}.{b}" for a, b in sorted(self.capabilities))
                return f"needs compute capability {wanted}, not {target}"
        return self.refuses(target, *args, **kwargs)


class Dispatch:
    """An operation's implementations, best first and XLA last.

    Args:
      op: the operation's name, for messages.
      *implementations: in order of preference. The last is "xla" and runs anywhere.
    """

    def __init__(self, op: str, *implementations: Implementation):
        names = [implementation.name for implementation in implementations]
        if not names or names[-1] != "xla" or len(set(names)) != len(names):
            raise ValueError(f"{op}: implementations {names}: expected xla once, last")
        if implementations[-1].capabilities is not None:
            raise ValueError(f"{op}: xla must run on any device")
        self.op = op
        self.implementations = implementations
        self._warned: set[tuple[str, str]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations' names, best first."""
        return tuple(each.name for each in self.implementations)

    def __call__(
        self, *args: Any, implementation: str | None = None, **kwargs: Any
    ) -> Any:
        """Calls the chosen implementation; see `choose`."""
        return self.choose(implementation, *args, **kwargs).function(*args, **kwargs)

    def choose(
        self, implementation: str | None, *args: Any, **kwargs: Any
    ) -> Implementation:
        """The implementation that serves a call on the current target.

        Args:
          implementation: a name, or None for the first that does not refuse.
          *args, **kwargs: the operation's arguments.

        On a GPU, passing over an implementation warns once per operation and reason;
        elsewhere XLA is the expected choice.

        Raises:
          Unsupported: the named implementation does not exist or refuses the call.
        """
        target = current_target()
        if implementation is not None:
            if implementation not in self.names:
                raise Unsupported(
                    f"{self.op}: implementation {implementation!r}: expected one of "
                    f"{', '.join(self.names)}"
                )
            named = self.implementations[self.names.index(implementation)]
            reason = named.refusal(target, *args, **kwargs)
            if reason is not None:
                raise Unsupported(f"{self.op}: {implementation} {reason}")
            return named
        for each in self.implementations[:-1]:
            # An interpreted kernel is a test, so it is only run by name.
            if target.interpreted:
                break
            reason = each.refusal(target, *args, **kwargs)
            if reason is None:
                return each
            if target.platform == "gpu":
                self._warn(each.name, reason)
        return self.implementations[-1]

    def _warn(self, name: str, reason: str) -> None:
        if (name, reason) not in self._warned:
            self._warned.add((name, reason))
            warnings.warn(
                f"{self.op}: {name} {reason}; falls back",
                RuntimeWarning,
                skip_file_prefixes=_OWN,
            )
