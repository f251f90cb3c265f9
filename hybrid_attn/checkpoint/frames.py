"""Frames of a log: length, sequence number, epoch and CRC32C around each record."""

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from hybrid_attn.store.blocks import crc32c

MAGIC = b"hAl1"
HEAD, RECORD = 0, 1
# magic, kind, run, epoch, sequence, bytes of meta and payload, their CRCs; then the
# CRC of all that.
_FIELDS = struct.Struct("<4sIQQQQQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame as it was found.

    Attributes:
      run: the checkpoint that it belongs to.
      epoch: of the writer; grows with every process that opens the checkpoint.
      sequence: number of the record.
      meta: JSON; None where its bytes are damaged.
      payload: uint8[n]; None where it is damaged.
      end: offset behind the frame in its file.
    """

    kind: int
    run: int
    epoch: int
    sequence: int
    meta: Any
    payload: np.ndarray | None
    end: int

    @property
    def sound(self) -> bool:
        return self.meta is not None and self.payload is not None


def encode(
    kind: int, run: int, epoch: int, sequence: int, meta: Any, payload: list[np.ndarray]
) -> bytes:
    """The bytes of one frame; ``payload`` is written part after part."""
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False).encode()
    parts = [np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in payload]
    size = sum(part.size for part in parts)
    header = _FIELDS.pack(
        MAGIC,
        kind,
        run,
        epoch,
        sequence,
        len(text),
        size,
        crc32c(text),
        crc32c(*parts),
    )
    return b"".join((header, _CRC.pack(crc32c(header)), text, *parts))


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a file of frames holds.

    Attributes:
      frames: in order; damaged ones among them are not `sound`.
      sound_end: offset behind the last frame before anything unsound.
      torn: the file ends inside a frame, as a write that was cut off leaves it.
      damage: a sentence for everything else that is wrong.
    """

    frames: list[Frame]
    sound_end: int
    torn: bool
    damage: list[str]


def scan(data: bytes) -> Scan:
    """Reads frames, past damage where a later frame can be made out."""
    frames, damage, at, sound_end, torn = [], [], 0, 0, False
    while at < len(data):
        header = data[at : at + HEADER_BYTES]
        if len(header) < HEADER_BYTES:
            torn = True
            break
        (crc,) = _CRC.unpack_from(header, _FIELDS.size)
        if crc != crc32c(header[: _FIELDS.size]) or header[:4] != MAGIC:
            damage.append(f"offset {at}: no frame")
            at = data.find(MAGIC, at + 1)
            if at < 0:
                break
            continue
        _, kind, run, epoch, sequence, meta_size, size, meta_crc, payload_crc = (
            _FIELDS.unpack_from(header)
        )
        start = at + HEADER_BYTES
        middle, end = start + meta_size, start + meta_size + size
        text, body = data[start:middle], data[middle:end]
        torn = len(data) < end
        meta = payload = None
        if len(text) == meta_size and crc32c(text) == meta_crc:
            meta = json.loads(text)
        if len(body) == size and crc32c(body) == payload_crc:
            payload = np.frombuffer(body, np.uint8)
        if torn:
            break
        frame = Frame(kind, run, epoch, sequence, meta, payload, end)
        if frame.sound and not damage:
            sound_end = end
        elif not frame.sound:
            damage.append(f"offset {at}: record {sequence} fails its CRC")
        frames.append(frame)
        at = end
    return Scan(frames, sound_end, torn, damage)
