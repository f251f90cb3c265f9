"""Times of functions on the current device, taken in turn so that drifts hit all."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

# Calls of one sample are queued until they take this long: the clock and, on a GPU,
# the launch then cost little beside them.
_LEAST_SAMPLE = 2e-3


class Times(NamedTuple):
    """Seconds of one call.

    Attributes:
      least: of all samples; what the device can do when nothing disturbs it.
      median: of all samples.
      samples: all of them, in the order of rounds.
    """

    least: float
    median: float
    samples: tuple[float, ...]


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    least: int = 2,
    most: int = 60,
    first: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Times functions in turn, a sample of each in every round, forth and back.

    Args:
      functions: by name; each returns arrays, which are waited for.
      seconds: for each function; a slow one may take more.
      least, most: samples of each; the fewer are taken where ``seconds`` are spent.
      first: seconds of a call of each, compiled before; None where there was none yet.
      clock: seconds.

    The first call compiles and the second settles caches and the length of a sample;
    neither is counted, but for one of compiled code that alone takes all ``seconds``.
    """
    calls: dict[str, int] = {}
    spent = dict.fromkeys(functions, 0.0)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name, function in functions.items():
        once = 0.0 if first is None else first[name]
        if first is None:
            jax.block_until_ready(function())
        if once < seconds or least > 1:
            begin = clock()
            jax.block_until_ready(function())
            once = max(clock() - begin, 1e-9)
        calls[name] = max(1, round(_LEAST_SAMPLE / once))
        if once >= seconds:
            samples[name].append(once)
            spent[name] = once
    for number in range(most):
        ran = False
        # Whatever a function leaves in the caches, both neighbours find it.
        for name in list(functions)[:: -1 if number % 2 else 1]:
            function = functions[name]
            if spent[name] >= seconds and len(samples[name]) >= least:
                continue
            begin = clock()
            for _ in range(calls[name] - 1):
                function()
            jax.block_until_ready(function())
            passed = clock() - begin
            samples[name].append(passed / calls[name])
            spent[name] += passed
            ran = True
        if not ran:
            break
    return {
        name: Times(min(taken), statistics.median(taken), tuple(taken))
        for name, taken in samples.items()
    }
