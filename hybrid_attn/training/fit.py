"""Runs a trainer to its last step, with checkpoints, metrics and progress."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.typing import ArrayLike

from hybrid_attn.training.checkpoint import TrainCheckpoints
from hybrid_attn.training.data.batch import Batch
from hybrid_attn.training.trainer import TrainState

Metrics = dict[str, float]


class Updates(Protocol):
    """What `fit` runs: a `Trainer`, or a `Distiller`."""

    @property
    def config(self) -> Any:
        """Its ``steps`` is the number of updates."""
        ...

    def init(self) -> TrainState: ...

    def abstract(self) -> TrainState: ...

    def update(
        self,
        state: TrainState,
        tokens: ArrayLike,
        targets: ArrayLike,
        segment_ids: ArrayLike | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]: ...


def fit(
    trainer: Updates,
    batch_at: Callable[[int], Batch],
    *,
    checkpoints: str | Path | None = None,
    save_every: int = 200,
    log_every: int = 20,
    on_metrics: Callable[[int, Metrics], None] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainState:
    """Trains from the newest checkpoint, or from step 0.

    Args:
      trainer: the compiled update.
      batch_at: the data of a step, a pure function of its number.
      checkpoints: directory; None keeps nothing.
      save_every: steps between checkpoints; the last step is always saved.
      log_every: steps between calls of ``on_metrics(step, metrics)``.
      on_step: called after every update with the number of updates done.

    Returns:
      The state after the last step. Killed and started again it is bit-identical to
      that of an uninterrupted run.
    """
    store = None if checkpoints is None else TrainCheckpoints(checkpoints)
    try:
        state = store.restore(trainer.abstract()) if store else None
        state = trainer.init() if state is None else state
        steps = trainer.config.steps
        for step in range(int(state.step), steps):
            batch = batch_at(step)
            state, metrics = trainer.update(
                state, batch.tokens, batch.targets, batch.segment_ids
            )
            done = step + 1
            if on_metrics and (done % log_every == 0 or done == steps):
                values = jax.device_get(metrics)
                on_metrics(done, {name: float(v) for name, v in values.items()})
            if store and (done % save_every == 0 or done == steps):
                store.save(state)
            if on_step:
                on_step(done)
        return state
    finally:
        if store:
            store.close()
