"""`step` and its relatives: one pure function over an immutable cache."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from hybrid_attn.cache.cuts import advance_cuts
from hybrid_attn.cache.span import Span
from hybrid_attn.cache.states import Cache, Fault
from hybrid_attn.model import Model
from hybrid_attn.transforms.fork import fork

LogitsKind = Literal["all", "last", "none"]
_LOGITS = ("all", "last", "none")
# Lengths of compiled steps: exact for single tokens, then powers of two from here.
_LEAST_BUCKET = 8


def bucket(t: int) -> int:
    """The compiled length that a step of t tokens is padded to."""
    return 1 if t <= 1 else max(_LEAST_BUCKET, 1 << (t - 1).bit_length())


def step(
    model: Model,
    cache: Cache,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    logits: LogitsKind = "all",
    aux: bool = False,
):
    """Advances every row by its tokens.

    Args:
      model: the model the cache was made for.
      cache: an immutable cache; it stays valid.
      tokens: int32[b, t], right-padded.
      lengths: int32[b] in 0..t, how many tokens of each row count; None for all.
      logits: "all" float32[b, t, v] (padding is finite and meaningless), "last"
        float32[b, v] at the last counted token, or "none" (None).
      aux: also return, per layer, what it reports: for sparse layers ``chosen``
        int32[b, t, k] (-1 = none) and ``gap`` float32[b, t], the score distance
        between the last chosen and the first refused entry; for every layer
        ``hidden``, the residual after it.

    Returns:
      (logits, cache), or (logits, cache, aux).

    Raises:
      ValueError: outside jit, before any compute: a position beyond the capacity, a
        token outside the vocabulary, lengths outside 0..t, another config's cache, a
        batch mismatch. Inside jit the row is left untouched as a whole, its bit in
        ``cache.faults`` is set and its logits are NaN.
    """
    _check_static(model, cache, tokens, lengths, logits)
    if _traced(model, cache, tokens, lengths):
        out = pure_step(
            model,
            cache,
            jnp.asarray(tokens),
            None if lengths is None else jnp.asarray(lengths),
            logits=logits,
            aux=aux,
        )
        return out if aux else out[:2]
    values, counts = _check_values(model, cache, tokens, lengths)
    t = values.shape[1]
    padded = np.zeros((values.shape[0], bucket(t)), np.int32)
    padded[:, :t] = values
    graph, leaves = flatten(model)
    run = _compiled(graph, False, logits, aux)
    result, cache, auxiliaries = run(leaves, cache, padded, counts, None)
    if result is not None and logits == "all":
        result = result[:, :t]
    if not aux:
        return result, cache
    return result, cache, jax.tree.map(lambda x: x[:, :t], auxiliaries)


def pure_step(
    model: Model,
    cache: Cache,
    tokens: Array,
    lengths: Array | None = None,
    start: Array | None = None,
    *,
    logits: LogitsKind = "all",
    aux: bool = False,
) -> tuple[Array | None, Cache, list[dict[str, Any]]]:
    """The traceable step; ``start`` int32[b] is the position of column 0.

    With ``start`` (at or below each row's length) the new tokens of row i are columns
    length_i - start_i .. + lengths_i - 1, and "last" is the last of those.
    """
    b, t = tokens.shape
    if t == 0:
        # An empty step runs as one column of padding.
        tokens = jnp.zeros((b, 1), jnp.int32)
        lengths = jnp.zeros((b,), jnp.int32) if lengths is None else lengths
        out, cache, auxiliaries = pure_step(
            model, cache, tokens, lengths, start, logits=logits, aux=aux
        )
        if out is not None and logits == "all":
            out = out[:, :0]
        return out, cache, auxiliaries
    count = jnp.full((b,), t, jnp.int32) if lengths is None else lengths
    count = jnp.asarray(count, jnp.int32)
    offset = 0 if start is None else cache.length - start
    faults = _row_faults(model, cache, tokens, count, offset)
    void = faults > 0
    count = jnp.where(void, 0, count)
    span = Span(
        start=cache.length if start is None else start,
        length=cache.length,
        end=cache.length + count,
        sealed=cache.sealed,
        width=t,
        collect=aux,
    )
    x = model.embed(tokens)
    x, layers, auxiliaries = model.layers(x, tokens, cache.layers, span)
    cuts, cut = advance_cuts(
        layers,
        cache.cuts,
        cache.cut,
        cache.length,
        span.end,
        block_tokens=cache.spec.block_tokens,
        undo=cache.spec.undo,
    )
    new_cache = cache.replace(
        layers=layers,
        length=span.end,
        floor=jnp.maximum(cache.floor, span.end - cache.spec.undo),
        faults=cache.faults | faults,
        cut=cut,
        on_grid=cache.on_grid if start is None else _on_grid(cache, span),
        cuts=cuts,
    )
    out = None
    if logits == "all":
        out = jnp.where(void[:, None, None], jnp.nan, model.head(x))
    elif logits == "last":
        last = jnp.clip(span.end - span.start - 1, 0, t - 1)
        picked = x[jnp.arange(b), last]
        out = jnp.where(void[:, None], jnp.nan, model.head(picked))
    return out, new_cache, auxiliaries if aux else []


def _on_grid(cache: Cache, span: Span) -> Array:
    return jnp.where(cache.on_grid == span.length, span.end, cache.on_grid)


def _row_faults(model, cache, tokens, count, offset) -> Array:
    t = tokens.shape[1]
    column = jnp.arange(t, dtype=jnp.int32)
    first = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), count.shape)[:, None]
    counted = (column >= first) & (column < first + count[:, None])
    outside = (tokens < 0) | (tokens >= model.config.vocab_size)
    bits = (
        (jnp.any(outside & counted, axis=1), Fault.TOKEN),
        ((count < 0) | (count + first[:, 0] > t), Fault.LENGTHS),
        (cache.length + count > cache.spec.capacity, Fault.CAPACITY),
    )
    faults = jnp.zeros(count.shape, jnp.uint8)
    for failed, bit in bits:
        faults |= jnp.where(failed, jnp.uint8(bit), jnp.uint8(0))
    return faults


# -- calling it from outside jit -----------------------------------------------------


def flatten(model: Model) -> tuple[Any, tuple[Array, ...]]:
    """(hashable structure, parameter leaves): what a compiled function is called with.

    A module is a pytree: `nnx.split` gives the same at thirteen times the cost.
    """
    leaves, structure = jax.tree.flatten(model)
    return structure, tuple(leaves)


def unflatten(structure: Any, leaves) -> Model:
    return jax.tree.unflatten(structure, leaves)


@functools.lru_cache(maxsize=256)
def _compiled(graph, donate: bool, logits: LogitsKind, aux: bool):
    """One jitted step per model structure; hashing that at every call would cost."""

    def run(leaves, cache, tokens, lengths, start):
        model = unflatten(graph, leaves)
        return pure_step(model, cache, tokens, lengths, start, logits=logits, aux=aux)

    return jax.jit(run, donate_argnums=(1,) if donate else ())


def compile_step(model: Model, *, donate: bool = True, logits: LogitsKind = "all"):
    """A step for loops: the model is flattened once, values are not checked.

    Returns:
      ``run(cache, tokens, lengths=None) -> (logits, cache)``. With ``donate`` it
      consumes every cache that shares buffers with its argument. Bad values set
      ``cache.faults`` instead of raising. One compilation per shape of tokens.
    """
    graph, leaves = flatten(model)
    jitted = _compiled(graph, donate, logits, False)

    def run(cache: Cache, tokens: ArrayLike, lengths: ArrayLike | None = None):
        out, cache, _ = jitted(leaves, cache, tokens, lengths, None)
        return out, cache

    return run


def prefill(
    model: Model,
    cache: Cache,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    logits: LogitsKind = "all",
    donate: bool = False,
    progress=None,
):
    """A long step, cut at absolute multiples of ``block_tokens``.

    Every block runs in one padded compiled shape in which a position always has the
    same column, so that any split of the same tokens gives the same bits.

    Args and returns: as `step`. ``donate`` consumes the cache; ``progress`` is called
    with (blocks done, blocks in all).

    Raises:
      ValueError: as `step`, before any compute.
    """
    _check_static(model, cache, tokens, lengths, logits)
    if _traced(model, cache, tokens, lengths):
        raise ValueError("prefill runs its own compiled blocks: call step inside jit")
    values, counts = _check_values(model, cache, tokens, lengths)
    b, t = values.shape
    size = cache.spec.block_tokens
    begin = np.asarray(cache.length)
    end = begin + counts
    blocks = int(np.max(-(-end // size) - begin // size)) if t else 0
    graph, leaves = flatten(model)
    rows = np.arange(b)[:, None]
    pieces, last = [], None
    # Every block donates: one executable for all, or a block could get other bits as
    # the first of one call than as a later one of another. So the caller's is copied.
    run = _compiled(graph, True, logits, False)
    if blocks and not donate:
        cache = fork(cache)
    for block in range(blocks):
        start = (begin // size + block) * size
        low, high = np.clip(begin, start, None), np.minimum(end, start + size)
        count = np.maximum(high - low, 0)
        # A row that is done stands still: its span is empty, at its own length.
        start = np.where(count > 0, start, (np.asarray(end) // size) * size)
        position = start[:, None] + np.arange(size)
        column = np.clip(position - begin[:, None], 0, t - 1)
        out, cache, _ = run(
            leaves,
            cache,
            values[rows, column],
            count.astype(np.int32),
            start.astype(np.int32),
        )
        if logits == "all":
            pieces.append((out, low - begin, low - start, count))
        elif logits == "last":
            moved = jnp.asarray(count > 0)[:, None]
            last = out if last is None else jnp.where(moved, out, last)
        if progress is not None:
            progress(block + 1, blocks)
    if logits == "all":
        return _assemble(pieces, b, t, model.config.vocab_size), cache
    if logits == "last" and last is None:
        last = jnp.zeros((b, model.config.vocab_size), jnp.float32)
    return last, cache


def _assemble(pieces, b: int, t: int, vocab: int) -> Array:
    """Logits [b, t, v] in the order of the caller's tokens."""
    out = np.zeros((b, t, vocab), np.float32)
    for logits, target, source, count in pieces:
        block = np.asarray(logits)
        for row in np.flatnonzero(count):
            n = count[row]
            out[row, target[row] : target[row] + n] = block[
                row, source[row] : source[row] + n
            ]
    return jnp.asarray(out)


def _traced(model, *trees) -> bool:
    leaves = jax.tree.leaves(trees)
    leaves += jax.tree.leaves(model)[:1]
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _check_static(model, cache, tokens, lengths, logits) -> None:
    if logits not in _LOGITS:
        raise ValueError(f"logits={logits!r}: expected one of {_LOGITS}")
    if not isinstance(cache, Cache):
        raise ValueError(f"cache: expected a Cache, got {type(cache).__name__}")
    config = model.config
    if cache.spec.config_identity != config.identity:
        raise ValueError(
            f"cache was built for config {cache.spec.config_name!r} "
            f"({cache.spec.config_identity}), the model has {config.name!r} "
            f"({config.identity})"
        )
    shape = np.shape(tokens)
    if len(shape) != 2:
        raise ValueError(f"tokens {shape}: expected [batch, time]")
    _check_integers("tokens", tokens)
    if shape[0] != cache.batch:
        raise ValueError(f"tokens have {shape[0]} rows, the cache has {cache.batch}")
    if lengths is not None and np.shape(lengths) != (cache.batch,):
        raise ValueError(
            f"lengths {np.shape(lengths)}: expected ({cache.batch},), one per row"
        )
    if lengths is not None:
        _check_integers("lengths", lengths)


def _check_integers(name: str, values) -> None:
    # A tracer has a dtype and cannot become a numpy array.
    dtype = values.dtype if hasattr(values, "dtype") else np.asarray(values).dtype
    if np.size(values) and not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} are {dtype}: expected integers")


def _check_values(model, cache, tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.asarray(tokens)
    b, t = tokens.shape
    lengths = np.full((b,), t) if lengths is None else np.asarray(lengths)
    bad = np.flatnonzero((lengths < 0) | (lengths > t))
    if bad.size:
        raise ValueError(
            f"lengths[{bad[0]}]={lengths[bad[0]]}: expected 0..{t}, the time axis"
        )
    counted = np.arange(t) < lengths[:, None]
    wrong = counted & ((tokens < 0) | (tokens >= model.config.vocab_size))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"tokens[{row}, {column}]={tokens[row, column]}: outside the vocabulary "
            f"of {model.config.vocab_size}"
        )
    held = np.asarray(cache.length)
    over = np.flatnonzero(held + lengths > cache.spec.capacity)
    if over.size:
        row = over[0]
        raise ValueError(
            f"row {row} holds {held[row]} tokens and gets {lengths[row]} more, beyond "
            f"the capacity of {cache.spec.capacity}; see transforms.grow"
        )
    return tokens.astype(np.int32), lengths.astype(np.int32)
