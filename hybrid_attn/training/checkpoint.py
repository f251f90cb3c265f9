"""Checkpoints of training runs through Orbax V1."""

from pathlib import Path
from typing import Any, cast

import jax
from orbax.checkpoint import v1 as ocp

from hybrid_attn.training.trainer import TrainState


class TrainCheckpoints:
    """The checkpoints of one run in a directory; the newest few are kept.

    A checkpoint appears whole or not at all: Orbax renames a finished directory.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        self._checkpointer = ocp.training.Checkpointer(
            str(Path(directory).absolute()),
            # The policy classes and the argument disagree in Orbax's own types.
            preservation_policy=cast(
                Any, ocp.training.preservation_policies.LatestN(n=keep)
            ),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The newest complete step, or None."""
        found = self._checkpointer.latest
        return None if found is None else int(found.step)

    def save(self, state: TrainState) -> None:
        """Writes the state under its step; one that is there already is kept."""
        step = int(state.step)
        if self.latest != step:
            self._checkpointer.save_pytree(step, state)

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest state, strictly of the abstract shape, or None.

        Raises:
          ValueError: what is stored has other leaves, shapes or dtypes.
        """
        step = self.latest
        if step is None:
            return None
        state = self._checkpointer.load_pytree(step, abstract)
        for wanted, got in zip(
            jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
        ):
            if (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
                raise ValueError(
                    f"checkpoint {step}: a leaf is {got.shape} {got.dtype}, "
                    f"expected {wanted.shape} {wanted.dtype}"
                )
        return state

    def close(self) -> None:
        self._checkpointer.close()

    def __enter__(self) -> "TrainCheckpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()
