"""A training inside a program: seconds, metrics, progress and checkpoints of it."""

import time
from collections.abc import Callable

from experiments import runner
from hybrid_attn.training.checkpoint import TrainCheckpoints
from hybrid_attn.training.data import Batch
from hybrid_attn.training.fit import Updates, fit
from hybrid_attn.training.trainer import TrainState


class Clock:
    """Seconds of this process, stored so that a killed one still counts."""

    def __init__(self, workdir: runner.Workdir, every: float = 5.0):
        self._workdir, self._every = workdir, every
        self._begin = self._saved = time.monotonic()
        number = 0
        while workdir.is_done(f"process.{number}"):
            number += 1
        self._number = number
        self.save()

    def tick(self) -> None:
        """Stores the time, at most once in `every` seconds."""
        if time.monotonic() - self._saved >= self._every:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        seconds = self._saved - self._begin
        self._workdir.mark_done(f"process.{self._number}", {"seconds": seconds})

    def total(self) -> float:
        """Seconds of every process so far."""
        self.save()
        numbers = range(self._number + 1)
        return sum(self._workdir.result(f"process.{n}")["seconds"] for n in numbers)


def fit_stage(
    workdir: runner.Workdir,
    stage: str,
    updates: Updates,
    batch_at: Callable[[int], Batch],
    *,
    save_every: int,
    log_every: int,
    progress: runner.Progress,
    clock: Clock,
) -> TrainState:
    """`fit` with its checkpoints under checkpoints/STAGE and its metrics as the stage.

    A training that was killed goes on from its newest checkpoint, and what it logged
    after that is written again; a finished one is read.
    """
    directory = workdir.file(f"checkpoints/{stage}")
    workdir.rewind_metrics(stage, 1 + _latest_step(directory))
    last: dict[str, float] = {}
    steps = updates.config.steps

    def on_metrics(step: int, values: dict[str, float]) -> None:
        workdir.metrics(stage, step, **values)
        last.update(values)

    def on_step(step: int) -> None:
        note = f"step {step} of {steps}"
        shown = [f"{k} {last[k]:.2f}" for k in ("loss", "accuracy") if k in last]
        progress.update(step / steps, ", ".join([note, *shown]))
        clock.tick()

    return fit(
        updates,
        batch_at,
        checkpoints=directory,
        save_every=save_every,
        log_every=log_every,
        on_metrics=on_metrics,
        on_step=on_step,
    )


def _latest_step(directory) -> int:
    if not directory.exists():
        return 0
    with TrainCheckpoints(directory) as store:
        return store.latest or 0
