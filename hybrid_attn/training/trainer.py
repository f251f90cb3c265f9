"""The training loop: a pure update over (parameters, optimiser state, step)."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.config import ModelConfig
from hybrid_attn.layers.parameters import trainable
from hybrid_attn.model import Model
from hybrid_attn.training.loss import model_loss
from hybrid_attn.training.optimizer import OptimizerConfig, make_optimizer


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
      steps: updates; batch: rows; length: tokens a row (for text).
      indexer_warmup: share of the steps in which sparse layers read all entries.
      indexer_weight: factor on the indexers' KL.
      remat: recompute each block in the backward pass (memory for time).
      seed: of parameters and data.
    """

    steps: int = 400
    batch: int = 32
    length: int = 128
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    indexer_warmup: float = 0.4
    indexer_weight: float = 1.0
    remat: bool = False
    seed: int = 0

    def __post_init__(self):
        if self.steps < 1 or self.batch < 1 or self.length < 1:
            raise ValueError(
                f"steps={self.steps}, batch={self.batch}, length={self.length}: "
                "expected whole numbers from 1"
            )
        if not 0 <= self.indexer_warmup <= 1:
            raise ValueError(f"indexer_warmup={self.indexer_warmup}: expected 0..1")


class TrainState(NamedTuple):
    """Everything a run needs to go on: parameters, optimiser state, step int32[]."""

    params: Any
    optimizer: Any
    step: Array


class Trainer:
    """Compiles one update for a model configuration.

    The data of step i must be a pure function of (seed, i): then a run that was
    killed and resumed is bit-identical to one that was not.
    """

    def __init__(self, model_config: ModelConfig, config: TrainConfig):
        self.model_config, self.config = model_config, config
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self.graph = nnx.split(_abstract(model_config))[0]
        self._update = jax.jit(
            functools.partial(_update, self.graph, self.optimizer, config),
            donate_argnums=0,
        )

    def init(self) -> TrainState:
        """The state before step 0, from the configured seed."""
        # Compiled: hundreds of small eager initialisers cost seconds.
        params = jax.jit(lambda key: _init_params(self.model_config, key))(
            jax.random.key(self.config.seed)
        )
        trained, _ = nnx.split_state(params, trainable, ...)
        optimizer = self.optimizer.init(trained)
        return TrainState(params, optimizer, jnp.zeros((), jnp.int32))

    def abstract(self) -> TrainState:
        """The state's shapes and dtypes, for restoring."""
        return jax.eval_shape(self.init)

    def update(
        self,
        state: TrainState,
        tokens: ArrayLike,
        targets: ArrayLike,
        segment_ids: ArrayLike | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update; consumes ``state``. Metrics are scalars on the device.

        ``segment_ids`` int32[b, t] as for `forward`: rows that pack documents. The
        target at a document's last token is another document's: it must be negative.

        Raises:
          ValueError: segment ids of another shape, or that are not integers.
        """
        return self._update(state, tokens, targets, segment_ids)

    def model(self, state: TrainState) -> Model:
        """The model that a state holds."""
        return nnx.merge(self.graph, state.params)


def _abstract(config: ModelConfig) -> Model:
    return nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0)))


def _init_params(config: ModelConfig, key):
    return nnx.split(Model(config, rngs=nnx.Rngs(key)))[1]


def _update(
    graph,
    optimizer,
    config: TrainConfig,
    state: TrainState,
    tokens,
    targets,
    segment_ids,
):
    dense = state.step < int(config.indexer_warmup * config.steps)
    trained, fixed = nnx.split_state(state.params, trainable, ...)

    def loss(trained):
        return model_loss(
            nnx.merge(graph, nnx.merge_state(trained, fixed)),
            tokens,
            targets,
            segment_ids,
            dense=dense,
            indexer_weight=config.indexer_weight,
            remat=config.remat,
        )

    (total, parts), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    updates, opt_state = optimizer.update(grads, state.optimizer, trained)
    updated: Any = optax.apply_updates(trained, updates)
    params = nnx.merge_state(updated, fixed)
    metrics = {
        "loss": total,
        "cross_entropy": parts.cross_entropy,
        "accuracy": parts.accuracy,
        "indexer_loss": parts.indexer_loss,
        "gradient_norm": optax.tree.norm(grads),
    }
    return TrainState(params, opt_state, state.step + 1), metrics
