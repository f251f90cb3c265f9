"""The fastest configuration of a kernel for given arguments, found by trying them."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.timing import Times, interleaved
from pallas_kernels.tuned import Entry

# A configuration has to be this much faster than the default to replace it: less is
# noise, and a table of noise is worse than none.
_GAIN = 1.02
# Those this near to the fastest of the first round are timed again.
_NEAR = 1.1

Timer = Callable[..., Mapping[str, Times]]


class NoConfiguration(RuntimeError):
    """No configuration ran; the text holds the first reason."""


class Tuning[C](NamedTuple):
    """What was found.

    Attributes:
      config: the fastest, or the default where it is known and no other is clearly
        faster.
      seconds: of one call with it.
      default_seconds: of one call with the default; None where that failed.
      timed: how many configurations ran.
      failures: reason by configuration, of those that did not.
    """

    config: C
    seconds: float
    default_seconds: float | None
    timed: int
    failures: Mapping[C | None, str]

    def entry(self, op: str, sizes: Mapping[str, int], dtype: Any) -> Entry:
        """The entry for a table of `tuned`."""
        return Entry(
            op=op,
            sizes=dict(sizes),
            dtype=np.dtype(dtype).name,
            config=dataclasses.asdict(self.config),  # pyright: ignore
            microseconds=round(1e6 * self.seconds, 3),
        )


def autotune[C](
    configurations: Sequence[C],
    build: Callable[[C | None], Callable[[], Any]],
    default: C | None = None,
    *,
    tolerance: float = 2e-2,
    seconds: float = 0.05,
    budget: float = math.inf,
    timer: Timer = interleaved,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Tuning[C]:
    """Times every configuration, and those near the fastest once more.

    Args:
      configurations: legal for the arguments, the default among them or not.
      build: makes the call with a configuration, compiled and bound to its arguments,
        and with None that of the kernel's own default.
        Its result must not depend on the configuration but by rounding: normalised
        outputs and not `Partial` sums.
      default: what is used without a table; None where only the kernel knows. It is
        then timed and never chosen, for it is one of ``configurations`` anyway.
      tolerance: by how much the results of configurations may differ, of the largest
        number of the default's; one that differs by more is a failure.
      seconds: for one configuration in a round.
      budget: seconds of the whole search; what is not tried when they are spent is not
        tried. The order is then random, and always the same.
      timer: as `timing.interleaved`.
      clock: seconds.
      progress: told which share is done.

    Raises:
      NoConfiguration: every one failed.
    """
    others = list(dict.fromkeys(configurations))
    if budget < math.inf:
        # Neighbours in a list are alike: a part of it should not be of one kind.
        random.Random(0).shuffle(others)
    candidates: list[C | None] = list(dict.fromkeys([default, *others]))
    begin = clock()
    failures: dict[C | None, str] = {}
    calls: dict[str, Callable[[], Any]] = {}
    first: dict[str, Times] = {}
    expected = None
    for number, config in enumerate(candidates):
        if clock() - begin > budget and any(name != "0" for name in first):
            break
        name = str(number)
        # What a device refuses is known when it is tried: shared memory, registers,
        # an instruction. The reason is kept and the search goes on.
        try:
            call = build(config)
            result = jax.tree.map(np.asarray, jax.block_until_ready(call()))
            if expected is None:
                expected = result
            elif (worst := _difference(result, expected)) > tolerance:
                raise ArithmeticError(f"differs from the others by {worst:.2g}")
            first |= timer({name: call}, seconds=seconds)
            calls[name] = call
        except Exception as error:
            failures[config] = f"{type(error).__name__}: {error}"
        progress(0.8 * (number + 1) / len(candidates))
    chosen_from = [name for name in first if candidates[int(name)] is not None]
    if not chosen_from:
        raise NoConfiguration(f"none of {len(candidates)}: {failures[candidates[-1]]}")
    fastest = min(first[name].least for name in chosen_from)
    again = {
        name: call
        for name, call in calls.items()
        if first[name].least <= _NEAR * fastest or name == "0"
    }
    times = timer(again, seconds=2 * seconds)
    best = min(
        (name for name in times if name in chosen_from),
        key=lambda name: times[name].least,
    )
    default_seconds = times["0"].least if "0" in times else None
    if default is not None and default_seconds is not None:
        if default_seconds < _GAIN * times[best].least:
            best = "0"
    config = candidates[int(best)]
    assert config is not None
    progress(1.0)
    return Tuning(config, times[best].least, default_seconds, len(first), failures)


def _difference(a: Any, b: Any) -> float:
    """Largest difference of two results, of the second one's largest number."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not y.size:
            continue
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return float("inf")
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return worst
