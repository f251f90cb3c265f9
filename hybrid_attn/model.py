"""The model: embedding, layers, head. All state is passed in and returned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.cache.packing import document_starts
from hybrid_attn.cache.span import Span
from hybrid_attn.cache.states import LayerCache
from hybrid_attn.config import ModelConfig
from hybrid_attn.layers.block import Block
from hybrid_attn.layers.hyper_connections import HyperHead
from hybrid_attn.layers.linear import Linear
from hybrid_attn.layers.norm import RMSNorm
from hybrid_attn.mixers import mixer_class


class Model(nnx.Module):
    """A decoder with one mixer a layer; holds parameters and static config only.

    Raises:
      ValueError: the layer pattern names an unknown kind.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        classes = [mixer_class(layer.kind) for layer in config.layers]
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(
                rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32
            )
        )
        self.blocks = nnx.List(
            [
                Block(config, index, cls(config, layer, rngs=rngs), rngs=rngs)
                for index, (cls, layer) in enumerate(
                    zip(classes, config.layers, strict=True)
                )
            ]
        )
        self.hyper_head = (
            None
            if config.hyper is None
            else HyperHead(config.hidden_size, config.hyper, config.norm_eps, rngs=rngs)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.unembed = (
            None
            if config.tie_embeddings
            else Linear(
                config.hidden_size,
                config.vocab_size,
                rngs=rngs,
                dtype=config.compute_dtype,
            )
        )

    def embed(self, tokens: Array) -> Array:
        """float[b, t, d], or [b, t, n, d] with a copy for every residual stream.

        Tokens out of range are clipped (their rows are void).
        """
        table = self.embedding[...]
        x = table[jnp.clip(tokens, 0, table.shape[0] - 1)]
        x = x.astype(self.config.compute_dtype)
        if self.config.hyper is None:
            return x
        shape = (*x.shape[:-1], self.config.hyper.streams, x.shape[-1])
        return jnp.broadcast_to(x[..., None, :], shape)

    def final(self, x: Array) -> Array:
        """float32[..., d]: the residual, collapsed and normalised."""
        return self.final_norm(x if self.hyper_head is None else self.hyper_head(x))

    def head(self, x: Array) -> Array:
        """float32[..., v]."""
        x = self.final(x)
        if self.unembed is None:
            scale = self.config.tied_scale
            scale = self.config.hidden_size**-0.5 if scale is None else scale
            return (x @ self.embedding[...].T * scale).astype(jnp.float32)
        return self.unembed(x).astype(jnp.float32)

    def layers(
        self,
        x: Array,
        tokens: Array,
        caches: tuple[LayerCache, ...] | None,
        span: Span,
        *,
        dense: Array | None = None,
        remat: bool = False,
    ) -> tuple[Array, tuple[LayerCache, ...], list[dict[str, Any]]]:
        """Runs every block; ``caches`` None is the training form.

        Where the span collects, each block's auxiliaries hold ``hidden``, its output.
        """
        new, auxiliaries = [], []
        for index, block in enumerate(self.blocks):
            states = None if caches is None else caches[index].states
            run = functools.partial(_run_block, span=span, dense=dense)
            if remat:
                run = jax.checkpoint(run)
            x, out, aux = run(block, x, tokens, states)
            if span.collect:
                aux = {**aux, "hidden": x}
            auxiliaries.append(aux)
            if caches is not None:
                new.append(
                    LayerCache({**caches[index].states, **out}, caches[index].kind)
                )
        return x, tuple(new), auxiliaries


def _run_block(
    block: Block, x: Array, tokens: Array, states, *, span: Span, dense
) -> tuple[Array, dict[str, Any], dict[str, Any]]:
    return block(x, tokens, states, span, dense=dense)


def forward(
    model: Model, tokens: ArrayLike, segment_ids: ArrayLike | None = None
) -> Array:
    """Logits of whole sequences from position 0: the training form.

    Args:
      tokens: int32[b, t].
      segment_ids: int32[b, t], for rows that pack several documents. Every run of
        equal ids is a document, whatever the ids are: they need not be sorted, an id
        that comes again later names another document, and 0 is an id like the others
        (padding is a document of its own that nobody reads). Each document starts at
        position 0 and reads nothing of the others: packed documents give the logits
        of separate ones. None: every row is one document.

    Returns:
      float32[b, t, v].

    Raises:
      ValueError: tokens or segment ids of another shape, ids that are not integers.
    """
    return forward_with_aux(model, jnp.asarray(tokens), segment_ids)[0]


def forward_with_aux(
    model: Model,
    tokens: Array,
    segment_ids: ArrayLike | None = None,
    *,
    dense: Array | None = None,
    remat: bool = False,
) -> tuple[Array, list[dict[str, Any]]]:
    """`forward`, with what the layers report (`indexer_loss` of sparse layers).

    ``dense`` bool[]: True lets sparse layers read all entries (indexer warm-up).
    """
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens {tokens.shape}: expected [batch, time] with at least one token"
        )
    starts = None if segment_ids is None else document_starts(segment_ids, tokens.shape)
    span = Span.training(tokens.shape[0], tokens.shape[1], starts)
    x = model.embed(tokens)
    x, _, aux = model.layers(x, tokens, None, span, dense=dense, remat=remat)
    return model.head(x), aux
