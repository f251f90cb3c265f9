"""`Store`: verified blocks of caches under a TensorStore url."""

import builtins
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from numpy.typing import ArrayLike

from hybrid_attn.store.blocks import (
    Block,
    Payload,
    as_bytes,
    check_key,
    crc32c,
    encode,
    object_name,
)
from hybrid_attn.store.catalog import Catalog, Changes, in_batches, next_generation
from hybrid_attn.store.chain import Boundary, chain
from hybrid_attn.store.errors import (
    BlockError,
    NotAStoreError,
    StoreClosedError,
    StoreError,
    StoreReadError,
)
from hybrid_attn.store.index import Entry, make_key
from hybrid_attn.store.objects import ObjectIO, Objects
from hybrid_attn.store.statistics import Event, Recorder, Stats

_MARKER = "STORE"
_FORMAT = b"hybrid_attn store 1\n"
_TOP = ("blocks", "index", "locks", "quarantine", "usage", _MARKER)
_BATCH_BYTES = 64 << 20


class Store:
    """Immutable blocks by (group, layout, chain), each verified before it is given.

    Safe for many threads, and on local file systems for many processes. A process sees
    what others published after `refresh`, or after opening the store again.

    Attributes:
      url: where the blocks lie.
      model_id: whose blocks; those of other models are never seen.
      salt: of this tenant's chains.
    """

    def __init__(
        self,
        io: ObjectIO,
        *,
        model_id: str,
        salt: str | bytes | None = None,
        replicas: Sequence["Store"] = (),
    ):
        self.url = io.url
        self.model_id = model_id
        self.salt = salt
        self._io = io
        self._recorder = Recorder()
        self._replicas = tuple(replicas)
        self._pins: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._verified: set[tuple[str, int]] = set()
        self._guard = threading.Lock()
        self._closed = False
        _claim(io, self._recorder)
        self._catalog = Catalog(io, self._recorder)
        self._catalog.open()

    def chain(
        self, layout: str, tokens: ArrayLike, block_tokens: int
    ) -> tuple[Boundary, ...]:
        """`chain` of this store's model and salt."""
        return chain(self.model_id, layout, self.salt, tokens, block_tokens)

    def publish(self, blocks: Sequence[Block], *, replace: bool = False) -> None:
        """Makes blocks visible, all or none; returns when they are durable.

        Objects are written first and named by the index last, in one transaction. The
        first writer of a key wins: a block that is there and passes verification is
        kept. (Objects of a call that was killed before its commit are sound blocks;
        rebuilding the index may find them.)

        Args:
          blocks: in any order; of two with one key the first counts.
          replace: a new generation takes the place of one that is there.

        Raises:
          StoreWriteError: names what could not be written; nothing became visible.
        """
        self._check_open()
        wanted: dict[str, Block] = {}
        for block in blocks:
            wanted.setdefault(self._key(block.group, block.layout, block.chain), block)
        with self._catalog.objects_lock.hold(shared=True):
            if not replace:
                kept = {k for k, block in wanted.items() if self._keeps(k, block)}
                self._recorder.count("kept", len(kept))
                wanted = {k: v for k, v in wanted.items() if k not in kept}
            if wanted:
                self._publish(wanted, replace)

    def fetch(self, group: str, layout: str, chain: str) -> Payload | None:
        """The verified block of a key, or None; never bytes that were not verified.

        A block that fails is put aside under ``quarantine/`` and taken out of the
        index; another generation or a replica is tried then. A digest from `chain`
        also has the block's tokens compared.

        Raises:
          ValueError: a name of another form.
        """
        self._check_open()
        key = self._key(group, layout, chain)
        payload = self._fetch(key)
        if payload is None:
            for replica in self._replicas:
                payload = replica.fetch(group, layout, chain)
                if payload is not None:
                    break
        if payload is not None and not self._same_tokens(key, payload, chain):
            payload = None
        if payload is None:
            self._recorder.count("misses")
            return None
        self._recorder.count("hits")
        self._used[key] = time.time()
        return payload

    def contains(self, group: str, layout: str, chain: str) -> bool:
        """Whether the index names this block; `fetch` decides whether it is sound."""
        self._check_open()
        return self._key(group, layout, chain) in self._catalog.entries

    def refresh(self) -> bool:
        """Takes over what other processes published or removed; True if anything."""
        self._check_open()
        return self._catalog.refresh()

    def rebuild_index(self) -> int:
        """Makes the index anew from the objects' headers; returns its keys.

        Done by itself whenever the index is missing or differs from its seal.
        """
        self._check_open()
        return self._catalog.rebuild_index("asked for")

    @contextlib.contextmanager
    def pinned(self, chains: Iterable[str]) -> Iterator[None]:
        """Alias of ``with store.pin(chains)``."""
        with self.pin(chains):
            yield

    def pin(self, chains: Iterable[str]) -> contextlib.AbstractContextManager:
        """Keeps blocks of these digests, and those before them, from `gc`.

        Counted: each pin needs one `unpin`, or use it as ``with store.pin(chains):``.
        Pins belong to this process.
        """
        self._check_open()
        held = [str(digest) for digest in chains]
        with self._guard:
            self._pins.update(held)
        return _Pin(lambda: self.unpin(held))

    def unpin(self, chains: Iterable[str]) -> None:
        """Takes one pin off each of these digests.

        Raises:
          ValueError: one of them is not pinned; then none is unpinned.
        """
        counts = Counter(str(digest) for digest in chains)
        with self._guard:
            missing = [d for d, count in counts.items() if self._pins[d] < count]
            if missing:
                self._pins = +self._pins
                raise ValueError(f"unpin of {missing}: expected pinned chains")
            self._pins = self._pins - counts

    @property
    def stats(self) -> Stats:
        """Counts since opening, and sizes now."""
        entries = self._catalog.entries
        return self._recorder.snapshot(
            blocks=len(entries),
            bytes_on_disk=sum(entry.size for entry in list(entries.values())),
            index_bytes=self._catalog.index.bytes_in_storage(),
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """The last 1000 events, oldest first."""
        return tuple(self._recorder.events)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Calls ``listener`` with every later event, in the thread it happens in."""
        self._recorder.subscribe(listener)

    def close(self) -> None:
        """Ends the use of this object; what was published stays."""
        self._closed = True

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r}, {len(self._catalog.entries)} blocks)"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.url}: the store was closed")

    def _key(self, group: str, layout: str, digest: str) -> str:
        check_key(group, layout, digest)
        return make_key(self.model_id, group, layout, digest)

    def _fetch(self, key: str) -> Payload | None:
        failed = False
        while (entry := self._catalog.entries.get(key)) is not None:
            try:
                payload = self._catalog.read(key, entry)
            except StoreReadError as error:
                # The storage failed, which says nothing about the block.
                self._recorder.fail(key, "unreadable", str(error))
                return None
            except BlockError as error:
                # Another process may have moved or removed it since.
                if self._catalog.refresh() and self._catalog.entries.get(key) != entry:
                    continue
                self._catalog.quarantine(key, entry, error)
                failed = True
            else:
                self._verified.add((key, entry.generation))
                return payload
        return self._catalog.other_generation(key) if failed else None

    def _keeps(self, key: str, block: Block) -> bool:
        """Whether the key already holds a sound block."""
        entry = self._catalog.entries.get(key)
        if entry is None:
            return False
        if (key, entry.generation) in self._verified:
            return True
        payload = self._fetch(key)
        if payload is not None:
            self._same_tokens(key, payload, block)
        return payload is not None

    def _same_tokens(self, key: str, payload: Payload, asked: str | Block) -> bool:
        tokens = getattr(asked, "tokens", "")
        held = payload.header.tokens
        if not tokens or not held or tokens == held:
            return True
        detail = f"tokens digest is {held!r}, expected {tokens!r}: chains collide"
        self._recorder.event("collision", key, detail)
        return False

    def _publish(self, wanted: dict[str, Block], replace: bool) -> None:
        entries = self._catalog.entries
        before = {key: entries.get(key) for key in wanted}
        new: dict[str, Entry] = {}
        names: dict[str, str] = {}
        keys = list(wanted)
        sizes = [as_bytes(block.payload).nbytes for block in wanted.values()]
        try:
            for some in in_batches(sizes, _BATCH_BYTES):
                objects = {}
                for key in keys[some]:
                    block, held = wanted[key], before[key]
                    generation = next_generation(held.generation if held else None)
                    name = object_name(block.group, block.chain, generation)
                    objects[name] = encode(block, generation, self.model_id)
                    size = len(objects[name])
                    new[key] = Entry(
                        generation, block.index, block.length, size, block.parent or ""
                    )
                    names[key] = name
                self._io.write_many(objects)

            def choose(present: dict[str, Entry]) -> Changes:
                put = {k: v for k, v in new.items() if replace or k not in present}
                return put, frozenset()

            self._catalog.commit(choose)
        except BaseException:
            self._catalog.withdraw({k: v.generation for k, v in new.items()})
            self._discard(names.values())
            raise
        present = self._catalog.entries
        won = {k for k, v in new.items() if present.get(k) == v}
        self._discard(names[key] for key in new if key not in won)
        if replace:
            olds = {k: v for k, v in before.items() if v is not None and k in won}
            self._discard(
                object_name(wanted[k].group, wanted[k].chain, v.generation)
                for k, v in olds.items()
            )
        self._verified.update((key, new[key].generation) for key in won)
        self._recorder.count("published", len(won))
        self._recorder.count("published_bytes", sum(new[key].size for key in won))
        self._recorder.count("kept", len(new) - len(won))
        now = time.time()
        self._used.update((key, now) for key in won)

    def _discard(self, names: Iterable[str]) -> None:
        """Deletes objects that no key names; one that stays is an orphan for gc."""
        with contextlib.suppress(StoreError):
            self._io.delete_many(list(names))


class _Pin:
    def __init__(self, release: Callable[[], None]):
        self._release = release

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_) -> None:
        self._release()


def open(
    url: str,
    *,
    model_id: str,
    salt: str | bytes | None = None,
    replicas: Sequence[Store] = (),
    wrap: Callable[[Objects], ObjectIO] | None = None,
) -> Store:
    """Opens the store at a url, or makes one where nothing is.

    Args:
      url: a path, or a url of TensorStore's key-value stores: ``file://``,
        ``memory://`` (one for the process), ``gs://``, ``s3://``. On the last two,
        which have no locks, let one process write at a time.
      model_id: from `hybrid_attn.model_id`.
      salt: a tenant's secret; chains of other salts never meet.
      replicas: stores that are asked for blocks which this one lost.
      wrap: puts a layer between the store and its storage, for tests.

    Raises:
      NotAStoreError: the url holds something else, or another format version.
    """
    objects = Objects(url)
    io = objects if wrap is None else wrap(objects)
    return Store(io, model_id=model_id, salt=salt, replicas=replicas)


def _claim(io: ObjectIO, recorder: Recorder) -> None:
    marker = _FORMAT + b"crc32c %08x\n" % crc32c(_FORMAT)
    (held,) = io.read_many([_MARKER])
    if held == marker:
        return
    if isinstance(held, StoreReadError):
        raise NotAStoreError(str(held)) from held
    if held is not None:
        body, newline, crc = held.rstrip(b"\n").rpartition(b"\n")
        if crc == b"crc32c %08x" % crc32c(body + newline):
            raise NotAStoreError(f"{io.url}: {body!r}, expected {_FORMAT!r}")
    foreign = [key for key in io.list("") if key.split("/")[0] not in _TOP]
    if foreign:
        raise NotAStoreError(
            f"{io.url}: holds {foreign[0]!r} and no {_MARKER}; expected a store or "
            "an empty place"
        )
    if held is not None:
        recorder.event("marker_rewritten", _MARKER, f"was {builtins.bytes(held)!r}")
    io.write_many({_MARKER: marker})
