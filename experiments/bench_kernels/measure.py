"""Measures a case: its contenders in turn, checked against each other."""

import statistics
import time
from collections.abc import Mapping, Sequence
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
_MISSING = (
    ExceptionGroup,
    ImportError,
    ValueError,
    TypeError,
    NotImplementedError,
    RuntimeError,
)


# Of a kernel's products in bfloat16 against XLA's in float32, of the largest number.
_KERNEL_TOLERANCE = 3e-2
_MOST_COMPARED = 1 << 22


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
      reads, ours; "refused" and "failed", reasons by name;  "ratios", see `ratios`;
      "difference", the largest from the last contender, or None.

    Raises:
      Disagreement: by more than the case's tolerance.
      Unsupported: no implementation of ours serves the case.
    """
    arrays = make_arrays(case, seed)
    calls, first, results, refused, failed = {}, {}, {}, {}, {}
    for each in case.contenders:
        if each.platform not in (None, jax.default_backend()):
            continue
        jitted = jax.jit(lambda arrays, f=each.function: f(arrays))
        try:
            with tuned.assumed(configs or {}):
                function = jitted.lower(arrays).compile()
            begin = time.perf_counter()
            result = jax.block_until_ready(function(arrays))
            first[each.name] = time.perf_counter() - begin
        except Unsupported as error:
            refused[each.name] = str(error)
            continue
        except _MISSING as error:
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            if not each.ours:
                refused[each.name] = reason
            elif each.platform is None:
                raise
            else:
                # A kernel that a device does not run is no reason to time no others.
                failed[each.name] = reason
            continue
        calls[each.name] = lambda function=function: function(arrays)
        results[each.name] = [
            _sample(leaf) for leaf in jax.tree.leaves(case.compare(result))
        ]
        del result
    for name, reason in wrong_kernels(case, results).items():
        failed[name] = reason
        del calls[name], results[name]
    served = [each for each in case.contenders if each.name in calls]
    if not any(each.ours for each in served):
        raise Unsupported(f"{case.stage}: {refused}")
    difference = compare(case, results)
    times = interleaved(
        calls, seconds=case.seconds or seconds, least=case.least, first=first
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
        "failed": failed,
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


Results = Mapping[str, Sequence[np.ndarray]]


def compare(case: Case, results: Results) -> float | None:
    """Largest difference of a result from the last one, of that one's largest number.

    Raises:
      Disagreement: it exceeds the tolerance, or numbers are missing on one side.
    """
    if case.tolerance is None or len(results) < 2:
        return None
    *names, last = results
    worst = 0.0
    for name in names:
        difference = _difference(results[name], results[last])
        if not difference <= case.tolerance:
            raise Disagreement(
                f"{case.stage}: {name} differs from {last} by {difference:.2g} of its "
                f"largest number, expected at most {case.tolerance:.2g}"
            )
        worst = max(worst, difference)
    return worst


def wrong_kernels(case: Case, results: Results) -> dict[str, str]:
    """Kernels whose results differ from those of our implementation in XLA."""
    wrong = {}
    for name, result in results.items():
        implementation, space, suffix = name.partition(" ")
        if not implementation.startswith("mosaic_gpu"):
            continue
        other = f"xla{space}{suffix}"
        if other not in results:
            continue
        difference = _difference(result, results[other])
        if not difference <= _KERNEL_TOLERANCE:
            wrong[name] = f"differs from {other} by {difference:.2g}"
    return wrong


def _sample(leaf: jax.Array) -> np.ndarray:
    """At most `_MOST_COMPARED` numbers of an array, evenly spread."""
    # Odd, so that no power of two is met in the same place each time.
    step = max(1, leaf.size // _MOST_COMPARED) | 1
    return np.asarray(leaf.reshape(-1)[::step], np.float64)


def _difference(result: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    worst = 0.0
    for x, y in zip(result, expected, strict=True):
        if not y.size:
            continue
        with np.errstate(invalid="ignore"):
            difference = np.abs(x - y)
        # Where both are infinite they agree.
        difference[x == y] = 0.0
        finite = np.abs(y[np.isfinite(y)])
        scale = max(float(finite.max()) if finite.size else 0.0, 1e-30)
        worst = max(worst, float(difference.max()) / scale)
        if np.isnan(difference).any():
            return float("nan")
    return worst
