"""The log between snapshots: appending records, and the chain that readers follow."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_attn.checkpoint import frames
from hybrid_attn.checkpoint.delta import Delta
from hybrid_attn.checkpoint.description import COUNTS
from hybrid_attn.checkpoint.errors import DamagedError
from hybrid_attn.checkpoint.files import writing
from hybrid_attn.checkpoint.layout import Fence, Name, logs

Arrays = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class LogWriter:
    """Appends records under one fence; each is durable when `append` returns."""

    def __init__(self, fence: Fence, model_id: str):
        self._fence, self._model_id = fence, model_id
        self._descriptor: int | None = None
        self._failed = False

    def append(
        self, sequence: int, deltas: Mapping[str, Delta], arrays, info: Any
    ) -> int:
        """Writes one record and waits until it is on the disk.

        Args:
          sequence: the number after that of the record or snapshot before.
          deltas: by name of the cache.
          arrays: by name of the cache, the names of its arrays in order.
          info: JSON that belongs to the state.

        Returns:
          Bytes written.

        Raises:
          FencedError: a newer writer opened the checkpoint; nothing was written.
          CheckpointWriteError: the storage refused; the record does not count, and
            the next one begins a log of a new epoch, which voids what it left.
        """
        meta, payload = _encode(deltas, arrays, info)
        fence, files = self._fence, self._fence.files
        with writing(fence.root), files.lock(fence.root):
            fence.check()
            if self._failed:
                fence.renew()
                self._failed = False
            parts = b""
            opens = self._descriptor is None
            try:
                if self._descriptor is None:
                    path = fence.root / "log" / f"{Name(sequence, fence.epoch)}.log"
                    self._descriptor = files.create(path)
                    head = {"model_id": self._model_id}
                    parts = frames.encode(
                        frames.HEAD, fence.run, fence.epoch, sequence, head, []
                    )
                parts += frames.encode(
                    frames.RECORD, fence.run, fence.epoch, sequence, meta, payload
                )
                files.write(self._descriptor, parts)
                files.sync(self._descriptor)
                if opens:
                    files.sync_path(fence.root / "log")
            except OSError:
                # Whether the bytes are on the disk is unknown, and a later sync that
                # succeeds would not tell.
                self.rotate()
                self._failed = True
                raise
        return len(parts)

    def rotate(self) -> None:
        """Lets the next record begin a new file."""
        if self._descriptor is not None:
            self._fence.files.close(self._descriptor)
            self._descriptor = None


def _encode(deltas, arrays, info) -> tuple[dict, list[np.ndarray]]:
    caches, payload = {}, []
    for name in sorted(deltas):
        delta = deltas[name]
        sizes = []
        for array in arrays[name]:
            places, rows = delta.changed.get(array, (np.empty(0, np.uint32), None))
            sizes.append(int(places.size))
            if rows is not None:
                payload += [places, rows]
        caches[name] = {
            "counts": [delta.counts[count].tolist() for count in COUNTS],
            "start": delta.start.tolist(),
            "ids": [row.tolist() for row in delta.ids],
            "sizes": sizes,
        }
    return {"caches": caches, "info": info}, payload


def decode(frame: frames.Frame, arrays: Mapping[str, Arrays]) -> dict[str, Delta]:
    """The deltas of a sound record.

    Args:
      arrays: by name of the cache, in order, each array's (shape of a place, dtype).

    Raises:
      DamagedError: it is a record of other caches.
    """
    assert frame.payload is not None
    data, at, out = frame.payload, 0, {}
    if sorted(frame.meta["caches"]) != sorted(arrays):
        raise DamagedError(
            f"record {frame.sequence} has the caches {sorted(frame.meta['caches'])}, "
            f"the snapshot has {sorted(arrays)}"
        )
    for name in sorted(arrays):
        part, changed = frame.meta["caches"][name], {}
        for (array, (shape, dtype)), n in zip(
            arrays[name].items(), part["sizes"], strict=True
        ):
            if not n:
                continue
            size = n * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            places = data[at : at + 4 * n].view(np.uint32)
            rows = data[at + 4 * n : at + 4 * n + size].view(dtype)
            changed[array] = places, rows.reshape(n, *shape)
            at += 4 * n + size
        out[name] = Delta(
            {c: np.array(v) for c, v in zip(COUNTS, part["counts"], strict=True)},
            np.array(part["start"], np.int64),
            [np.array(row, np.int32) for row in part["ids"]],
            changed,
        )
    if at != data.size:
        raise DamagedError(f"record {frame.sequence}: {data.size} bytes, expected {at}")
    return out


@dataclasses.dataclass(frozen=True)
class Chain:
    """All records that count, by sequence number, and what was refused.

    Attributes:
      records: damaged ones included, which are not `sound`.
      refused: sentences naming files that are damaged.
      torn: files that end inside a record, with the length that is sound.
    """

    records: dict[int, frames.Frame]
    refused: list[str]
    torn: dict[Path, int]


def read_chain(root: Path, run: int | None, model_id: str | None = None) -> Chain:
    """Reads every log of a checkpoint.

    A writer goes on from the state that it restored. Its first record therefore voids
    those of older epochs from that sequence number on.

    Raises:
      ValueError: a log is of another model.
    """
    records: dict[int, frames.Frame] = {}
    refused: list[str] = []
    torn: dict[Path, int] = {}
    found = logs(root)
    for name, path in sorted(found.items(), key=lambda x: (x[0].epoch, x[0].sequence)):
        try:
            scan = frames.scan(path.read_bytes())
        except OSError as error:
            refused.append(f"{path.name}: {error}")
            continue
        refused += [f"{path.name}: {text}" for text in scan.damage]
        if scan.torn and not scan.damage:
            torn[path] = scan.sound_end
        own = [
            frame
            for frame in scan.frames
            if (frame.run, frame.epoch) == (run, name.epoch)
        ]
        if len(own) < len(scan.frames):
            refused.append(f"{path.name}: records of another checkpoint or epoch")
        for frame in own:
            if frame.kind == frames.HEAD and frame.meta and model_id is not None:
                other = frame.meta["model_id"]
                if other != model_id:
                    raise ValueError(
                        f"{path.name} was written for model_id {other}, asked is "
                        f"{model_id}"
                    )
        kept = [frame for frame in own if frame.kind == frames.RECORD]
        first = name.sequence
        void = [
            sequence
            for sequence, frame in records.items()
            if frame.epoch < name.epoch and sequence >= first
        ]
        for sequence in void:
            del records[sequence]
        records |= {frame.sequence: frame for frame in kept}
    return Chain(records, refused, torn)
