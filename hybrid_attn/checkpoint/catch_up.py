"""Tokens that are known beyond what is restored, and reading them again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.states import Cache
from hybrid_attn.checkpoint import snapshots
from hybrid_attn.checkpoint.description import COUNTS
from hybrid_attn.checkpoint.errors import DamagedError
from hybrid_attn.checkpoint.log import Chain
from hybrid_attn.model import Model
from hybrid_attn.step import prefill
from hybrid_attn.transforms.rewind import rewind

Rows = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Known:
    """Token ids as of a record, whose states may be gone.

    Attributes:
      sequence: number of that record.
      tokens: by name, int32[n] of each row.
      length: by name, how many of them the cache held.
      info: the JSON of that record.
    """

    sequence: int
    tokens: Rows
    length: Mapping[str, Sequence[int]]
    info: Any

    def target(self) -> Rows:
        """By name and row, the tokens that the cache held."""
        return {
            name: [row[:n] for row, n in zip(rows, self.length[name], strict=True)]
            for name, rows in self.tokens.items()
        }


def known_tokens(usable: Sequence[snapshots.Snapshot], chain: Chain) -> Known | None:
    """The newest tokens, from the newest snapshot that has sound ones and the log.

    Ids in the log are under a CRC of their own, so that they outlast its states.
    """
    for snapshot in reversed(usable):
        try:
            tokens = snapshots.load_tokens(snapshot)
        except DamagedError:
            # `restore` meets the same damage and names it.
            continue
        known = Known(
            snapshot.sequence, tokens, snapshot.lengths, snapshot.manifest["info"]
        )
        while True:
            frame = chain.records.get(known.sequence + 1)
            if frame is None or frame.meta is None:
                return known
            parts = frame.meta["caches"]
            if sorted(parts) != sorted(known.tokens):
                return known
            known = Known(
                frame.sequence,
                {k: _extended(rows, parts[k]) for k, rows in known.tokens.items()},
                {
                    k: part["counts"][COUNTS.index("length")]
                    for k, part in parts.items()
                },
                frame.meta["info"],
            )
    return None


def _extended(rows: list[np.ndarray], part: Mapping[str, Any]) -> list[np.ndarray]:
    return [
        np.concatenate([row[:at], np.array(ids, np.int32)])
        for row, at, ids in zip(rows, part["start"], part["ids"], strict=True)
    ]


def catch_up(
    caches: Mapping[str, Cache],
    tokens: Mapping[str, list[np.ndarray]],
    target: Rows,
    model: Model | Mapping[str, Model] | None,
) -> tuple[dict[str, Cache], Rows, int, int]:
    """Reads what is missing. ROUNDING where anything is read.

    Args:
      caches, tokens: as restored.
      target: by name and row, what the caches should hold; {} for no more.
      model: None reads nothing and counts what is missing as lost.

    Returns:
      (caches, tokens of each row, how many were read, how many are lost).
    """
    out, rows = dict(caches), {k: list(v) for k, v in tokens.items()}
    read = lost = 0
    for name, wanted in target.items():
        cache = caches[name]
        length, floor = (np.asarray(x).astype(int) for x in (cache.length, cache.floor))
        keep = length.copy()
        own = model.get(name) if isinstance(model, Mapping) else model
        for row, ids in enumerate(wanted):
            common = _common(tokens[name][row][: length[row]], ids)
            missing = ids.size - common
            if not missing:
                continue
            if own is None or common < min(length[row], floor[row]):
                lost += missing
                continue
            keep[row] = common
            rows[name][row] = ids
            read += missing
        if (keep != length).any():
            cache = rewind(cache, jnp.asarray(keep, jnp.int32))
        counts = np.array(
            [
                ids.size - at if rows[name][row] is ids else 0
                for row, (ids, at) in enumerate(zip(wanted, keep, strict=True))
            ]
        )
        if own is not None and counts.any():
            rest = np.zeros((cache.batch, int(counts.max())), np.int32)
            for row, count in enumerate(counts):
                ids = wanted[row]
                rest[row, :count] = ids[ids.size - count :]
            _, cache = prefill(own, cache, rest, counts, logits="none")
        out[name] = cache
    return out, rows, read, lost


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(a.size, b.size)
    unequal = a[:n] != b[:n]
    return int(unequal.argmax()) if unequal.any() else n
