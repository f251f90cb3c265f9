"""Checkpoints of training runs through Orbax V1."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
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
            self._checkpointer.save(step, state)

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest state, strictly of the abstract shape, or None.

        Raises:
          ValueError: what is stored has other leaves, shapes or dtypes.
        """
        step = self.latest
        if step is None:
            return None
        # Orbax would refuse too, in the middle of reading and less plainly.
        stored = _shapes(self._checkpointer.metadata(step).metadata)
        wanted = _shapes(abstract)
        if stored != wanted:
            raise ValueError(
                f"checkpoint {step} is of another model or optimiser: it alone has "
                f"leaves {list((stored - wanted).elements())}, expected are "
                f"{list((wanted - stored).elements())}"
            )
        return self._checkpointer.load(step, _placed(abstract))

    def close(self) -> None:
        self._checkpointer.close()

    def __enter__(self) -> "TrainCheckpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _shapes(tree: Any) -> Counter:
    leaves = jax.tree.leaves(tree)
    return Counter((tuple(x.shape), str(jnp.dtype(x.dtype))) for x in leaves)


def _placed(abstract: TrainState) -> Any:
    """The abstract state on the default device: restoring then asks for no more."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
    )
