"""Restoring: newest sound snapshot, the log after it, and re-reading as a last resort.

Nothing is guessed. What fails verification is named and passed over; then an older
snapshot with a longer log takes its place, and tokens whose states are gone are read
again where a model is given, or reported as lost.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache
from hybrid_attn.checkpoint import delta as deltas
from hybrid_attn.checkpoint import snapshots
from hybrid_attn.checkpoint.catch_up import Known, Rows, catch_up, known_tokens
from hybrid_attn.checkpoint.description import (
    abstract,
    check,
    describe,
    growing_axes,
    named,
    place,
)
from hybrid_attn.checkpoint.errors import DamagedError, NothingToRestoreError
from hybrid_attn.checkpoint.layout import Name, beginnings, unseal, voids
from hybrid_attn.checkpoint.log import Chain, decode, read_chain
from hybrid_attn.config import ModelConfig
from hybrid_attn.initial import init_cache
from hybrid_attn.model import Model

Sharding = jax.sharding.Sharding
Tokens = Mapping[str, Sequence[ArrayLike]]
_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Report:
    """Where the tokens of all rows came from.

    Attributes:
      snapshot: name of the snapshot used, None where none was sound.
      sequence: number of the last record that was applied.
      from_snapshot, from_log, recomputed, lost: tokens, summed over rows. Those lost
        are known (from the caller, or from records whose states are damaged) and in
        no cache.
      refused: a sentence for every file that was not used because it is damaged.
    """

    snapshot: str | None
    sequence: int
    from_snapshot: int
    from_log: int
    recomputed: int
    lost: int
    refused: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A set of caches as it was recorded.

    Attributes:
      caches: by name.
      tokens: by name, int32[n] of each row; n is at least the row's length.
      info: the JSON recorded with that state.
      report: see `Report`.
      replayed, recorded: caches and tokens before any were read again.
    """

    caches: dict[str, Cache]
    tokens: dict[str, list[np.ndarray]]
    info: Any
    report: Report
    replayed: dict[str, Cache]
    recorded: dict[str, list[np.ndarray]]


@dataclasses.dataclass
class _State:
    """A snapshot's caches on the host, on their way to the end of the log."""

    name: str | None
    sequence: int
    arrays: dict[str, dict[str, np.ndarray]]
    tokens: dict[str, list[np.ndarray]]
    info: Any

    def held(self) -> int:
        return sum(int(a["counts/length"].sum()) for a in self.arrays.values())


def restore(
    path: str | os.PathLike,
    config: ModelConfig | Mapping[str, ModelConfig] | None = None,
    *,
    model_id: str,
    like: Mapping[str, Cache] | None = None,
    sharding: Sharding | Callable[[str, Any], Sharding] | None = None,
    model: Model | Mapping[str, Model] | None = None,
    tokens: Tokens | None = None,
) -> Restored:
    """The newest state that can be verified; bit-identical to what was recorded.

    Args:
      path: directory of the checkpoint.
      config: of all caches or by name; the caches are then asked for in the batch,
        capacity, undo and dtypes that were stored.
      model_id: of the model that goes on, as `hybrid_attn.model_id` gives it.
      like: by name, caches (abstract arrays suffice) that the stored ones must be
        equal to in every static respect; replaces ``config``.
      sharding: where arrays go: one for all (axis 0 is the batch), or a function of
        an array's name and the array; None is the default device.
      model: reads tokens again whose states are gone. ROUNDING.
      tokens: by name and row, ids that should be in the cache, from another record.

    Raises:
      ValueError: what is stored is of another model, or differs from what is asked in
        names, layers, states, shapes or dtypes; names both.
      NothingToRestoreError: no snapshot is sound, and the tokens or the model to
        start from nothing are not given.
    """
    root = Path(path)
    found, refused = snapshots.complete(root)
    run = _run(root, found)
    own = []
    for snapshot in found:
        manifest = snapshot.manifest
        name = snapshot.path.name
        if manifest["run"] != run:
            refused.append(f"snapshot {name}: of another checkpoint")
            continue
        if manifest["model_id"] != model_id:
            raise ValueError(
                f"snapshot {name} was written for model_id {manifest['model_id']}, "
                f"asked is {model_id}"
            )
        own.append(snapshot)
    chain = read_chain(root, run, model_id)
    refused += chain.refused
    first = beginnings(root)
    usable = [s for s in own if not voids(first, Name(s.sequence, s.epoch))]
    first = beginnings(root)
    usable = [s for s in own if not voids(first, Name(s.sequence, s.epoch))]
    wanted = _asked(usable[-1], config, like) if usable else dict(like or {})
    known = known_tokens(usable, chain)
    state = _newest_state(usable, refused)
    if state is not None:
        held = state.held()
        refused += _replay(state, chain, wanted)
        caches = {k: place(wanted[k], state.arrays[k], sharding) for k in wanted}
    else:
        state, held = _State(None, 0, {}, {}, None), 0
        caches = _empty(wanted, config)
        if not caches or model is None or not (tokens or known):
            raise NothingToRestoreError(
                f"{root}: no sound snapshot ({'; '.join(refused) or 'none at all'}); "
                "config, model and tokens would let it be read again"
            )
        state.tokens = {k: [_NONE] * c.batch for k, c in caches.items()}
    target = _target(tokens, known, caches)
    new, rows, read, lost = catch_up(caches, state.tokens, target, model)
    info = state.info
    if known is not None and known.sequence > state.sequence and not (tokens or lost):
        info, rows = known.info, known.tokens
    report = Report(
        state.name,
        state.sequence,
        held,
        state.held() - held,
        read,
        lost,
        tuple(refused),
    )
    return Restored(new, rows, info, report, caches, state.tokens)


def _run(root: Path, found: Sequence[snapshots.Snapshot]) -> int | None:
    try:
        return unseal(root / "EPOCH")["run"]
    except DamagedError:
        return found[-1].manifest["run"] if found else None


def _asked(newest, config, like) -> dict[str, Cache]:
    """Abstract caches as asked, checked against what is stored."""
    caches = newest.manifest["caches"]
    if like is None and config is None:
        raise ValueError("restore: expected config or like")
    if like is None:
        configs: Any = config
        if not isinstance(config, Mapping):
            configs = dict.fromkeys(caches, config)
        if sorted(configs) != sorted(caches):
            raise ValueError(
                f"{newest.path} holds the caches {sorted(caches)}, asked are "
                f"{sorted(configs)}"
            )
        like = {k: abstract(configs[k], c["description"]) for k, c in caches.items()}
    if sorted(like) != sorted(caches):
        raise ValueError(
            f"{newest.path} holds the caches {sorted(caches)}, asked are {sorted(like)}"
        )
    for name, cache in like.items():
        check(name, caches[name]["description"], describe(cache))
    return dict(like)


def _newest_state(usable, refused: list[str]) -> _State | None:
    """The newest snapshot whose every array passes; the others are named."""
    for snapshot in reversed(usable):
        try:
            arrays = snapshots.load(snapshot)
            tokens = snapshots.load_tokens(snapshot)
        except DamagedError as error:
            refused.append(f"snapshot {snapshot.path.name}: {error}")
            continue
        info = snapshot.manifest["info"]
        return _State(snapshot.path.name, snapshot.sequence, arrays, tokens, info)
    return None


def _replay(state: _State, chain: Chain, wanted: Mapping[str, Cache]) -> list[str]:
    """Applies all records that follow without a gap; says why it ended early."""
    shapes, axes = {}, {}
    for name, cache in wanted.items():
        axes[name] = growing_axes(cache)
        shapes[name] = {}
        # In the order of the cache, which is that of the records.
        for key in named(cache):
            array = state.arrays[name][key]
            axis = axes[name].get(key, 1)
            shape = (*array.shape[1:axis], *array.shape[axis + 1 :])
            shapes[name][key] = shape, array.dtype
    found: list[dict[str, deltas.Delta]] = []
    refused = []
    while (frame := chain.records.get(state.sequence + 1)) is not None:
        if not frame.sound:
            break
        try:
            found.append(decode(frame, shapes))
        except DamagedError as error:
            refused.append(str(error))
            break
        state.sequence, state.info = frame.sequence, frame.meta["info"]
    for name in wanted:
        part = [record[name] for record in found]
        deltas.apply(state.arrays[name], axes[name], state.tokens[name], part)
    return refused


def _empty(wanted: Mapping[str, Cache], config) -> dict[str, Cache]:
    out = {}
    for name, cache in wanted.items():
        own = config.get(name) if isinstance(config, Mapping) else config
        if own is None:
            return {}
        spec = cache.spec
        out[name] = init_cache(own, cache.batch, spec.capacity, spec.undo, spec.dtypes)
        check(name, describe(cache), describe(out[name]))
    return out


def _target(tokens: Tokens | None, known: Known | None, caches) -> Rows:
    """By cache and row, the tokens that should be in it."""
    if tokens:
        found = {k: [np.asarray(r, np.int32) for r in v] for k, v in tokens.items()}
    else:
        found = known.target() if known is not None else {}
    for name, rows in found.items():
        if name not in caches or len(rows) != caches[name].batch:
            held = {k: c.batch for k, c in caches.items()}
            raise ValueError(
                f"tokens of cache {name!r}, {len(rows)} rows: restored are {held}"
            )
    return found
