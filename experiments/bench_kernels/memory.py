"""Memory of compiled operations, from the compiler's own account; nothing is run."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench_kernels.case import Given
from experiments.bench_kernels.heads import Heads
from experiments.bench_kernels.indexer import choose, scores_top_k
from experiments.bench_kernels.window import window_prefill_call


def bytes_of(function: Callable[..., Any], arrays: Mapping[str, Given]) -> tuple:
    """(temporary bytes, temporary and output bytes) of a compiled function."""
    abstract = {name: given.abstract for name, given in arrays.items()}
    memory = jax.jit(function).lower(abstract).compile().memory_analysis()
    assert memory is not None
    temporary = memory.temp_size_in_bytes
    return temporary, temporary + memory.output_size_in_bytes


def window_growth(lengths: tuple[int, ...], size: int, heads: Heads) -> dict[str, Any]:
    """Temporary memory of window attention over prompts of growing length.

    Returns:
      ``memory_mib_LENGTH`` of each, ``memory_growth``: the last by the first,
      ``length_growth``: of the lengths, which it equals where memory is linear.
    """
    found: dict[str, Any] = {}
    temporary = []
    for length in lengths:
        arrays = {"query": heads.queries(length), **heads.keys(length)}
        temporary.append(
            bytes_of(
                functools.partial(
                    window_prefill_call(length, heads, size), implementation="xla"
                ),
                arrays,
            )[0]
        )
        found[f"memory_mib_{label(length)}"] = temporary[-1] / 2**20
    found["memory_growth"] = temporary[-1] / temporary[0]
    found["length_growth"] = lengths[-1] / lengths[0]
    return found


def indexer_peak(t: int, entries: int, heads: int, dim: int, k: int) -> dict[str, Any]:
    """Memory of the choice for several queries beside that of scores in memory.

    Both sides read the same keys, which are not counted: what is compared is what a
    call needs beside its arguments.

    Returns:
      ``peak_memory_mib``, ``peak_memory_mib_scores``, ``peak_memory_ratio``.
    """
    case = choose(
        "peak", t=t, entries=entries, heads=heads, dim=dim, k=k, dtype=jnp.float32
    )
    xla = next(each for each in case.contenders if each.name == "xla")
    own = bytes_of(xla.function, case.arrays)[1]
    scores = bytes_of(lambda a: scores_top_k(a, k, rows=True), case.arrays)[1]
    return {
        "peak_memory_mib": own / 2**20,
        "peak_memory_mib_scores": scores / 2**20,
        "peak_memory_ratio": own / scores,
    }


def label(length: int) -> str:
    """16384 as "16k"."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
