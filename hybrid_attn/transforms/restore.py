"""A cache from a store, at the deepest boundary whose every block is verified."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.layout import CacheLayout, layout_of
from hybrid_attn.cache.states import Cache
from hybrid_attn.config import ModelConfig
from hybrid_attn.initial import init_cache
from hybrid_attn.transforms.lookup import (
    RECENT,
    Hit,
    Reader,
    Recent,
    candidates,
    choose,
    find,
    replay_span,
)
from hybrid_attn.transforms.offload import check_tokens

if TYPE_CHECKING:
    from hybrid_attn.store.store import Store

_WORKERS = 4


def restore(
    store: "Store",
    config: ModelConfig,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    capacity: int,
    undo: int = 16,
    dtypes=None,
    recent: Recent = "auto",
    replay_tokens: int | None = None,
    prefetched: "Prefetch | None" = None,
) -> Cache:
    """The cache of the longest prefix of each row that the store holds. EXACT.

    Go on with ``tokens[i, cache.length[i]:]``: through `prefill` the result then has
    the bits of a cold prefill, if the blocks were made by one. A row of which nothing
    is found is empty. What fails verification is passed over, so that damage makes a
    prefix shorter and never wrong.

    Where no boundary has recent states (stored with ``recent=0``) entries are restored
    and recent states are not: ``sealed`` is set to the boundary and ``length`` below
    it by as many tokens as the states depend on; reading them again, as the next call
    does by itself, makes the states within tolerance (ROUNDING). A boundary that is no
    farther than that is a miss.

    Args:
      store: an open store of the model's `model_id`.
      config: the model's configuration.
      tokens: int[b, t] the prompts, right-padded; lengths int[b] in 0..t, None for t.
      capacity, undo, dtypes: as `init_cache`; the dtypes are part of the identity.
      recent: "stored" needs stored recent states, "replay" ignores them, "auto" takes
        them wherever a boundary has them.
      replay_tokens: replay so many tokens instead of all that the states depend on.
        LOSSY where that is less: the first tokens read nothing before them.
      prefetched: from `prefetch`, for the same prompts.

    Raises:
      ValueError: as `init_cache`; a capacity below a restored prefix; bad arguments.
    """
    if recent not in RECENT:
        raise ValueError(f"recent={recent!r}: expected one of {RECENT}")
    if replay_tokens is not None and replay_tokens < 0:
        raise ValueError(f"replay_tokens={replay_tokens}: expected from 0")
    ids, counts = _prompts(tokens, lengths)
    empty = init_cache(config, ids.shape[0], capacity, undo, dtypes)
    layout = layout_of(empty)
    span = replay_span(empty) if replay_tokens is None else replay_tokens
    reader = Reader(store, _WORKERS) if prefetched is None else prefetched.reader
    try:
        hits = []
        for row, count in enumerate(counts):
            prompt = ids[row, : min(int(count), empty.spec.capacity)]
            hits.append(find(reader, layout, prompt, recent=recent, span=span))
    finally:
        reader.close()
    return _filled(empty, layout, hits)


class Prefetch:
    """Blocks on their way from a store; pass it to `restore`."""

    def __init__(self, reader: Reader):
        self.reader = reader

    def cancel(self) -> None:
        """Gives up what has not begun; nothing else holds on to it."""
        self.reader.close()


def prefetch(
    store: "Store",
    config: ModelConfig,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    dtypes=None,
    undo: int = 16,
    recent: Recent = "auto",
) -> Prefetch:
    """Begins to fetch and verify, on threads, what `restore` of the prompts will read.

    Args: as `restore`.

    Returns:
      A `Prefetch`; `restore` takes finished blocks and waits for the others.
    """
    ids, counts = _prompts(tokens, lengths)
    abstract = jax.eval_shape(lambda: init_cache(config, 1, 1, undo, dtypes))
    layout, span = layout_of(abstract), replay_span(abstract)
    reader = Reader(store, _WORKERS)
    for row, count in enumerate(counts):
        size = layout.block_tokens
        chain = store.chain(layout.fingerprint, ids[row, : int(count)], size)
        available = candidates(store, layout, chain)
        for group, i in choose(layout, available, recent, span)[2]:
            reader.ahead(group, chain[i])
    return Prefetch(reader)


def _prompts(tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
    ids = check_tokens(tokens)
    counts = np.full((ids.shape[0],), ids.shape[1])
    if lengths is not None:
        counts = np.asarray(lengths)
        if (
            counts.shape != (ids.shape[0],)
            or ((counts < 0) | (counts > ids.shape[1])).any()
        ):
            raise ValueError(
                f"lengths {counts.tolist()}: expected {ids.shape[0]} numbers in "
                f"0..{ids.shape[1]}"
            )
    return ids, counts


def _filled(empty: Cache, layout: CacheLayout, hits: list[Hit]) -> Cache:
    size, undo = layout.block_tokens, empty.spec.undo
    # Writable copies on the host; device arrays are made once, at the end.
    layers = [
        {
            name: {
                field: np.array(array)
                for field, array in vars(state).items()
                if array is not None
            }
            for name, state in layer.states.items()
        }
        for layer in empty.layers
    ]
    cuts = [{name: np.array(rows) for name, rows in cut.items()} for cut in empty.cuts]
    for row, hit in enumerate(hits):
        for group in layout.groups:
            for i in range(hit.boundary // size):
                data = hit.payloads.get((group.name, i))
                if data is None:
                    continue
                for array, part in zip(group.arrays, group.unpack(data), strict=True):
                    target = layers[array.layer][array.state][array.field][row]
                    if group.family == "history":
                        count = array.shape[array.axis]
                        at = [slice(None)] * target.ndim
                        at[array.axis] = slice(i * count, (i + 1) * count)
                        target[tuple(at)] = part
                        continue
                    name = f"{array.state}.{array.field}"
                    cuts[array.layer][name][row] = part
                    rows = part.shape[0]
                    position = np.arange(hit.boundary - rows, hit.boundary)
                    known = position >= 0
                    target[position[known] % (rows + undo)] = part[known]
    new = [
        layer.__class__(
            {
                name: state.replace(
                    **{f: jnp.asarray(x) for f, x in layers[index][name].items()}
                )
                for name, state in layer.states.items()
            },
            layer.kind,
        )
        for index, layer in enumerate(empty.layers)
    ]
    length = np.array([hit.length for hit in hits], np.int32)
    boundary = np.array([hit.boundary for hit in hits], np.int32)
    whole = length == boundary
    return empty.replace(
        layers=tuple(new),
        cuts=tuple({k: jnp.asarray(v) for k, v in cut.items()} for cut in cuts),
        length=jnp.asarray(length),
        # What is replayed is exact from the boundary on, and not before.
        floor=jnp.asarray(boundary),
        sealed=jnp.asarray(np.where(whole, 0, boundary).astype(np.int32)),
        cut=jnp.asarray(np.where(whole, boundary, 0).astype(np.int32)),
        on_grid=jnp.asarray(np.array([hit.on_grid for hit in hits], np.int32)),
    )
