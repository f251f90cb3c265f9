"""Counters and events of a store."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that went wrong, was put right, or changed what the store has.

    Attributes:
      kind: "failed", "collision", "quarantined", "index_rebuilt", "index_not_written",
        "rebuilt", "rebuild_failed", "marker_rewritten"; listeners alone are also told
        of "published", "evicted" and "forgotten".
      key: the object, or for "quarantined", "collision", "rebuilt", "rebuild_failed"
        and what listeners alone are told of the index key, that it is about.
      detail: the reason, in words.
    """

    kind: str
    key: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the store was opened, and what it holds now.

    Attributes:
      hits, misses: fetches that returned a block, or none.
      verified_bytes: bytes of objects whose CRC32C was computed.
      failed: objects that failed verification, by reason.
      published, published_bytes: objects written and committed.
      kept: blocks whose first, verified version was kept instead.
      evicted, evicted_bytes, forgotten, quarantined, rebuilt: objects.
      blocks, bytes_on_disk: objects that the index names, and their size.
      index_bytes: size of the index, its older commits included.
    """

    hits: int = 0
    misses: int = 0
    verified_bytes: int = 0
    failed: dict[str, int] = dataclasses.field(default_factory=dict)
    published: int = 0
    published_bytes: int = 0
    kept: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    forgotten: int = 0
    quarantined: int = 0
    rebuilt: int = 0
    blocks: int = 0
    bytes_on_disk: int = 0
    index_bytes: int = 0


class Recorder:
    """Counts and events, from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[str] = collections.Counter()
        self._listeners: list[Callable[[Event], None]] = []
        self.events: collections.deque[Event] = collections.deque(maxlen=1000)

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def fail(self, key: str, reason: str, detail: str) -> None:
        with self._lock:
            self._failed[reason] += 1
        self.event("failed", key, detail)

    def event(self, kind: str, key: str, detail: str) -> None:
        event = Event(kind, key, detail)
        with self._lock:
            self.events.append(event)
        self._call(event)

    def tell(self, kind: str, keys: Iterable[str]) -> None:
        """Tells listeners of what is no trouble and so not kept among the events."""
        for key in keys:
            self._call(Event(kind, key, ""))

    def _call(self, event: Event) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener(event)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def snapshot(self, **held: int) -> Stats:
        with self._lock:
            return Stats(**self._counts, failed=dict(self._failed), **held)
