"""Makes lost blocks anew while readers go on: a pipeline of bounded stages.

    fetch → verify → make → seal → publish

Fetch reads a replica's object, verify checks it, make takes it over or recomputes the
block from its tokens, seal gives it a generation and a CRC, publish commits what has
gathered in one transaction. Each stage has its threads and a queue of bounded length
before it, so that a slow stage holds up those before it instead of filling memory.
Nothing is visible before the commit: a block that is cancelled or fails in any stage
leaves the store as it was, with the old generation readable if there was one.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError

from hybrid_attn.store.blocks import Block, Payload
from hybrid_attn.store.catalog import Unverified
from hybrid_attn.store.errors import StoreError
from hybrid_attn.store.index import make_key, split_key
from hybrid_attn.store.publishing import SealedBlock
from hybrid_attn.store.statistics import Event
from hybrid_attn.store.store import Store

_POLL_SECONDS = 0.05
_COMMIT_AT_ONCE = 16
STAGES: tuple[str, ...] = ("fetch", "verify", "make", "seal", "publish")
_AFTER: dict[str, str] = dict(itertools.pairwise(STAGES))


@dataclasses.dataclass(frozen=True)
class BlockKey:
    """Which block; ``chain`` may be a `Boundary`, whose tokens are compared then."""

    group: str
    layout: str
    chain: str


@dataclasses.dataclass(frozen=True)
class Result:
    """How one rebuild ended.

    Attributes:
      key: the block.
      ok: it is published again, verified.
      source: url of the replica, or "recompute"; "" where there was none.
      error: why not, "" where it is.
      seconds: from `submit` to here.
    """

    key: BlockKey
    ok: bool
    source: str
    error: str
    seconds: float


@dataclasses.dataclass
class _Item:
    key: BlockKey
    future: "Future[Result]"
    replace: bool
    started: float
    replica: int = 0
    raw: Unverified | None = None
    payload: Payload | None = None
    block: Block | None = None
    sealed: SealedBlock | None = None
    source: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)


class Rebuilder:
    """Rebuilds blocks of one store on worker threads; use as a context manager."""

    def __init__(
        self,
        store: Store,
        *,
        replicas: Sequence[Store] = (),
        recompute: Callable[[BlockKey], Block | None] | None = None,
        workers: Mapping[str, int] | None = None,
        depth: int = 8,
    ):
        """Starts the threads.

        Args:
          store: where blocks are made anew.
          replicas: tried first, in order.
          recompute: makes a block from its tokens, or None where it cannot; called in
            the threads of stage "make".
          workers: threads by stage, 1 where not named.
          depth: how many blocks may wait before each stage.

        Raises:
          ValueError: an unknown stage, or no positive number.
        """
        counts = {stage: 1 for stage in STAGES} | dict(workers or {})
        if set(counts) != set(STAGES) or min(*counts.values(), depth) < 1:
            raise ValueError(
                f"workers={workers}, depth={depth}: expected positive numbers for "
                f"some of {', '.join(STAGES)}"
            )
        self._store = store
        self._replicas = tuple(replicas)
        self._recompute = recompute
        self._queues: dict[str, queue.Queue[_Item]] = {
            stage: queue.Queue(depth) for stage in STAGES
        }
        self._under_way: dict[BlockKey, Future[Result]] = {}
        self._guard = threading.Condition()
        self._closed = False
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(stage,), daemon=True)
            for stage, count in counts.items()
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, key: BlockKey, *, replace: bool = False, wait: bool = True
    ) -> "Future[Result]":
        """Rebuilds a block; one that is under way already is not begun twice.

        The future gives a `Result` and raises nothing else; ``cancel()`` takes the
        block out wherever it is, up to its commit.

        Args:
          key: the block.
          replace: also where the store has a sound one; readers get that until the
            new generation is committed.
          wait: for room in the queue.

        Raises:
          queue.Full: no room, with ``wait=False``.
          RuntimeError: the rebuilder was closed.
        """
        with self._guard:
            if self._closed:
                raise RuntimeError("submit: the rebuilder was closed")
            if (known := self._under_way.get(key)) is not None:
                return known
            future: Future[Result] = Future()
            self._under_way[key] = future
        future.add_done_callback(lambda _: self._done(key))
        item = _Item(key, future, replace, time.perf_counter())
        try:
            self._queues["fetch"].put(item, block=wait)
        except queue.Full:
            future.cancel()
            raise
        return future

    def watch(self) -> None:
        """Submits every block that the store puts to quarantine from now on.

        One that finds no room is reported as "rebuild_failed".
        """
        self._store.subscribe(self._on_event)

    def close(self, *, cancel: bool = False) -> None:
        """Ends the threads, after what was submitted or, with ``cancel``, before."""
        with self._guard:
            self._closed = True
            under_way = list(self._under_way.values())
        if cancel:
            for future in under_way:
                future.cancel()
        with self._guard:
            self._guard.wait_for(lambda: not self._under_way)
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Rebuilder":
        return self

    def __exit__(self, kind, *_) -> None:
        self.close(cancel=kind is not None)

    def _on_event(self, event: Event) -> None:
        if event.kind != "quarantined":
            return
        _, group, layout, chain = split_key(event.key)
        try:
            self.submit(BlockKey(group, layout, chain), wait=False)
        except queue.Full:
            self._store.report("rebuild_failed", event.key, "no room in the queue")
        except RuntimeError:
            pass  # closed: nobody watches any more

    def _done(self, key: BlockKey) -> None:
        with self._guard:
            self._under_way.pop(key, None)
            self._guard.notify_all()

    def _work(self, stage: str) -> None:
        work = getattr(self, f"_{stage}")
        after = _AFTER.get(stage)
        while not self._ended.is_set():
            try:
                items = [self._queues[stage].get(timeout=_POLL_SECONDS)]
            except queue.Empty:
                continue
            if after is None:
                items += self._gather(stage)
                self._publish(items)
                continue
            for item in items:
                if item.future.cancelled():
                    continue
                try:
                    work(item)
                except Exception as error:
                    # Whatever a source raises is this block's result, not the end of
                    # the thread.
                    self._fail(item, f"{stage}: {type(error).__name__}: {error}")
                else:
                    self._pass_on(after, item)

    def _gather(self, stage: str) -> list[_Item]:
        items = []
        while len(items) < _COMMIT_AT_ONCE - 1:
            try:
                items.append(self._queues[stage].get_nowait())
            except queue.Empty:
                break
        return items

    def _pass_on(self, stage: str, item: _Item) -> None:
        while not item.future.done():
            try:
                return self._queues[stage].put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def _fetch(self, item: _Item) -> None:
        key = item.key
        while item.replica < len(self._replicas):
            replica = self._replicas[item.replica]
            try:
                item.raw = replica.read_object(key.group, key.layout, key.chain)
            except StoreError as error:
                item.notes.append(f"{replica.url}: {error}")
            if item.raw is not None:
                return
            item.replica += 1

    def _verify(self, item: _Item) -> None:
        while item.raw is not None:
            replica = self._replicas[item.replica]
            payload = replica.check_object(item.raw)
            if payload is not None and payload.header.tokens == _tokens(
                item.key, payload.header.tokens
            ):
                item.payload, item.source, item.raw = payload, replica.url, None
                return
            item.notes.append(f"{replica.url}: failed verification")
            item.raw = None
            item.replica += 1
            self._fetch(item)

    def _make(self, item: _Item) -> None:
        key, payload = item.key, item.payload
        if payload is not None:
            header = payload.header
            item.block = Block(
                key.group,
                key.layout,
                key.chain,
                header.index,
                header.length,
                payload.data,
                header.origin,
                header.alignment,
                header.parent,
                header.tokens,
            )
            return
        item.source = "recompute"
        block = self._recompute(key) if self._recompute is not None else None
        if block is None:
            raise LookupError("; ".join([*item.notes, "no source has the block"]))
        if BlockKey(block.group, block.layout, block.chain) != key:
            raise ValueError(
                f"recompute gave {block.group}/{block.layout}/{block.chain}, expected "
                f"{key.group}/{key.layout}/{key.chain}"
            )
        item.block = block

    def _seal(self, item: _Item) -> None:
        assert item.block is not None
        item.sealed = self._store.seal(item.block)

    def _publish(self, items: list[_Item]) -> None:
        # From here on a block cannot be cancelled; before, nothing of it is written.
        items = [item for item in items if item.future.set_running_or_notify_cancel()]
        for replace in (False, True):
            some = [item for item in items if item.replace == replace]
            sealed = [item.sealed for item in some if item.sealed is not None]
            if not sealed:
                continue
            try:
                self._store.publish_sealed(sealed, replace=replace)
            except Exception as error:
                for item in some:
                    self._fail(item, f"publish: {type(error).__name__}: {error}")
            else:
                for item in some:
                    self._finish(item, True, "")

    def _fail(self, item: _Item, error: str) -> None:
        self._finish(item, False, error)

    def _finish(self, item: _Item, ok: bool, error: str) -> None:
        key = item.key
        name = make_key(self._store.model_id, key.group, key.layout, key.chain)
        kind = "rebuilt" if ok else "rebuild_failed"
        self._store.report(kind, name, error or f"from {item.source}")
        seconds = time.perf_counter() - item.started
        result = Result(key, ok, item.source if ok else "", error, seconds)
        # A block that was cancelled while it failed has its future's end already.
        with contextlib.suppress(InvalidStateError):
            item.future.set_result(result)


def _tokens(key: BlockKey, held: str) -> str:
    return (getattr(key.chain, "tokens", "") or held) if held else held
