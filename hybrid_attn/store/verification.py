"""Scrubbing of what is stored: every object, the index and the small files."""

import dataclasses
import random

from hybrid_attn.store.blocks import object_name, parse_name
from hybrid_attn.store.catalog import (
    UNKNOWN_PARENT,
    Catalog,
    Unverified,
    quarantine_name,
)
from hybrid_attn.store.errors import (
    BlockError,
    IndexDamagedError,
    StoreError,
    StoreReadError,
)
from hybrid_attn.store.eviction import USAGE, read_usage
from hybrid_attn.store.index import Entry, make_key, split_key

_READS_AT_ONCE = 32


@dataclasses.dataclass(frozen=True)
class Report:
    """What `Store.verify` found; names of objects, with the reason where there is one.

    Attributes:
      checked, checked_bytes: objects read and verified, or found wanting.
      damaged: a byte is not as it was written; the index's files and the small files
        included.
      missing: named by the index and not there.
      orphaned: sound, and not named by the index (a killed writer, an older
        generation); `Store.gc` removes them.
      foreign: a sound block in another block's place, or a name that no store writes.
      unreadable: the storage failed, which says nothing about the data.
    """

    checked: int = 0
    checked_bytes: int = 0
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()
    foreign: dict[str, str] = dataclasses.field(default_factory=dict)
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """Nothing is damaged, missing, foreign or unreadable."""
        return not (self.damaged or self.missing or self.foreign or self.unreadable)


def verify(
    catalog: Catalog,
    small: dict[str, bytes],
    known: tuple[str, ...],
    sample: int | None,
    seed: int,
) -> Report:
    """Checks objects, index and small files, and puts right what can be.

    Args:
      catalog: the store's blocks.
      small: files of fixed content, by name.
      known: top-level names of a store.
      sample: how many of the indexed blocks to read; None for everything.
      seed: of the sample.
    """
    found = _Finder(catalog)
    found.index()
    entries = dict(catalog.entries)
    chosen = list(entries)
    if sample is not None:
        chosen = random.Random(seed).sample(chosen, min(sample, len(chosen)))
    for start in range(0, len(chosen), _READS_AT_ONCE):
        found.indexed({k: entries[k] for k in chosen[start : start + _READS_AT_ONCE]})
    if sample is None:
        found.loose(entries)
        found.small_files(small, known)
    return Report(
        found.checked,
        found.checked_bytes,
        found.damaged,
        tuple(found.missing),
        tuple(found.orphaned),
        found.foreign,
        found.unreadable,
    )


class _Finder:
    def __init__(self, catalog: Catalog):
        self.catalog = catalog
        self.io = catalog.io
        self.checked = self.checked_bytes = 0
        self.damaged: dict[str, str] = {}
        self.missing: list[str] = []
        self.orphaned: list[str] = []
        self.foreign: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}

    def index(self) -> None:
        try:
            self.catalog.check_index()
        except IndexDamagedError as error:
            self.damaged["index/"] = str(error)
        self.orphaned += self.catalog.index.foreign_files()

    def indexed(self, entries: dict[str, Entry]) -> None:
        names = [_name(key, entry) for key, entry in entries.items()]
        contents = self.io.read_many(names)
        for (key, entry), name, data in zip(
            entries.items(), names, contents, strict=True
        ):
            self._count(data)
            if isinstance(data, StoreReadError):
                self.unreadable[name] = str(data)
                continue
            try:
                self.catalog.check(Unverified(key, entry, name, data))
            except BlockError as error:
                self.catalog.refresh()
                if self.catalog.entries.get(key) != entry:
                    continue  # evicted or replaced meanwhile
                if error.reason == "missing":
                    self.missing.append(name)
                elif error.reason == "mismatch":
                    self.foreign[name] = str(error)
                else:
                    self.damaged[name] = str(error)
                self.catalog.quarantine(key, entry, error)

    def loose(self, entries: dict[str, Entry]) -> None:
        named = {_name(key, entry) for key, entry in entries.items()}
        names = [name for name in self.io.list("blocks/") if name not in named]
        for start in range(0, len(names), _READS_AT_ONCE):
            some = names[start : start + _READS_AT_ONCE]
            for name, data in zip(some, self.io.read_many(some), strict=True):
                self._loose(name, data)

    def _loose(self, name: str, data) -> None:
        parsed = parse_name(name)
        if parsed is None:
            self.foreign[name] = "not a name of a block"
            return
        if data is None:
            return  # removed since it was listed
        self._count(data)
        try:
            header = self.catalog.decode_as(name, data)
        except StoreReadError as error:
            self.unreadable[name] = str(error)
            return
        except BlockError as error:
            wrong = self.foreign if error.reason == "mismatch" else self.damaged
            wrong[name] = str(error)
            self.catalog.recorder.fail(name, error.reason, str(error))
            self._put_aside(name, data)
            return
        key = make_key(header.model_id, header.group, header.layout, header.chain)
        entry = self.catalog.entries.get(key)
        if entry is None or entry.generation != header.generation:
            self.orphaned.append(name)

    def _put_aside(self, name: str, data: bytes) -> None:
        try:
            self.io.write_many({quarantine_name(name, UNKNOWN_PARENT): data})
            self.io.delete_many([name])
        except StoreError as error:
            self.catalog.recorder.event("failed", name, f"quarantine: {error}")
        else:
            self.catalog.recorder.count("quarantined")

    def small_files(self, small: dict[str, bytes], known: tuple[str, ...]) -> None:
        for name, content in small.items():
            (data,) = self.io.read_many([name])
            if data is None:
                self.missing.append(name)
            elif data != content:
                self.damaged[name] = "differs from what every store has there"
            if data != content:
                self._repair(name, content)
        (data,) = self.io.read_many([USAGE])
        if data is not None:
            try:
                read_usage(data)
            except StoreReadError as error:
                self.unreadable[USAGE] = str(error)
            except BlockError as error:
                self.damaged[USAGE] = str(error)
                self._repair(USAGE, None)
        for key in self.io.list(""):
            if key.split("/")[0] not in known:
                self.foreign[key] = "not a name of a store"

    def _repair(self, name: str, content: bytes | None) -> None:
        try:
            if content is None:
                self.io.delete_many([name])
            else:
                self.io.write_many({name: content})
        except StoreError as error:
            self.catalog.recorder.event("failed", name, str(error))

    def _count(self, data) -> None:
        self.checked += 1
        self.checked_bytes += len(data) if isinstance(data, bytes) else 0


def _name(key: str, entry: Entry) -> str:
    _, group, _, digest = split_key(key)
    return object_name(group, digest, entry.generation)
