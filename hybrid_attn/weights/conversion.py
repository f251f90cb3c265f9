"""Training-free conversion of a dense model, layer by layer.

A dense layer has what other mixers need. Its key and value projections are linear in
the layer input, so the mean of a group's keys and values, before rotation, is what a
`Compressor` gives with those projections as content and equal scores. Its queries
and keys are an indexer, too: heads of queries against mean keys.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hybrid_attn.cache.span import Span
from hybrid_attn.config import ModelConfig
from hybrid_attn.model import Model
from hybrid_attn.pattern import parse_pattern
from hybrid_attn.weights.files import WeightsError

Sinks = Literal["none", "logit", "key"]
Entries = Literal["once", "plain"]
_TARGETS = ("dense", "swa", "hca", "csa")
# What a sink's logit is where there shall be none: a weight of 0.
_NO_SINK = -1e9


def convert(
    config: ModelConfig,
    model: Model,
    pattern: str,
    *,
    window: int = 256,
    top_k: int = 64,
    sinks: Sinks | None = None,
    entries: Entries = "once",
    calibration: Any = None,
) -> tuple[ModelConfig, Model]:
    """A model of other mixers that gives nearly what a dense one gave; no training.

    `swa` layers keep the last ``window`` keys and values. `hca` layers also keep the
    means of the keys and values of every ``ratio`` tokens, each mean key rotated to
    its group's first position. `csa` layers keep the same and read the ``top_k``
    means whose keys the layer's own queries, unrotated, score highest.

    Args:
      config, model: every layer `dense`.
      pattern: the new stack, as many layers; `dense` layers stay as they are. Kinds
        dense, swa, hca, csa; "hca:8" pools 8 tokens.
      window: tokens; of all layers that are not dense.
      top_k: entries that a query of a `csa` layer reads.
      sinks: what stands for the first token once it has left the window
        (StreamingLLM, arXiv 2309.17453, keeps the token itself): "key" its key and
        value, the mean over the rows of the calibration; "logit" the mean over
        queries of each head's log-mass on it, which takes weight and adds no value;
        "none" nothing. None: "key" where there is calibration.
      entries: "once" lets a mean count as the tokens of its group, and reads each
        token once, in an entry or in the window; "plain" is DeepSeek-V4's way: the
        weight of one token, and all closed groups beside the whole window.
      calibration: int32[b, t] tokens of b texts from their beginning. "key" reads
        their first tokens alone, "logit" needs more than ``window``.

    Returns:
      (config, model). What layers share with the old model is not copied.

    Raises:
      ValueError: a layer that is not dense or not convertible, by name; a pattern of
        another length; a calibration that is missing or too short.
    """
    if entries not in ("once", "plain"):
        raise WeightsError(f"entries={entries!r}: expected 'once' or 'plain'")
    new_config = _config(config, pattern, window, top_k, once=entries == "once")
    sinks = sinks or ("none" if calibration is None else "key")
    if sinks not in ("none", "logit", "key"):
        raise WeightsError(f"sinks={sinks!r}: expected 'none', 'logit' or 'key'")
    new_config = new_config.replace(
        sink_key=sinks == "key", sink=config.sink or sinks == "logit"
    )
    found: list[dict[str, Array]] = [{} for _ in config.layers]
    if sinks != "none":
        found = _sinks(config, model, _calibration(calibration, sinks, window), window)
    new_model = nnx.eval_shape(lambda: Model(new_config, rngs=nnx.Rngs(0)))
    old = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    target = nnx.state(new_model, nnx.Param)
    for path, variable in nnx.to_flat_state(target):
        parts = [str(part) for part in path]
        if parts[0] == "blocks" and parts[2] == "mixer":
            index, name = int(parts[1]), ".".join(parts[3:])
            value = _mixer_value(new_config, model, index, name, found[index], sinks)
        else:
            value = old[path][...]
        if value.shape != variable.shape:
            raise AssertionError(f"{path}: {value.shape} instead of {variable.shape}")
        variable.set_value(value)
    nnx.update(new_model, target)
    return new_config, new_model


def _config(
    config: ModelConfig, pattern: str, window: int, top_k: int, *, once: bool
) -> ModelConfig:
    """The config of the converted model, without its sinks."""
    layers = parse_pattern(pattern)
    if len(layers) != len(config.layers):
        raise WeightsError(
            f"pattern {pattern!r} has {len(layers)} layers, the model "
            f"{len(config.layers)}"
        )
    other = sorted({layer.kind for layer in config.layers} - {"dense"})
    if other:
        raise WeightsError(f"{config.name} has layers {other}: expected 'dense' alone")
    kinds = {kind for kind, _ in layers}
    if kinds - set(_TARGETS):
        raise WeightsError(
            f"pattern {pattern!r} has {sorted(kinds - set(_TARGETS))}: expected kinds "
            f"of {', '.join(_TARGETS)}"
        )
    if kinds & {"hca", "csa"}:
        # The mean of normalised keys is not linear in the layer input.
        wrong = [name for name in ("key_norm", "query_norm") if getattr(config, name)]
        if config.token_shift:
            wrong.append("token_shift")
        if wrong:
            raise WeightsError(
                f"{config.name} has {', '.join(wrong)}: its layers cannot be pooled"
            )
    return config.replace(
        name=f"{config.name} converted",
        pattern=pattern,
        window=window,
        top_k=top_k,
        kv_heads=config.dense_kv_heads,
        shared_kv=False,
        decay="none",
        csa_overlap=False,
        hca_overlap=False,
        slot_bias=0.0,
        entry_bias=1.0 if once else 0.0,
        entries_in_window=not once,
        compressed_rope_theta=None,
        yarn_factor=1.0,
        index_heads=config.heads,
        index_dim=config.dense_kv_heads * config.head_dim,
        index_rope_dims=0,
        index_norm=False,
        index_weights=False,
    )


def _mixer_value(
    config: ModelConfig,
    model: Model,
    index: int,
    name: str,
    found: dict[str, Array],
    sinks: Sinks,
) -> Array:
    """The value of one parameter of a converted mixer."""
    mixer: Any = model.blocks[index].mixer
    layer = config.layers[index]
    keys = layer.kv_heads * layer.head_dim
    project = mixer.key_value.project.weight[...]
    if name in ("sink_key.key", "sink_key.value"):
        return found[name.removeprefix("sink_")]
    if name == "sink" and sinks == "logit":
        if layer.window:
            return found["logit"]
        own = mixer.sink
        return jnp.full((layer.heads,), _NO_SINK) if own is None else own[...]
    if name == "compressor.project.weight":
        return _ungated(project)
    if name == "indexer.compressor.project.weight":
        return _ungated(project[:, :keys])
    if name == "compressor.slot_score":
        return jnp.zeros((layer.ratio, layer.features), jnp.float32)
    if name == "indexer.compressor.slot_score":
        return jnp.zeros((layer.ratio, keys), jnp.float32)
    if name == "indexer.query.weight":
        return _index_queries(mixer.query_up.weight[...], layer.heads, layer.kv_heads)
    value: Any = mixer
    for part in name.split("."):
        value = getattr(value, part)
    return value[...]


def _ungated(project: Array) -> Array:
    """Content [d, c] -> content and gate [d, 2c]; equal scores pool to the mean."""
    return jnp.concatenate([project, jnp.zeros_like(project)], axis=1)


def _index_queries(weight: Array, heads: int, kv_heads: int) -> Array:
    """[r, n·h] -> [r, n·k·h]: each head on the channels of its own key head."""
    own = np.repeat(np.eye(kv_heads, dtype=np.float32), heads // kv_heads, axis=0)
    split = weight.reshape(weight.shape[0], heads, 1, -1)
    placed = split * jnp.asarray(own, weight.dtype)[None, :, :, None]
    return placed.reshape(weight.shape[0], -1)


# -- sinks -----------------------------------------------------------------------------


def _calibration(tokens: Any, sinks: Sinks, window: int) -> Array:
    if tokens is None:
        raise WeightsError(f"sinks={sinks!r} needs calibration tokens")
    tokens = jnp.asarray(tokens)
    least = 1 if sinks == "key" else window + 1
    if tokens.ndim != 2 or tokens.shape[1] < least or not tokens.shape[0]:
        raise WeightsError(
            f"calibration {tokens.shape}: expected [texts, time] of at least {least} "
            f"tokens for sinks={sinks!r}"
        )
    # What comes after the first token does not change its key.
    return tokens[:, :1] if sinks == "key" else tokens


def _sinks(
    config: ModelConfig, model: Model, tokens: Array, window: int
) -> list[dict[str, Array]]:
    """Of every layer: key.key, key.value [k, h] of the first token, logit [n]."""
    if config.hyper is not None:
        raise WeightsError(f"{config.name}: sinks need a single residual stream")
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, tokens):
        return _measure(nnx.merge(graph, params), tokens, window)

    # One text at a time: attention weights of all are large.
    rows = [run(params, tokens[i : i + 1]) for i in range(tokens.shape[0])]
    return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *rows)


def _measure(model: Model, tokens: Array, window: int) -> list[dict[str, Array]]:
    """The statistics of one text int32[1, t]."""
    span = Span.training(1, tokens.shape[1])
    x, out = model.embed(tokens), []
    for block in model.blocks:
        mixer: Any = block.mixer
        y = block.mixer_norm(x)
        inputs, _ = mixer.inputs(y, None, span)
        key, value = mixer.key_value(inputs.key_input, span.positions)
        out.append({"key.key": key[0, 0], "key.value": value[0, 0]})
        if tokens.shape[1] > window:
            out[-1]["logit"] = _first_token_mass(mixer, inputs.query, key, window)
        x, _, _ = block(x, tokens, None, span)
    return out


def _first_token_mass(mixer: Any, query: Array, key: Array, window: int) -> Array:
    """float32[n]: mean logit of the first token over queries that are past it."""
    layer = mixer.layer
    first = jnp.repeat(key[0, 0], layer.heads // layer.kv_heads, axis=0)
    logit = jnp.einsum("btnh,nh->btn", query, first) * mixer.scale
    return jnp.mean(logit[0, window:], axis=0)
