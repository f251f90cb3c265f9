"""The index: which blocks a store has, as keys of an OCDBT database under a seal.

OCDBT commits many keys at once, and leaves its older files and its values unchecked.
The seal names every file of the database with size and CRC32C, and the database among
several under ``index/`` that counts. It is written after each commit; whatever differs
from it is an index that cannot be trusted and is rebuilt from the blocks' headers.
"""

import contextlib
import dataclasses
import json
import struct
from collections.abc import Mapping, Set

import tensorstore as ts

from hybrid_attn.store.blocks import crc32c
from hybrid_attn.store.errors import IndexDamagedError, StoreError, StoreReadError
from hybrid_attn.store.objects import ObjectIO

SEAL = "index/seal"
_SEAL_MAGIC = b"HYATIDX\n"
_MANIFEST = "manifest.ocdbt"
_VALUE = struct.Struct("<QIQQ16s")
_CRC = struct.Struct("<I")
# Each commit adds a file or three, and the seal names them all.
_MOST_FILES = 256


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the index says of a block.

    Attributes:
      generation: which of the objects of this key counts.
      index: block number.
      length: tokens up to the end of the block.
      size: bytes of the whole object.
      parent: digest of the previous boundary, "" at block 0.
    """

    generation: int
    index: int
    length: int
    size: int
    parent: str


def make_key(model_id: str, group: str, layout: str, chain: str) -> str:
    """The index key of a block."""
    return f"{model_id[:32]}/{group}/{layout}/{chain}"


def split_key(key: str) -> tuple[str, str, str, str]:
    """(start of the model id, group, layout, chain) of a key."""
    model, group, layout, chain = key.split("/")
    return model, group, layout, chain


def pack_entry(key: str, entry: Entry) -> bytes:
    """The value of a key: CRC32C, the fields, and the key again."""
    body = (
        _VALUE.pack(
            entry.generation,
            entry.index,
            entry.length,
            entry.size,
            bytes.fromhex(entry.parent),
        )
        + key.encode()
    )
    return _CRC.pack(crc32c(body)) + body


def unpack_entry(key: str, value: bytes) -> Entry:
    """The entry in a value.

    Raises:
      IndexDamagedError: a bit is wrong, or the value belongs to another key.
    """
    body = value[_CRC.size :]
    if len(body) < _VALUE.size or value[: _CRC.size] != _CRC.pack(crc32c(body)):
        raise IndexDamagedError(f"index value of {key}: CRC32C differs")
    if body[_VALUE.size :] != key.encode():
        raise IndexDamagedError(
            f"index value of {key}: belongs to {body[_VALUE.size :]!r}"
        )
    generation, index, length, size, parent = _VALUE.unpack_from(body)
    return Entry(generation, index, length, size, parent.hex() if any(parent) else "")


class Index:
    """The sealed index in storage, and its entries in memory.

    Methods that write, and `load`, expect that the caller holds the index lock.
    """

    def __init__(self, io: ObjectIO):
        self._io = io
        self.entries: dict[str, Entry] = {}
        self._epoch = -1
        self._files: dict[str, tuple[int, int]] = {}
        self._sealed: bytes | None = None
        self._database: ts.KvStore | None = None

    def load(self) -> None:
        """Reads the whole index and compares each of its bytes with the seal.

        Raises:
          IndexDamagedError: there is no seal, or something differs from it.
        """
        self._sealed = None
        (sealed,) = self._io.read_many([SEAL])
        epoch, files = _read_seal(self._io.url, sealed)
        prefix = _prefix(epoch)
        held = {key.removeprefix(prefix) for key in self._io.list(prefix)}
        if held != set(files):
            differing = sorted(held ^ set(files))
            raise IndexDamagedError(
                f"{self._io.url}{prefix}: {differing} differ from the seal"
            )
        names = sorted(files)
        contents = self._io.read_many([prefix + name for name in names])
        for name, content in zip(names, contents, strict=True):
            if not isinstance(content, bytes) or _mark(content) != files[name]:
                raise IndexDamagedError(
                    f"{self._io.url}{prefix}{name}: differs from the seal"
                )
        try:
            database = self._io.database(prefix)
            keys = [key.decode() for key in database.list().result()]
            values = [database.read(key) for key in keys]
            entries = {
                key: unpack_entry(key, value.result().value)
                for key, value in zip(keys, values, strict=True)
            }
        except (ValueError, StoreReadError) as error:
            raise IndexDamagedError(f"{self._io.url}{prefix}: {error}") from error
        self.entries = entries
        self._epoch, self._files, self._database = epoch, files, database
        assert isinstance(sealed, bytes)
        self._sealed = sealed

    @property
    def sealed(self) -> bool:
        """Whether storage holds what `entries` say."""
        return self._sealed is not None

    def changed(self) -> bool:
        """Whether another writer has sealed a commit since `load` or `commit`."""
        (sealed,) = self._io.read_many([SEAL])
        return self._sealed is None or sealed != self._sealed

    def commit(self, put: Mapping[str, Entry], delete: Set[str] = frozenset()) -> None:
        """Puts and deletes keys in one transaction, then seals.

        Raises:
          IndexDamagedError: the index in storage is not the one last sealed.
          StoreWriteError: nothing, or the whole of it, was committed.
        """
        database = self._database
        if database is None or self.changed():
            raise IndexDamagedError(f"{self._io.url}{SEAL}: not as it was loaded")
        prefix = _prefix(self._epoch)
        (manifest,) = self._io.read_many([prefix + _MANIFEST])
        expected = self._files.get(_MANIFEST)
        # A database without keys has no manifest yet.
        if (_mark(manifest) if isinstance(manifest, bytes) else manifest) != expected:
            raise IndexDamagedError(
                f"{self._io.url}{prefix}{_MANIFEST}: differs from the seal"
            )
        self._io.drop_stale_writes("index/")
        if len(self._files) > _MOST_FILES:
            entries = {k: v for k, v in self.entries.items() if k not in delete}
            self.rewrite({**entries, **put})
            return
        self._write(database, put, delete)
        held = [key.removeprefix(prefix) for key in self._io.list(prefix)]
        # Files of a database never change, but for its manifest.
        fresh = [n for n in held if n not in self._files or n == _MANIFEST]
        files = self._marks(prefix, fresh)
        self._seal(self._epoch, {**self._files, **files})
        for key in delete:
            self.entries.pop(key, None)
        self.entries.update(put)

    def rewrite(self, entries: Mapping[str, Entry]) -> None:
        """Replaces the index by a new database of these entries; drops the old ones.

        Raises:
          StoreWriteError: the old index is as it was.
        """
        self._io.drop_stale_writes("index/")
        epochs = {_epoch_of(key) for key in self._io.list("index/")} - {None}
        epoch = max([self._epoch, *(e for e in epochs if e is not None)]) + 1
        prefix = _prefix(epoch)
        database = self._io.database(prefix)
        self._write(database, entries, frozenset())
        names = [key.removeprefix(prefix) for key in self._io.list(prefix)]
        self._seal(epoch, self._marks(prefix, names))
        self._epoch, self._database = epoch, database
        self.entries = dict(entries)
        dead = [key for key in self._io.list("index/") if _epoch_of(key) != epoch]
        with contextlib.suppress(StoreError):  # they weigh, and do no harm
            self._io.delete_many([key for key in dead if key != SEAL])

    def foreign_files(self) -> list[str]:
        """Keys under ``index/`` that belong to no index in use."""
        held = self._io.list("index/")
        return [key for key in held if key != SEAL and _epoch_of(key) != self._epoch]

    def bytes_in_storage(self) -> int:
        """Bytes of the index's files, those of older commits included."""
        return sum(size for size, _ in self._files.values())

    def _write(self, database, put: Mapping[str, Entry], delete: Set[str]) -> None:
        transaction = ts.Transaction(atomic=True)
        target = database.with_transaction(transaction)
        futures = [target.write(k, pack_entry(k, v)) for k, v in put.items()]
        futures += [target.write(key, None) for key in delete]
        for future in futures:
            future.result()
        self._io.commit(transaction, "index/")

    def _marks(self, prefix: str, names: list[str]) -> dict[str, tuple[int, int]]:
        keys = [prefix + name for name in names]
        self._io.tighten(keys)
        files = {}
        for name, content in zip(names, self._io.read_many(keys), strict=True):
            if not isinstance(content, bytes):
                raise IndexDamagedError(f"{self._io.url}{prefix}{name}: {content}")
            files[name] = _mark(content)
        return files

    def _seal(self, epoch: int, files: dict[str, tuple[int, int]]) -> None:
        text = json.dumps(
            {"epoch": epoch, "files": files}, sort_keys=True, separators=(",", ":")
        )
        body = _SEAL_MAGIC + text.encode()
        sealed = _CRC.pack(crc32c(body)) + body
        self._sealed = None
        self._io.write_many({SEAL: sealed})
        self._files, self._sealed = files, sealed


def _prefix(epoch: int) -> str:
    return f"index/{epoch:08d}/"


def _epoch_of(key: str) -> int | None:
    part = key.split("/")[1]
    return int(part) if part.isdigit() else None


def _mark(content: bytes) -> tuple[int, int]:
    return len(content), crc32c(content)


def _read_seal(url: str, sealed) -> tuple[int, dict[str, tuple[int, int]]]:
    if not isinstance(sealed, bytes):
        raise IndexDamagedError(f"{url}{SEAL}: {sealed or 'missing'}")
    body = sealed[_CRC.size :]
    if sealed[: _CRC.size] != _CRC.pack(crc32c(body)):
        raise IndexDamagedError(f"{url}{SEAL}: CRC32C differs")
    if not body.startswith(_SEAL_MAGIC):
        raise IndexDamagedError(f"{url}{SEAL}: expected {_SEAL_MAGIC!r}")
    fields = json.loads(body[len(_SEAL_MAGIC) :])
    return fields["epoch"], {
        name: (size, crc) for name, (size, crc) in fields["files"].items()
    }
