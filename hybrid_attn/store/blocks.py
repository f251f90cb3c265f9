"""Block objects: header, payload and padding under one CRC32C.

    prologue   magic 8s · version u32 · crc u32 · header crc u32 · header bytes u32 ·
               total bytes u64, little endian
    header     canonical JSON
    payload    from the next multiple of 64
    padding    zeros up to a multiple of the alignment

``crc`` covers every byte of the object but its own four; ``header crc`` covers the
magic, version, sizes and the header, so that an index can be rebuilt from the first
bytes of each object alone. A CRC cannot tell a wrong block from the right one: that is
what the header's fields are compared for.
"""

import contextlib
import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np

from hybrid_attn.store.chain import DIGEST_CHARACTERS, Boundary
from hybrid_attn.store.errors import BlockError

MAGIC = b"HYATBLK\n"
VERSION = 1
HEADER_READ = 4096
ORIGINS = ("prefill", "decode", "rebuild")

_PROLOGUE = struct.Struct("<8sIIIIQ")
_CRC_START, _CRC_END, _HEADER_CRC_END = 12, 16, 20
_PAYLOAD_ALIGNMENT = 64
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LAYOUT = re.compile(r"[0-9a-f]{8,64}")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARACTERS}}}")

type Bytes = bytes | bytearray | memoryview | np.ndarray


@dataclasses.dataclass(frozen=True)
class Block:
    """What is published: one cache group's bytes at one block of one token chain.

    Attributes:
      group: name of the cache group, such as "csa4.entries".
      layout: hex fingerprint of the layout of the payload.
      chain: the boundary's digest; one from `chain` brings parent and tokens along.
      index: block number from 0.
      length: tokens up to the end of the block.
      payload: the bytes, C order.
      origin: "prefill", "decode" or "rebuild": how the numbers were made.
      alignment: the object's size is a multiple of it, in bytes.
      parent: digest of the previous boundary, "" at block 0.
      tokens: digest of the block's own tokens, "" where unknown.
    """

    group: str
    layout: str
    chain: str
    index: int
    length: int
    payload: Bytes
    origin: str
    alignment: int = 4096
    parent: str | None = None
    tokens: str | None = None

    def __post_init__(self):
        boundary = self.chain if isinstance(self.chain, Boundary) else None
        for name in ("parent", "tokens"):
            if getattr(self, name) is None:
                value = getattr(boundary, name) if boundary is not None else ""
                object.__setattr__(self, name, value)
        check_key(self.group, self.layout, self.chain)
        if self.index < 0 or self.length < 1:
            raise ValueError(
                f"block {self.index} of length {self.length}: expected from 0 and 1"
            )
        if (self.index > 0) != bool(self.parent):
            raise ValueError(
                f"block {self.index} has parent {self.parent!r}; expected the previous "
                "boundary's digest for every block but the first (a chain from "
                "chain() knows it)"
            )
        if self.origin not in ORIGINS:
            raise ValueError(f"origin={self.origin!r}: expected one of {ORIGINS}")
        if self.alignment < 64 or self.alignment & (self.alignment - 1):
            raise ValueError(
                f"alignment={self.alignment}: expected a power of two from 64 bytes"
            )


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a stored block; fields as in `Block`."""

    group: str
    layout: str
    chain: str
    parent: str
    tokens: str
    index: int
    length: int
    generation: int
    origin: str
    payload_bytes: int
    alignment: int
    model_id: str


@dataclasses.dataclass(frozen=True)
class Payload:
    """A verified block: read-only uint8[payload_bytes] and the header it came with."""

    data: np.ndarray
    header: Header


def check_key(group: str, layout: str, chain: str) -> None:
    """Raises `ValueError` for a name that could not be an object's name."""
    for name, value, pattern, expected in (
        ("group", group, _GROUP, "letters, digits, '.', '_' and '-'"),
        ("layout", layout, _LAYOUT, "8 to 64 hex digits"),
        ("chain", chain, _DIGEST, f"{DIGEST_CHARACTERS} hex digits"),
    ):
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{name}={value!r}: expected {expected}")


def crc32c(*parts: Bytes) -> int:
    """CRC32C of the parts as one run of bytes."""
    crc = 0
    for part in parts:
        if not isinstance(part, bytes):
            part = np.frombuffer(part, np.uint8)
        crc = google_crc32c.extend(crc, part)
    return crc


_checksums = True


@contextlib.contextmanager
def unchecked_for_measurement() -> Iterator[None]:
    """Leaves the CRC32C of blocks out in this process, to measure what it costs.

    Never for data that matters: what is written meanwhile fails verification later.
    """
    global _checksums
    _checksums = False
    try:
        yield
    finally:
        _checksums = True


def _crc(*parts: Bytes) -> int:
    return crc32c(*parts) if _checksums else 0


def encode(block: Block, generation: int, model_id: str) -> bytes:
    """The object of a block; the same arguments give the same bytes."""
    payload = as_bytes(block.payload)
    fields = {
        field.name: getattr(block, field.name)
        for field in dataclasses.fields(Header)
        if field.name not in ("generation", "payload_bytes", "model_id")
    }
    header = Header(
        **{**fields, "chain": str(block.chain)},
        generation=generation,
        payload_bytes=payload.size,
        model_id=model_id,
    )
    text = json.dumps(dataclasses.asdict(header), sort_keys=True, separators=(",", ":"))
    raw = text.encode()
    start = _round_up(_PROLOGUE.size + len(raw), _PAYLOAD_ALIGNMENT)
    if start > HEADER_READ:
        raise ValueError(f"header of {len(raw)} bytes: expected less than 4 KiB")
    total = _round_up(start + payload.size, block.alignment)
    head = raw + bytes(start - _PROLOGUE.size - len(raw))
    tail = bytes(total - start - payload.size)
    first = struct.pack("<8sI", MAGIC, VERSION)
    sizes = struct.pack("<IQ", len(raw), total)
    header_crc = struct.pack("<I", _crc(first, sizes, head))
    crc = struct.pack("<I", _crc(first, header_crc, sizes, head, payload, tail))
    return b"".join((first, crc, header_crc, sizes, head, payload.data, tail))


def read_header(name: str, data: bytes) -> tuple[Header, int, int]:
    """The header, the payload's start and the object's size, from the first bytes.

    Raises:
      BlockError: anything about the prologue or the header that is not as written.
    """
    if len(data) < _PROLOGUE.size:
        raise BlockError("short", f"{name}: {len(data)} bytes, expected a header")
    magic, version, _, header_crc, size, total = _PROLOGUE.unpack_from(data)
    if magic != MAGIC:
        raise BlockError("magic", f"{name}: starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise BlockError("version", f"{name}: version {version}, expected {VERSION}")
    start = _round_up(_PROLOGUE.size + size, _PAYLOAD_ALIGNMENT)
    if start > min(HEADER_READ, total):
        raise BlockError("size", f"{name}: header of {size} in {total} bytes")
    if start > len(data):
        raise BlockError("short", f"{name}: {len(data)} bytes, header ends at {start}")
    view = memoryview(data)
    if _crc(view[:_CRC_START], view[_HEADER_CRC_END:start]) != header_crc:
        raise BlockError("crc", f"{name}: CRC32C of the header differs")
    try:
        raw = json.loads(data[_PROLOGUE.size : _PROLOGUE.size + size])
        header = Header(**raw)
        _check_fields(header)
    except (ValueError, TypeError) as error:
        raise BlockError("header", f"{name}: unreadable header: {error}") from error
    return header, start, total


def decode(name: str, data: bytes) -> Payload:
    """The verified block in an object's bytes.

    Raises:
      BlockError: a byte of the object is not as it was written.
    """
    header, start, total = read_header(name, data)
    if len(data) != total:
        raise BlockError("size", f"{name}: {len(data)} bytes, expected {total}")
    end = start + header.payload_bytes
    if _round_up(end, header.alignment) != total:
        raise BlockError(
            "size", f"{name}: {total} bytes, expected a payload of {end - start}"
        )
    view = memoryview(data)
    (crc,) = struct.unpack_from("<I", data, _CRC_START)
    if _crc(view[:_CRC_START], view[_CRC_END:]) != crc:
        raise BlockError("crc", f"{name}: CRC32C of the object differs")
    return Payload(np.frombuffer(data, np.uint8)[start:end], header)


def expect(name: str, header: Header, **fields: Any) -> None:
    """Raises `BlockError` "mismatch" where the header has another value of a field."""
    for field, wanted in fields.items():
        held = getattr(header, field)
        if held != wanted:
            raise BlockError(
                "mismatch", f"{name}: {field} is {held!r}, expected {wanted!r}"
            )


def object_name(group: str, chain: str, generation: int) -> str:
    """Where a block lies: ``blocks/<group>/<chain[:2]>/<chain>-<generation>``."""
    return f"blocks/{group}/{chain[:2]}/{chain}-{generation:016x}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """(group, chain, generation) of an object's name, None for any other name."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "blocks":
        return None
    chain, dash, generation = parts[3].partition("-")
    if not dash or not re.fullmatch(r"[0-9a-f]{16}", generation):
        return None
    if not _GROUP.fullmatch(parts[1]) or not _DIGEST.fullmatch(chain):
        return None
    if parts[2] != chain[:2]:
        return None
    return parts[1], chain, int(generation, 16)


def split_object(name: str) -> tuple[str, str]:
    """(group, chain) of the name of an object."""
    _, group, _, last = name.split("/")
    return group, last.partition("-")[0]


def as_bytes(payload: Bytes) -> np.ndarray:
    """uint8[n] view of bytes or of an array in C order."""
    if isinstance(payload, np.ndarray):
        return np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
    return np.frombuffer(payload, np.uint8)


def _check_fields(header: Header) -> None:
    for field in dataclasses.fields(Header):
        value = getattr(header, field.name)
        if type(value) is not field.type:
            raise ValueError(f"{field.name}={value!r}, expected {field.type}")
    check_key(header.group, header.layout, header.chain)
    if min(header.index, header.generation, header.payload_bytes) < 0:
        raise ValueError("negative counts")
    if header.alignment < 64:
        raise ValueError(f"alignment={header.alignment}")


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
