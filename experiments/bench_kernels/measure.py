"""Measures a case: its contenders in turn, checked against each other."""

import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench_kernels.case import Case
from pallas_kernels import tuned
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.timing import Times, interleaved

# A baseline may be missing on this machine (its package, a shape it does not take);
# an implementation of ours either serves a call or says why not.
_MISSING = (ImportError, ValueError, TypeError, NotImplementedError, RuntimeError)


class Disagreement(RuntimeError):
    """Two contenders computed different things, so that no ratio means anything."""


def ceilings(profile: str, seconds: float) -> dict[str, float]:
    """What the device reaches: "copy" in bytes/s, read and written, "matmul" in FLOP/s.

    The copy adds one to an array beyond the caches; the product is square, in float32
    on a CPU and in bfloat16 on a GPU.
    """
    count, size = {"cpu": (1 << 25, 2048), "gpu": (1 << 28, 8192)}.get(
        profile, (1 << 12, 64)
    )
    dtype = jnp.bfloat16 if profile == "gpu" else jnp.float32
    array = jnp.zeros(count, jnp.float32)
    matrix = jnp.ones((size, size), dtype)
    copy = jax.jit(lambda x: x + 1)
    product = jax.jit(lambda a: a @ a)
    times = interleaved(
        {"copy": lambda: copy(array), "matmul": lambda: product(matrix)},
        seconds=seconds,
        least=3,
    )
    return {
        "copy": 2 * array.nbytes / times["copy"].least,
        "matmul": 2 * size**3 / times["matmul"].least,
    }


def measure(
    case: Case,
    seconds: float,
    seed: int,
    *,
    configs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Times of a case's contenders, in a form that JSON can hold.

    Args:
      case: what to measure.
      seconds: for each contender, unless the case asks for its own.
      seed: of the arrays.
      configs: by operation, what its kernel was tuned to; None for what its table says.

    Returns:
      "shape"; "contenders", by name: seconds (least), median, samples, bytes, flops,
      reads, ours; "refused", reasons by name; "ratios", see `ratios`;
      "difference", the largest from the last contender, or None.

    Raises:
      Disagreement: by more than the case's tolerance.
      Unsupported: no implementation of ours serves the case.
    """
    arrays = make_arrays(case, seed)
    calls, results, refused = {}, {}, {}
    for each in case.contenders:
        if each.platform not in (None, jax.default_backend()):
            continue
        function = jax.jit(lambda arrays, f=each.function: f(arrays))
        try:
            with tuned.assumed(configs or {}):
                result = jax.block_until_ready(function(arrays))
        except Unsupported as error:
            refused[each.name] = str(error)
            continue
        except _MISSING as error:
            if each.ours:
                raise
            refused[each.name] = f"{type(error).__name__}: {error}".split("\n")[0]
            continue
        calls[each.name] = lambda function=function: function(arrays)
        if case.tolerance is not None:
            results[each.name] = np.asarray(case.compare(result), np.float64)
        del result
    served = [each for each in case.contenders if each.name in calls]
    if not any(each.ours for each in served):
        raise Unsupported(f"{case.stage}: {refused}")
    difference = compare(case, results)
    times = interleaved(
        calls, seconds=case.seconds or seconds, least=case.least, compiled=True
    )
    return {
        "op": case.op,
        "name": case.name,
        "shape": case.shape,
        "contenders": {
            each.name: {
                "seconds": times[each.name].least,
                "median": times[each.name].median,
                "samples": len(times[each.name].samples),
                "bytes": each.bytes,
                "flops": each.flops,
                "reads": each.reads,
                "ours": each.ours,
            }
            for each in served
        },
        "refused": refused,
        "ratios": ratios(case, times),
        "difference": difference,
    }


def make_arrays(case: Case, seed: int) -> dict[str, jax.Array]:
    """The case's arrays on the default device."""
    generator = np.random.default_rng(seed)
    return {name: given.make(generator) for name, given in case.arrays.items()}


def ratios(case: Case, times: Mapping[str, Times]) -> dict[str, float]:
    """The case's ratios of times; those that lack a contender are left out.

    Of least times; where one implementation is compared with itself ("{}"), the median
    of the ratios of each round, whose two samples a disturbance hits alike.
    """
    own = [each.name for each in case.contenders if each.ours and each.name in times]
    fastest = min(own, key=lambda name: times[name].least)
    found: dict[str, float] = {}
    for key, (dividend, divisor) in case.ratios.items():
        if "{}" not in dividend:
            above, below = (
                fastest if name == "ours" else name for name in (dividend, divisor)
            )
            if above in times and below in times:
                found[key] = times[above].least / times[below].least
            continue
        for name in own:
            above, below = dividend.format(name), divisor.format(name)
            if above in times and below in times and key not in found:
                pairs = zip(times[above].samples, times[below].samples, strict=False)
                found[key] = statistics.median(a / b for a, b in pairs)
    return found


def compare(case: Case, results: Mapping[str, np.ndarray]) -> float | None:
    """Largest difference of a result from the last one, of that one's largest number.

    Raises:
      Disagreement: it exceeds the tolerance, or numbers are missing on one side.
    """
    if case.tolerance is None or len(results) < 2:
        return None
    *names, last = results
    expected, worst = results[last], 0.0
    scale = max(float(np.abs(expected).max()), 1e-30)
    for name in names:
        difference = float(np.abs(results[name] - expected).max()) / scale
        if not difference <= case.tolerance:
            raise Disagreement(
                f"{case.stage}: {name} differs from {last} by {difference:.2g} of its "
                f"largest number, expected at most {case.tolerance:.2g}"
            )
        worst = max(worst, difference)
    return worst
