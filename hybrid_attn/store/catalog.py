"""Objects and index together: what is named, what is read, what is put aside."""

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from hybrid_attn.store.blocks import (
    HEADER_READ,
    Header,
    Payload,
    decode,
    expect,
    object_name,
    parse_name,
    read_header,
)
from hybrid_attn.store.errors import (
    BlockError,
    IndexDamagedError,
    StoreError,
    StoreReadError,
    StoreWriteError,
)
from hybrid_attn.store.index import SEAL, Entry, Index, make_key, split_key
from hybrid_attn.store.objects import ObjectIO
from hybrid_attn.store.statistics import Recorder

_READS_AT_ONCE = 256
_COUNTER = 32
# In a quarantined object's name: nobody knows which boundary it came after.
UNKNOWN_PARENT = "f" * 32

type Changes = tuple[Mapping[str, Entry], Set[str]]


@dataclasses.dataclass(frozen=True)
class Unverified:
    """An object's bytes, None where it is missing, and the entry that named it."""

    key: str
    entry: Entry
    name: str
    data: bytes | None


class Catalog:
    """The blocks of one store; used by `Store`, scrubbing and eviction."""

    def __init__(self, io: ObjectIO, recorder: Recorder):
        self.io = io
        self.recorder = recorder
        self.index = Index(io)
        self.objects_lock = io.lock("objects")
        self.index_lock = io.lock("index")

    @property
    def entries(self) -> dict[str, Entry]:
        return self.index.entries

    def open(self) -> None:
        """Loads the index, or makes it from headers where it cannot be trusted."""
        with self.index_lock.hold():
            self._load_locked()

    def refresh(self) -> bool:
        """Takes over what other writers committed; True where there was something."""
        with self.index_lock.hold():
            if not self.index.changed():
                return False
            self._load_locked()
            return True

    def rebuild_index(self, why: str) -> int:
        """Makes the index anew from the headers of all objects; returns the keys."""
        with self.index_lock.hold():
            self._rebuild_locked(why)
            return len(self.entries)

    def commit(self, choose: Callable[[dict[str, Entry]], Changes]) -> None:
        """Commits what ``choose`` makes of the present entries, in one transaction.

        ``choose`` may be called again, with the entries that another writer left.

        Raises:
          StoreWriteError: nothing, or the whole of it, was committed.
        """
        with self.index_lock.hold():
            if self.index.changed():
                self._load_locked()
            for attempt in (0, 1):
                put, delete = choose(self.entries)
                if not put and not delete:
                    if not self.index.sealed:
                        raise StoreWriteError(
                            f"{self.io.url}{SEAL}: could not be written"
                        )
                    return
                try:
                    return self.index.commit(put, delete)
                except IndexDamagedError as error:
                    if attempt:
                        raise StoreWriteError(str(error)) from error
                    self._rebuild_locked(str(error))

    def withdraw(self, names: Mapping[str, int]) -> None:
        """Undoes a commit that failed: no key keeps one of these generations.

        Args:
          names: generation by key, of objects that are being deleted.
        """

        def chosen(entries: dict[str, Entry]) -> set[str]:
            return {
                key
                for key, generation in names.items()
                if key in entries and entries[key].generation == generation
            }

        with self.index_lock.hold():
            for key in chosen(self.entries):
                del self.entries[key]
            try:
                self._load_locked()
                if doomed := chosen(self.entries):
                    self.index.commit({}, doomed)
            except StoreError as error:
                # The seal does not fit either then: whoever opens next rebuilds.
                self.recorder.event("index_not_written", "index/", str(error))
            for key in chosen(self.entries):
                del self.entries[key]

    def read(self, key: str, entry: Entry) -> Payload:
        """The verified block that an index entry names.

        Raises:
          BlockError: it is missing ("missing"), or fails any check.
          StoreReadError: the storage failed.
        """
        return self.check(self.read_object(key, entry))

    def read_object(self, key: str, entry: Entry) -> "Unverified":
        """The object that an entry names, for `check`.

        Raises:
          StoreReadError: the storage failed.
        """
        _, group, _, chain = split_key(key)
        name = object_name(group, chain, entry.generation)
        (data,) = self.io.read_many([name])
        if isinstance(data, StoreReadError):
            raise data
        return Unverified(key, entry, name, data)

    def check(self, found: "Unverified") -> Payload:
        """Verifies an object against the key and entry that named it; see `read`."""
        key, name, data = found.key, found.name, found.data
        if data is None:
            raise BlockError("missing", f"{self.io.url}{name}: no object")
        payload = decode(self.io.url + name, data)
        self.recorder.count("verified_bytes", len(data))
        model, group, layout, chain = split_key(key)
        header = dataclasses.replace(
            payload.header, model_id=payload.header.model_id[: len(model)]
        )
        expect(
            self.io.url + name,
            header,
            group=group,
            layout=layout,
            chain=chain,
            generation=found.entry.generation,
            model_id=model,
        )
        return payload

    def decode_as(self, name: str, data: bytes | StoreReadError) -> Header:
        """The header of an object that passes every check its own name allows.

        Raises:
          BlockError: it does not pass.
          StoreReadError: the storage failed.
        """
        if isinstance(data, StoreReadError):
            raise data
        header = decode(self.io.url + name, data).header
        self._expect_name(name, header)
        self.recorder.count("verified_bytes", len(data))
        return header

    def quarantine(self, key: str, entry: Entry, error: BlockError) -> None:
        """Takes a failed block out of the index and puts its object aside.

        Never raises for storage that cannot be written: the block is then left where
        it is, and this process no longer knows it.
        """
        _, group, _, chain = split_key(key)
        name = object_name(group, chain, entry.generation)
        self.recorder.fail(name, error.reason, str(error))

        def choose(entries: dict[str, Entry]) -> Changes:
            return {}, {key} if entries.get(key) == entry else frozenset()

        try:
            with self.objects_lock.hold(shared=True):
                (data,) = self.io.read_many([name])
                if isinstance(data, bytes):
                    self.io.write_many({quarantine_name(name, entry.parent): data})
                self.commit(choose)
                self.io.delete_many([name])
        except StoreError as failure:
            self.recorder.event("failed", name, f"quarantine: {failure}")
            if self.entries.get(key) == entry:
                self.entries.pop(key, None)
        else:
            self.recorder.count("quarantined")
            self.recorder.event("quarantined", key, str(error))

    def other_generation(self, key: str) -> Payload | None:
        """The newest sound object of a key that has no sound entry; names it again."""
        _, group, _, chain = split_key(key)
        prefix = object_name(group, chain, 0).rpartition("/")[0] + "/"
        try:
            names = [(parse_name(name), name) for name in self.io.list(prefix)]
        except StoreReadError:
            return None
        found = [(p[2], name) for p, name in names if p and p[1] == chain]
        with self.objects_lock.hold(shared=True):
            for generation, name in sorted(found, reverse=True):
                (data,) = self.io.read_many([name])
                if not isinstance(data, bytes):
                    continue
                entry = Entry(generation, 0, 0, len(data), "")
                try:
                    payload = self.check(Unverified(key, entry, name, data))
                except BlockError:
                    continue
                put = {key: entry_of(payload.header, len(data))}
                try:
                    self.commit(lambda _, put=put: (put, frozenset()))
                except StoreWriteError as error:
                    self.recorder.event("index_not_written", key, str(error))
                return payload
        return None

    def check_index(self) -> None:
        """Compares every byte of the stored index with its seal; rebuilds it if wrong.

        Raises:
          IndexDamagedError: it was not as sealed; by now it is again.
        """
        with self.index_lock.hold():
            try:
                self.index.load()
            except IndexDamagedError as error:
                self._rebuild_locked(str(error))
                raise

    def compact(self) -> None:
        """Copies the live keys into a new index, so that the dead ones go.

        Raises:
          StoreWriteError: the index is as it was.
        """
        with self.index_lock.hold():
            if self.index.changed():
                self._load_locked()
            self.index.rewrite(self.entries)

    def headers(
        self, skip: Set[str] = frozenset()
    ) -> Iterator[tuple[str, Header | BlockError, int]]:
        """Objects under ``blocks/`` as (name, header or what is wrong, bytes).

        The bytes are those that the header states.
        """
        names = [name for name in self.io.list("blocks/") if name not in skip]
        for start in range(0, len(names), _READS_AT_ONCE):
            some = names[start : start + _READS_AT_ONCE]
            for name, data in zip(
                some, self.io.read_many(some, HEADER_READ), strict=True
            ):
                try:
                    yield name, *self._header(name, data)
                except BlockError as error:
                    yield name, error, 0

    def _header(self, name: str, data) -> tuple[Header, int]:
        if parse_name(name) is None:
            raise BlockError("foreign", f"{self.io.url}{name}: not a block's name")
        if not isinstance(data, bytes):
            raise BlockError("missing", f"{self.io.url}{name}: {data or 'no object'}")
        header, _, total = read_header(self.io.url + name, data)
        self._expect_name(name, header)
        return header, total

    def _expect_name(self, name: str, header: Header) -> None:
        group, chain, generation = parse_name(name) or ("", "", -1)
        expect(
            self.io.url + name, header, group=group, chain=chain, generation=generation
        )

    def _load_locked(self) -> None:
        try:
            self.index.load()
        except IndexDamagedError as error:
            self._rebuild_locked(str(error))

    def _rebuild_locked(self, why: str) -> None:
        entries: dict[str, Entry] = {}
        for name, header, size in self.headers():
            if isinstance(header, BlockError):
                self.recorder.fail(name, header.reason, str(header))
                continue
            key = make_key(header.model_id, header.group, header.layout, header.chain)
            held = entries.get(key)
            if held is None or held.generation < header.generation:
                entries[key] = entry_of(header, size)
        if entries or self.entries:
            self.recorder.event("index_rebuilt", "index/", why)
        try:
            self.index.rewrite(entries)
        except StoreError as error:
            # Readers still get every block; writers try again, and are told.
            self.index.entries = entries
            self.recorder.event("index_not_written", "index/", str(error))


def entry_of(header: Header, size: int) -> Entry:
    """The index entry of an object of ``size`` bytes."""
    return Entry(header.generation, header.index, header.length, size, header.parent)


def next_generation(before: int | None = None) -> int:
    """A generation after ``before``: a counter, and 32 random bits.

    With them no two writers ever use one object name: TensorStore's file driver would
    let a value inherit the tail of a longer one whose writer was killed.
    """
    counter = 0 if before is None else (before >> _COUNTER) + 1
    return counter << _COUNTER | secrets.randbits(_COUNTER)


def quarantine_name(name: str, parent: str) -> str:
    """Where a failed object is kept; tells its chain even if the header does not."""
    group, chain, generation = parse_name(name) or ("unknown", "0" * 32, 0)
    return f"quarantine/{group}/{chain}-{parent or '0' * 32}-{generation:016x}"


def parse_quarantine(name: str) -> tuple[str, str] | None:
    """(chain, parent) of a quarantined object's name."""
    fields = name.rpartition("/")[2].split("-")
    return (fields[0], fields[1].strip("0") and fields[1]) if len(fields) == 3 else None


def in_batches(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Slices of a sequence that hold ``limit`` bytes at most, or one item."""
    start = total = 0
    for position, size in enumerate(sizes):
        if position > start and total + size > limit:
            yield slice(start, position)
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
