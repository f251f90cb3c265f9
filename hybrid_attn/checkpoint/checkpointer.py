"""`Checkpointer`: observes a set of caches and keeps them recoverable."""

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from hybrid_attn.cache.spec import CacheSpec
from hybrid_attn.cache.states import Cache
from hybrid_attn.checkpoint import recovery, snapshots
from hybrid_attn.checkpoint.delta import Base, Delta, compare
from hybrid_attn.checkpoint.description import describe, named
from hybrid_attn.checkpoint.errors import CheckpointError
from hybrid_attn.checkpoint.files import Files, writing
from hybrid_attn.checkpoint.layout import Fence, logs
from hybrid_attn.checkpoint.layout import snapshots as snapshot_names
from hybrid_attn.checkpoint.log import LogWriter, read_chain
from hybrid_attn.checkpoint.retention import retain

Tokens = Mapping[str, ArrayLike | Sequence[ArrayLike]]


@dataclasses.dataclass
class Statistics:
    """What a `Checkpointer` wrote.

    Attributes:
      records, log_bytes, log_seconds: of the log; the seconds are those for which
        `observe` kept its caller, syncs included.
      snapshots, snapshot_bytes: finished snapshots and the size of their files.
      blocking_seconds, background_seconds: of snapshots, in the caller and beside it.
    """

    records: int = 0
    log_bytes: int = 0
    log_seconds: float = 0.0
    snapshots: int = 0
    snapshot_bytes: int = 0
    blocking_seconds: float = 0.0
    background_seconds: float = 0.0


class Checkpointer:
    """Keeps caches recoverable: snapshots at intervals and a log in between.

    One object writes at a time; opening another, in any process, fences off this one.
    Use as a context manager, or `close` it.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        model_id: str,
        every_tokens: int | None = None,
        every_seconds: float | None = None,
        every_bytes: int | None = None,
        log_tokens: int | None = 1,
        log_seconds: float | None = None,
        keep: int | None = 2,
        keep_every: int | None = None,
        background: bool = True,
        verify: bool = True,
        files: Files | None = None,
    ):
        """Opens a checkpoint for writing, and cuts torn ends off its logs.

        Args:
          path: a directory, made where it is missing.
          model_id: of the model that fills the caches, `hybrid_attn.model_id`.
          every_tokens, every_seconds, every_bytes: a snapshot is due when the longest
            advance of a row, the time, or the bytes of the log since the last reach
            one of them. With none, only the first is made and those asked for.
          log_tokens: a record is due when a row advanced by so many tokens; so many a
            row are at risk. None keeps no log.
          log_seconds: a record is due after that time as well.
          keep: the newest so many snapshots are kept, with the logs that lead from
            each of them to the end; None keeps all.
          keep_every: of the older ones, every k-th is kept.
          background: scheduled snapshots are written on a thread.
          verify: every snapshot is read back before it counts.
          files: the file system.

        Raises:
          ValueError: an interval or number out of range.
          CheckpointWriteError: the directory cannot be written.
        """
        for name, value in {
            "every_tokens": every_tokens,
            "every_bytes": every_bytes,
            "log_tokens": log_tokens,
            "keep": keep,
            "keep_every": keep_every,
        }.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}: expected None or an int from 1")
        for name, value in {
            "every_seconds": every_seconds,
            "log_seconds": log_seconds,
        }.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r}: expected None or seconds above 0")
        self.path, self.model_id = Path(path), model_id
        self._every = (every_tokens, every_seconds, every_bytes)
        self._log_tokens, self._log_seconds = log_tokens, log_seconds
        self._keep, self._keep_every = keep, keep_every
        self._background, self._verify = background, verify
        self.statistics = Statistics()
        self._fence = Fence(self.path, files or Files())
        with writing(self.path):
            snapshots.drop_temporary(self._fence)
            chain = read_chain(self.path, self._fence.run)
            for torn, size in chain.torn.items():
                self._fence.files.truncate(torn, size)
                self._fence.files.sync_path(torn)
        self._log = LogWriter(self._fence, model_id)
        known = [
            name.sequence for name in (*snapshot_names(self.path), *logs(self.path))
        ]
        # Above all that is there: a first snapshot stands on nothing before it.
        self._sequence = max((*known, *chain.records), default=0)
        self._number = max(
            (s.number for s in snapshots.complete(self.path)[0]), default=0
        )
        self._bases: dict[str, Base] = {}
        self._kinds: dict[str, tuple[CacheSpec, int]] = {}
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._running: Future | None = None
        self._last_record = self._last_snapshot = time.monotonic()
        self._bytes_since = 0
        self._lengths: dict[str, np.ndarray] = {}

    def restore(self, config=None, **options) -> recovery.Restored:
        """As `hybrid_attn.checkpoint.restore`; `observe` then goes on with the log.

        Args:
          config, options: see there.
        """
        restored = recovery.restore(
            self.path, config, model_id=self.model_id, **options
        )
        if restored.report.snapshot is None:
            return restored
        self._sequence = restored.report.sequence
        for name, cache in restored.replayed.items():
            self._bases[name] = Base.of(cache, restored.recorded[name])
            self._kinds[name] = (cache.spec, cache.batch)
            self._lengths[name] = np.asarray(cache.length)
        return restored

    def observe(
        self, caches: Mapping[str, Cache], tokens: Tokens, info: Any = None
    ) -> int:
        """Records the state, if that is due. A record is durable on return.

        Args:
          caches: by name; they are read, and may be donated afterwards.
          tokens: by name: int[b, t], of which each row's first ``length`` count; or a
            list of int[n], n at least the length: what lies beyond it (sampled and
            not yet read) is recorded too.
          info: JSON that belongs to the state, such as a sampler's.

        Returns:
          The number of the last record, of this call or an earlier one (without a log:
          of the last snapshot, which may still be on its way to the disk).

        Raises:
          ValueError: tokens of another batch or shorter than a row; info that is not
            JSON.
          FencedError: another writer opened the checkpoint.
          CheckpointWriteError: the storage refused; what was acknowledged stands.
          CheckpointError: a snapshot in the background failed.
        """
        begin = time.perf_counter()
        self._collect(wait=False)
        rows = _rows(caches, tokens)
        json.dumps(info, allow_nan=False)
        kinds = {name: (cache.spec, cache.batch) for name, cache in caches.items()}
        if kinds != self._kinds:
            # Nothing that a record could stand on.
            self._collect(wait=True)
            self._snapshot(caches, rows, info, advance=True, wait=True)
            return self._sequence
        due = self._snapshot_due(caches)
        if self._log_tokens is not None:
            if due or self._record_due(caches):
                self._record(caches, rows, info)
                self.statistics.log_seconds += time.perf_counter() - begin
        if due:
            logged = self._log_tokens is not None
            wait = not self._background
            self._snapshot(caches, rows, info, advance=not logged, wait=wait)
        return self._sequence

    def snapshot(
        self, caches: Mapping[str, Cache], tokens: Tokens, info: Any = None
    ) -> snapshots.Snapshot | None:
        """Takes a snapshot now and waits for it; arguments and errors as `observe`."""
        json.dumps(info, allow_nan=False)
        self._collect(wait=True)
        self._snapshot(caches, _rows(caches, tokens), info, advance=True, wait=True)
        return snapshots.latest(self.path)

    def wait(self) -> None:
        """Waits for a snapshot in the background.

        Raises:
          CheckpointError: it failed.
        """
        self._collect(wait=True)

    def close(self) -> None:
        """Waits, and closes the files; what was not due is not recorded."""
        try:
            self._collect(wait=True)
        finally:
            self._pool.shutdown(wait=True)
            self._log.rotate()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _collect(self, wait: bool) -> None:
        job = self._running
        if job is None or not (wait or job.done()):
            return
        self._running = None
        job.result()

    def _advance(self, caches: Mapping[str, Cache], since) -> int:
        return max(
            int(np.abs(np.asarray(cache.length) - since[name]).max(initial=0))
            for name, cache in caches.items()
        )

    def _record_due(self, caches) -> bool:
        assert self._log_tokens is not None
        last = {name: base.count("length") for name, base in self._bases.items()}
        if self._advance(caches, last) >= self._log_tokens:
            return True
        waited = time.monotonic() - self._last_record
        return self._log_seconds is not None and waited >= self._log_seconds

    def _snapshot_due(self, caches) -> bool:
        if self._running is not None:
            return False
        tokens, seconds, nbytes = self._every
        return (
            (tokens is not None and self._advance(caches, self._lengths) >= tokens)
            or (
                seconds is not None
                and time.monotonic() - self._last_snapshot >= seconds
            )
            or (nbytes is not None and self._bytes_since >= nbytes)
        )

    def _record(self, caches, rows, info) -> None:
        found: dict[str, Delta] = {}
        bases: dict[str, Base] = {}
        for name, cache in caches.items():
            found[name], bases[name] = compare(self._bases[name], cache, rows[name])
        arrays = {name: list(named(cache)) for name, cache in caches.items()}
        written = self._log.append(self._sequence + 1, found, arrays, info)
        self._sequence += 1
        self._bases = bases
        self._last_record = time.monotonic()
        self._bytes_since += written
        self.statistics.records += 1
        self.statistics.log_bytes += written

    def _snapshot(self, caches, rows, info, *, advance: bool, wait: bool) -> None:
        """Of the last record's state; with ``advance`` it gets the next number."""
        begin = time.perf_counter()
        copies = {name: _device_copy(named(cache)) for name, cache in caches.items()}
        described = {name: describe(cache) for name, cache in caches.items()}
        sequence = self._sequence + int(advance)
        number = self._number + 1
        self._log.rotate()

        def write() -> None:
            start = time.perf_counter()
            saved = {
                name: snapshots.Saved(described[name], jax.device_get(copy), rows[name])
                for name, copy in copies.items()
            }
            done = snapshots.write(
                self._fence,
                sequence,
                number,
                self.model_id,
                saved,
                info,
                self._verify,
            )
            retain(self._fence, self._keep, self._keep_every)
            self.statistics.snapshots += 1
            self.statistics.snapshot_bytes += done.nbytes
            self.statistics.background_seconds += time.perf_counter() - start

        job = self._pool.submit(write)
        if wait:
            job.result()
        else:
            self._running = job
        self._number = number
        self._last_snapshot = time.monotonic()
        self._bytes_since = 0
        self._lengths = {n: np.array(cache.length) for n, cache in caches.items()}
        self._kinds = {n: (cache.spec, cache.batch) for n, cache in caches.items()}
        if advance:
            self._sequence = sequence
            if self._log_tokens is not None:
                self._bases = {n: Base.of(c, rows[n]) for n, c in caches.items()}
        self.statistics.blocking_seconds += time.perf_counter() - begin


@jax.jit
def _device_copy(arrays: dict[str, Any]) -> dict[str, Any]:
    """Buffers that the caller cannot donate while a thread still reads them."""
    return {name: jnp.copy(array) for name, array in arrays.items()}


def _rows(caches: Mapping[str, Cache], tokens: Tokens) -> dict[str, list[np.ndarray]]:
    if sorted(caches) != sorted(tokens):
        raise ValueError(f"tokens of {sorted(tokens)}: the caches are {sorted(caches)}")
    if not caches:
        raise ValueError("no caches to record")
    out = {}
    for name, cache in caches.items():
        given, lengths = tokens[name], np.asarray(cache.length)
        # An array is padded to one width; a list of rows says where each ends.
        flat = hasattr(given, "ndim")
        each: Any = np.asarray(given) if flat else given
        rows = [np.array(row, np.int32) for row in each]
        if len(rows) != cache.batch:
            raise ValueError(
                f"tokens of cache {name!r} have {len(rows)} rows, it has {cache.batch}"
            )
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if row.ndim != 1 or row.size < length:
                raise ValueError(
                    f"cache {name!r}, row {index}: tokens {list(row.shape)}, it holds "
                    f"{int(length)}"
                )
        out[name] = [
            row[:n] if flat else row for row, n in zip(rows, lengths, strict=True)
        ]
    return out


def save(
    path: str | os.PathLike,
    caches: Mapping[str, Cache],
    tokens: Tokens,
    info: Any = None,
    *,
    model_id: str,
) -> snapshots.Snapshot:
    """Takes one snapshot; durable on return. Arguments and errors as `observe`."""
    with Checkpointer(path, model_id=model_id, log_tokens=None, keep=None) as writer:
        done = writer.snapshot(caches, tokens, info)
    if done is None:
        raise CheckpointError(f"{path}: the snapshot is gone")
    return done
