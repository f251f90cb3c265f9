"""`Store`: verified blocks of caches under a TensorStore url."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from numpy.typing import ArrayLike

from hybrid_attn.store.blocks import Block, Payload, as_bytes, check_key, crc32c
from hybrid_attn.store.catalog import Catalog, Unverified, in_batches
from hybrid_attn.store.chain import Boundary, chain
from hybrid_attn.store.errors import (
    BlockError,
    StoreClosedError,
    StoreReadError,
)
from hybrid_attn.store.eviction import (
    USAGE,
    GcReport,
    collect,
    forget,
    load_usage,
    save_usage,
)
from hybrid_attn.store.index import make_key, split_key
from hybrid_attn.store.objects import ObjectIO
from hybrid_attn.store.pins import Pins
from hybrid_attn.store.publishing import SealedBlock, publish, seal
from hybrid_attn.store.statistics import Event, Recorder, Stats
from hybrid_attn.store.verification import Report, verify

MARKER = "STORE"
_FORMAT = b"hybrid_attn store 1\n"
MARKER_CONTENT = _FORMAT + b"crc32c %08x\n" % crc32c(_FORMAT)
TOP_LEVEL = ("blocks", "index", "locks", "quarantine", USAGE, MARKER)
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
        self._pins = Pins()
        self._verified: set[tuple[str, int]] = set()
        self._closed = False
        self._catalog = Catalog(io, self._recorder)
        self._catalog.open()
        self._used = load_usage(self._catalog)
        self._used_at_open = dict(self._used)

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
        won: list[str] = []
        with self._catalog.objects_lock.hold(shared=True):
            if not replace:
                kept = {k for k, block in wanted.items() if self._keeps(k, block)}
                self._recorder.count("kept", len(kept))
                wanted = {k: v for k, v in wanted.items() if k not in kept}
            if wanted:
                sizes = [as_bytes(block.payload).nbytes for block in wanted.values()]
                values = list(wanted.values())
                won = self._publish(
                    (
                        [seal(self._catalog, b, self.model_id) for b in values[some]]
                        for some in in_batches(sizes, _BATCH_BYTES)
                    ),
                    replace,
                )
        self._recorder.tell("published", won)

    def publish_sealed(
        self, blocks: Sequence[SealedBlock], *, replace: bool = False
    ) -> None:
        """`publish` of blocks that `seal` made; raises the same, tells no listener."""
        self._check_open()
        with self._catalog.objects_lock.hold(shared=True):
            self._publish([list(blocks)], replace)

    def seal(self, block: Block) -> SealedBlock:
        """Gives a block its generation, header and CRC32C; writes nothing."""
        self._check_open()
        return seal(self._catalog, block, self.model_id)

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

    def verify(self, sample: int | None = None, *, seed: int = 0) -> Report:
        """Reads and checks every object, or ``sample`` blocks, and the whole index.

        What is damaged is put right: blocks go to quarantine, so that they are made
        anew; the index is rebuilt; the small files are written again.

        Raises:
          ValueError: a sample below 0.
          StoreError: the storage could not be listed.
        """
        self._check_open()
        if sample is not None and sample < 0:
            raise ValueError(f"sample={sample}: expected a number of blocks")
        small = {MARKER: MARKER_CONTENT}
        return verify(self._catalog, small, TOP_LEVEL, sample, seed)

    def gc(self, budget_bytes: int, *, orphans: bool | None = None) -> GcReport:
        """Evicts blocks until ``budget_bytes`` hold the rest, and compacts the index.

        Used longest ago goes first, the end of a chain before what it stands on, and
        nothing that this process pinned. Empties the quarantine.

        Args:
          budget_bytes: for block objects.
          orphans: removes objects that no key names; that no other process is
            publishing is known by locks on local storage (the default there), and to
            the caller alone elsewhere.

        Raises:
          ValueError: a budget below 0.
          StoreError: the storage failed half way; the store is consistent.
        """
        self._check_open()
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes={budget_bytes}: expected from 0")
        if orphans is None:
            orphans = self._io.excludes_writers
        report, gone = collect(
            self._catalog, self._used, self._pins.pinned(), budget_bytes, orphans
        )
        for key in gone:
            self._used.pop(key, None)
        self._recorder.tell("evicted", gone)
        self._recorder.count("evicted", report.evicted)
        self._recorder.count("evicted_bytes", report.evicted_bytes)
        save_usage(self._catalog, self._used)
        return report

    def forget(self, chains: Iterable[str]) -> int:
        """Removes the blocks of these digests and of all boundaries behind them.

        Of every group, layout and model, pinned or not, from index, objects and
        quarantine; replicas are asked by themselves.

        Returns:
          How many objects were removed.

        Raises:
          StoreError: the storage failed half way; call it again.
        """
        self._check_open()
        before = list(self._catalog.entries)
        count, digests = forget(self._catalog, chains)
        self._recorder.tell(
            "forgotten", (key for key in before if split_key(key)[3] in digests)
        )
        self._used = {
            k: v for k, v in self._used.items() if k.split("/")[3] not in digests
        }
        self._recorder.count("forgotten", count)
        save_usage(self._catalog, self._used)
        return count

    def pin(self, chains: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Keeps blocks of these digests, and those before them, from `gc`.

        Counted: each pin needs one `unpin`, or use it as ``with store.pin(chains):``.
        Pins belong to this process.
        """
        self._check_open()
        return self._pins.hold(self._pins.add(chains))

    def unpin(self, chains: Iterable[str]) -> None:
        """Takes one pin off each of these digests.

        Raises:
          ValueError: one of them is not pinned; then none is unpinned.
        """
        self._pins.remove(chains)

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

    def report(self, kind: str, key: str, detail: str) -> None:
        """Adds an event; for what works on the store from outside."""
        self._recorder.event(kind, key, detail)
        if kind == "rebuilt":
            self._recorder.count("rebuilt")

    def close(self) -> None:
        """Ends the use of this object; what was published stays."""
        if not self._closed and self._used != self._used_at_open:
            save_usage(self._catalog, self._used)
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
                self._catalog.refresh()
                if self._catalog.entries.get(key) != entry:
                    continue
                self._catalog.quarantine(key, entry, error)
                failed = True
            else:
                self._verified.add((key, entry.generation))
                return payload
        return self._catalog.other_generation(key) if failed else None

    def read_object(self, group: str, layout: str, chain: str) -> Unverified | None:
        """The object of a block as it lies there, for `check_object`; None for a miss.

        Raises:
          StoreReadError: the storage failed.
        """
        key = self._key(group, layout, chain)
        entry = self._catalog.entries.get(key)
        return None if entry is None else self._catalog.read_object(key, entry)

    def check_object(self, found: Unverified) -> Payload | None:
        """Verifies what `read_object` gave; a failed one goes to quarantine."""
        try:
            return self._catalog.check(found)
        except BlockError as error:
            self._catalog.quarantine(found.key, found.entry, error)
            return None

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

    def _publish(
        self, batches: Iterable[list[SealedBlock]], replace: bool
    ) -> list[str]:
        total = 0

        def counted() -> Iterator[list[SealedBlock]]:
            nonlocal total
            for batch in batches:
                total += len(batch)
                yield batch

        won = publish(self._catalog, counted(), replace)
        self._verified.update((key, entry.generation) for key, entry in won.items())
        self._recorder.count("published", len(won))
        self._recorder.count("published_bytes", sum(e.size for e in won.values()))
        self._recorder.count("kept", total - len(won))
        now = time.time()
        self._used.update((key, now) for key in won)
        return list(won)
