"""Layer-wise distillation of a converted model against its dense teacher.

The teacher runs forward once a batch. Every converted layer gets the teacher's own
input of that layer and learns two things: that its mixer gives what the dense mixer
gave (squared error over the square of the target; the attention transfer of LoLCATs,
arXiv 2410.10254), and, where an indexer chooses, that the scores follow the dense
layer's attention mass on each group (Kullback-Leibler, as in the indexer's warm-up of
DeepSeek-V3.2, arXiv 2512.02556). No gradient passes from layer to layer, so
what a layer learns does not depend on which others are converted, memory holds one
layer's activations at a time, and layers of one kind share one compiled update.

Sparse layers read what their indexer chooses, from the first step on (``dense`` is not
given): the warm-up of `model_loss` reads all entries because a model that learns from
itself has no mass on entries that it does not read. Here the teacher's mass covers
every entry, and entries learn for the queries that will read them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.cache.span import Span
from hybrid_attn.mixers.indexer import indexer_loss
from hybrid_attn.mixers.sparse import SparseMixer
from hybrid_attn.model import Model
from hybrid_attn.training.optimizer import OptimizerConfig, make_optimizer
from hybrid_attn.training.trainer import TrainState
from pallas_kernels.compressed_attention.api import compressed_attention

PARTS = ("compressor", "indexer", "sink", "sink_key")
"""What a converted mixer has that a dense one has not: all that can be trained."""


def _optimizer() -> OptimizerConfig:
    # The weights start at the teacher's own: decay would pull them away from it.
    return OptimizerConfig(peak_rate=3e-3, warmup=5, weight_decay=0.0)


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """One distillation.

    Attributes:
      steps: updates.
      parts: which of `PARTS` are trained; everything else stays as it is.
      optimizer: of every layer by itself, its clipping too.
      indexer_weight: factor on the indexers' KL.
    """

    steps: int = 100
    parts: tuple[str, ...] = PARTS
    optimizer: OptimizerConfig = dataclasses.field(default_factory=_optimizer)
    indexer_weight: float = 1.0

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: expected a whole number from 1")
        unknown = sorted(set(self.parts) - set(PARTS))
        if unknown or not self.parts:
            raise ValueError(f"parts={self.parts}: expected some of {', '.join(PARTS)}")


class _Graphs(NamedTuple):
    """Static: the teacher's block and the converted mixer, without parameters.

    ``shared`` are paths of frozen parameters that the mixer reads from the teacher's.
    """

    block: Any
    mixer: Any
    shared: tuple[tuple, ...]


class _Layer(NamedTuple):
    """One layer that is trained.

    Attributes:
      block: the teacher's parameters.
      trained: the mixer's before the first step.
      own: its frozen ones that the teacher has not.
    """

    graphs: _Graphs
    block: nnx.State
    trained: nnx.State
    own: nnx.State


class Distiller:
    """Updates of the trained parameters of a converted model, for `fit`.

    A state's ``params`` and ``optimizer`` are by layer ("3"), of that layer's mixer
    alone. An update is a pure function of (state, tokens).

    Attributes:
      layers: indices of the layers that are trained.
    """

    def __init__(self, teacher: Model, student: Model, config: DistillConfig):
        """Takes the two models.

        Args:
          teacher: every layer `dense`.
          student: `hybrid_attn.weights.convert` of it. Its `dense` layers stay as
            they are.

        Raises:
          ValueError: a teacher with other layers or with hyper-connections, a student
            of another depth or width, or none of ``config.parts`` in any layer.
        """
        _check(teacher, student)
        self.config, self.teacher, self.student = config, teacher, student
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self._layers = {
            index: layer
            for index in range(len(student.blocks))
            if (layer := _layer(teacher, student, index, config.parts)) is not None
        }
        if not self._layers:
            raise ValueError(
                f"no layer of {student.config.pattern} has any of "
                f"{', '.join(config.parts)}: there is nothing to train"
            )
        self.layers = tuple(self._layers)
        # The teacher's layers after the last one need not run.
        self._kept = {
            index: nnx.split(teacher.blocks[index])
            for index in range(self.layers[-1])
            if index not in self._layers
        }
        self._update = jax.jit(
            functools.partial(_update, self.optimizer, config.indexer_weight),
            static_argnums=0,
            donate_argnums=(3, 4),
        )
        self._run = jax.jit(_run, static_argnums=0)

    def init(self) -> TrainState:
        """The state before step 0: the student's own values, copied."""
        # Updates consume their state, and the student keeps its arrays.
        params = {
            str(index): jax.tree.map(jnp.copy, layer.trained)
            for index, layer in self._layers.items()
        }
        optimizer = {index: self.optimizer.init(own) for index, own in params.items()}
        return TrainState(params, optimizer, jnp.zeros((), jnp.int32))

    def abstract(self) -> TrainState:
        """The state's shapes and dtypes, for restoring."""
        return jax.eval_shape(self.init)

    def update(
        self,
        state: TrainState,
        tokens: ArrayLike,
        targets: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """One update of every layer; consumes ``state``.

        Args:
          tokens: int32[b, t], each row a text from its beginning.
          targets: not read; there for `fit`.

        Returns:
          (state, metrics), the metrics float32[] of the state before the update:
          ``loss`` of a layer, ``output_error`` (squared, over the square of the
          target; mean over layers), ``indexer_loss`` (nats, mean over the layers that
          have an indexer, if any) and ``error.I`` of layer I.

        Raises:
          ValueError: segment ids, or tokens that are not [batch, time].
        """
        if segment_ids is not None:
            raise ValueError("segment_ids: distillation reads rows of one document")
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(f"tokens {tokens.shape}: expected [batch, time]")
        x = self.teacher.embed(tokens)
        params, optimizer = dict(state.params), dict(state.optimizer)
        errors, kl = {}, []
        for index in range(self.layers[-1] + 1):
            if index not in self._layers:
                x = self._run(*self._kept[index], x, tokens)
                continue
            layer, name = self._layers[index], str(index)
            x, params[name], optimizer[name], metrics = self._update(
                layer.graphs,
                layer.block,
                layer.own,
                params[name],
                optimizer[name],
                x,
                tokens,
            )
            errors[f"error.{index}"] = metrics["output_error"]
            kl += [metrics["indexer_loss"]] if "indexer_loss" in metrics else []
        mean = jnp.mean(jnp.stack(list(errors.values())))
        metrics = {"loss": mean, "output_error": mean, **errors}
        if kl:
            total = jnp.sum(jnp.stack(kl))
            metrics["indexer_loss"] = total / len(kl)
            metrics["loss"] += self.config.indexer_weight * total / len(errors)
        return TrainState(params, optimizer, state.step + 1), metrics

    def model(self, state: TrainState) -> Model:
        """The converted model with a state's parameters; every array is shared."""
        graph, params = nnx.split(self.student)
        flat = dict(nnx.to_flat_state(params))
        for index, trained in state.params.items():
            for path, variable in nnx.to_flat_state(trained):
                flat["blocks", int(index), "mixer", *path] = variable
        return nnx.merge(graph, nnx.from_flat_state(flat))


def _check(teacher: Model, student: Model) -> None:
    config, other = teacher.config, student.config
    kinds = sorted({layer.kind for layer in config.layers} - {"dense"})
    if kinds:
        raise ValueError(f"the teacher has layers {kinds}: expected 'dense' alone")
    if config.hyper is not None:
        raise ValueError("the teacher has hyper-connections: expected one stream")
    sizes = [(len(c.layers), c.hidden_size, c.vocab_size) for c in (config, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"layers, hidden size and vocabulary are {sizes[0]} in the teacher and "
            f"{sizes[1]} in the student"
        )


def _layer(
    teacher: Model, student: Model, index: int, parts: tuple[str, ...]
) -> _Layer | None:
    """What a layer's updates need; None where there is nothing to train."""
    if student.config.layers[index].kind == "dense":
        return None
    block_graph, block = nnx.split(teacher.blocks[index])
    graph, trained, rest = nnx.split(
        student.blocks[index].mixer, lambda path, value: path[0] in parts, ...
    )
    if not jax.tree.leaves(trained):
        return None
    dense = dict(nnx.to_flat_state(block["mixer"]))
    shared, own = [], {}
    for path, variable in nnx.to_flat_state(rest):
        if path in dense and dense[path][...] is variable[...]:
            shared.append(path)
        else:
            own[path] = variable
    graphs = _Graphs(block_graph, graph, tuple(shared))
    return _Layer(graphs, block, trained, nnx.from_flat_state(own))


def _run(graph, params, x: Array, tokens: Array) -> Array:
    """The teacher's block, of a layer that is not trained."""
    block = nnx.merge(graph, params)
    span = Span.training(tokens.shape[0], tokens.shape[1])
    return block(x, tokens, None, span)[0]


def _update(
    optimizer, weight: float, graphs: _Graphs, params, own, trained, state, x, tokens
):
    """(the teacher's next input, parameters, optimiser state, metrics) of a layer."""
    span = Span.training(tokens.shape[0], tokens.shape[1])
    block = nnx.merge(graphs.block, params)
    y = block.mixer_norm(x)
    dense = dict(nnx.to_flat_state(params["mixer"]))
    frozen = nnx.from_flat_state(
        {path: dense[path] for path in graphs.shared} | dict(nnx.to_flat_state(own))
    )
    mixer = nnx.merge(graphs.mixer, trained, frozen)
    ratio = mixer.layer.ratio if isinstance(mixer, SparseMixer) else None
    target, mass = _teach(block.mixer, y, span, ratio)

    def loss(trained):
        mixer = nnx.merge(graphs.mixer, trained, frozen)
        total = _error(mixer(y, None, span)[0], target)
        metrics = {"output_error": total}
        if mass is not None:
            scores, seen = mixer.scores(mixer.inputs(y, None, span)[0], span)
            kl = indexer_loss(scores, mass[..., : scores.shape[-1]], seen)
            metrics["indexer_loss"] = kl
            total += weight * kl
        return total, metrics

    grads, metrics = jax.grad(loss, has_aux=True)(trained)
    updates, state = optimizer.update(grads, state, trained)
    trained = optax.apply_updates(trained, updates)
    return block.feed(x + target, tokens, static=True), trained, state, metrics


def _teach(mixer, y: Array, span: Span, ratio: int | None):
    """The dense output float[b, t, d]; its mass on groups [b, t, e] for an indexer."""
    inputs, _ = mixer.inputs(y, None, span)
    if ratio is None:
        partial, _, _ = mixer.attend(inputs, None, span, dense=None)
        return mixer.output(partial, inputs.query, span), None
    key, value = mixer.key_value(inputs.key_input, span.angle_positions)
    partial, mass = compressed_attention(
        inputs.query,
        key,
        key if value is None else value,
        span.visible(1),
        scale=mixer.scale,
        static=True,
        mass_block=ratio,
    )
    return mixer.output(partial, inputs.query, span), mass


def _error(got: Array, want: Array) -> Array:
    """Σ (got - want)² / Σ want², float32[]; 0 where both are 0."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    size = jnp.sum(jnp.square(want))
    return jnp.sum(jnp.square(got - want)) / jnp.where(size > 0, size, 1.0)
