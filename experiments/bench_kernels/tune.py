"""Tries the configurations of the kernels of a case, on the device.

python -m experiments.bench_kernels.tune      adds the shapes of all GPU cases to the
tables of `pallas_kernels/tuned`, as waiting for a device, in place of those that waited
before; needs none.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.bench_kernels.case import Case, Contender
from experiments.bench_kernels.cases import cases
from experiments.bench_kernels.measure import make_arrays
from pallas_kernels import tuned
from pallas_kernels.autotune import Timer, Tuning, autotune
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.lowering import DEVICES, abstract_mesh
from pallas_kernels.timing import interleaved

# What the kernels for compute capability 9.0 run on.
TABLES = ("h100", "h200")


def asks(case: Case) -> tuple[Contender, list[tuned.Question]] | None:
    """The first of our implementations that serves a case, and what it asks for."""
    for each in case.contenders:
        if each.ours and each.platform in (None, jax.default_backend()):
            try:
                return each, questions(each, case)
            except Unsupported:
                continue
    return None


def questions(contender: Contender, case: Case) -> list[tuned.Question]:
    """What the contender's kernels ask their tables for; one for each operation.

    Raises:
      Unsupported: it does not serve the case.
    """
    arrays = {name: given.abstract for name, given in case.arrays.items()}
    with tuned.recorded() as asked:
        # A function of its own, because JAX keeps what it traced.
        jax.eval_shape(lambda arrays: contender.function(arrays), arrays)
    return list({question.op: question for question in asked}.values())


def tune_case(
    case: Case,
    seed: int,
    *,
    budget: float = math.inf,
    progress: Callable[[float], None] = lambda fraction: None,
    timer: Timer = interleaved,
) -> dict[str, tuple[tuned.Question, Tuning[Any]]]:
    """The fastest configuration of each operation that the case's kernel asks for.

    Args:
      case: whose first implementation of ours is tuned; nothing is done where it asks
        for nothing.
      seed: of the arrays.
      budget: seconds for each operation.
      progress: told which share is done.
      timer: as `timing.interleaved`.

    Raises:
      NoConfiguration: every configuration failed.
    """
    serving = asks(case)
    if serving is None:
        return {}
    kernel, asked = serving
    found: dict[str, tuple[tuned.Question, Tuning[Any]]] = {}
    arrays = make_arrays(case, seed) if asked else {}
    for number, question in enumerate(asked):
        before = {op: tuning.config for op, (_, tuning) in found.items()}

        def build(config: Any, op: str = question.op, before=before):
            function = jax.jit(lambda arrays: kernel.function(arrays))

            def call():
                # Traced at the first call, which is inside.
                with tuned.assumed({**before, op: config}):
                    return function(arrays)

            return call

        tuning = autotune(
            question.legal,
            build,
            budget=budget,
            timer=timer,
            progress=lambda fraction, n=number: progress((n + fraction) / len(asked)),
        )
        found[question.op] = question, tuning
    return found


def configs(case: Case, directory: Path) -> dict[str, Any]:
    """What the tables of a directory say of the case's kernel, by operation.

    Empty where kernels read that directory themselves.
    """
    serving = None if directory == tuned.DIRECTORY else asks(case)
    if serving is None:
        return {}
    return {
        question.op: tuned.choose(
            question.op,
            question.sizes,
            question.dtype,
            question.legal,
            directory=directory,
        )
        for question in serving[1]
    }


def table_with(
    found: Mapping[str, tuple[tuned.Question, Tuning[Any]]],
    device_kind: str,
    directory: Path,
) -> tuned.Table:
    """The device's table with what was found, not yet written."""
    table = tuned.load(device_kind, directory)
    if table is None:
        table = tuned.Table(device_kind=device_kind, jax=None, entries=())
    entries = [
        tuning.entry(question.op, question.sizes, question.dtype)
        for question, tuning in found.values()
    ]
    return table.updated(entries, jax=jax.__version__)


def waiting(device: str) -> list[tuned.Entry]:
    """An entry without a configuration for each shape that the GPU cases ask for.

    Args:
      device: a name of ``lowering.DEVICES``; it need not be there.
    """
    entries = {}
    for case in cases("gpu"):
        asked: list[tuned.Question] = []
        for each in case.contenders:
            if each.ours and each.platform is not None:
                with (
                    jax.sharding.use_abstract_mesh(abstract_mesh(device)),
                    contextlib.suppress(Unsupported),
                ):
                    asked += questions(each, case)
        for question in asked:
            entry = tuned.Entry(
                op=question.op, sizes=question.sizes, dtype=question.dtype
            )
            entries[entry.key] = entry
    return list(entries.values())


def add_waiting(device: str, directory: Path = tuned.DIRECTORY) -> Path:
    """Writes the device's table: what was measured, and `waiting` where nothing was."""
    kind = DEVICES[device].device_kind
    table = tuned.load(kind, directory)
    measured = () if table is None else table.entries
    measured = [entry for entry in measured if entry.config is not None]
    version = None if table is None else table.jax
    empty = tuned.Table(device_kind=kind, jax=None, entries=())
    new = empty.updated([*waiting(device), *measured], jax=version)
    return tuned.write(new, directory)


if __name__ == "__main__":
    for name in TABLES:
        print(add_waiting(name))
