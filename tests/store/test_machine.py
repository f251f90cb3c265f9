"""Any order of publish, fetch, pin, evict, forget, damage, crash and restart."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hybrid_attn.store.blocks import Block, object_name
from tests.store import samples
from tests.store.samples import make, open_store, right
from tests.store.storage import Ending

_IDS = samples.tokens(16)
# Three chains: one branches off the first after two blocks, one stands alone.
CHAINS = [
    make(_IDS),
    make(np.concatenate([_IDS[:8], _IDS[8:] + 1])),
    make(samples.tokens(12, 1)),
]
BLOCKS = [block for blocks in CHAINS for block in blocks]
type Key = tuple[str, str]
BY_KEY: dict[Key, Block] = {(block.group, str(block.chain)): block for block in BLOCKS}
PARENT = {str(block.chain): block.parent or "" for block in BLOCKS}


class Crash(BaseException):
    """The process is gone: not even cleaning up happens any more."""


def crash() -> None:
    raise Crash


def ancestors(digest: str) -> set[str]:
    found = set()
    while digest:
        found.add(digest)
        digest = PARENT[digest]
    return found


def connected(digest: str, present: set[str]) -> set[str]:
    """The digest and those before it, as far as they are present without a gap."""
    found = set()
    while digest in present:
        found.add(digest)
        digest = PARENT[digest]
    return found


class StoreMachine(RuleBasedStateMachine):
    """A store against a model.

    ``held`` is what was acknowledged and not taken away again; all of it must be
    there. ``loose`` are keys of which a crash may have left sound objects that no key
    names: these may come back, when the index is rebuilt, and nothing else may.
    """

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.held: set[Key] = set()
        self.loose: set[Key] = set()
        self.pins: list[str] = []
        self.index_damaged = False

    def teardown(self):
        shutil.rmtree(self.root)

    @initialize()
    def start(self):
        def wrap(objects):
            self.io = Ending(objects, crash)
            return self.io

        self.store = open_store(self.root / "s", wrap=wrap)
        self.pins = []
        self.index_damaged = False

    def look(self, *, least: set[Key]) -> set[Key]:
        """What is there now: the least that must be, and what may be besides."""
        found = {key: right(self.store, block) for key, block in BY_KEY.items()}
        assert False not in found.values(), "wrong bytes"
        here = {key for key, ok in found.items() if ok}
        assert least <= here, "lost"
        assert here <= self.held | self.loose | least, "nobody published this"
        return here

    def crash(self, after: int, work) -> bool:
        """Does the work, or as much of it as ``after`` writes; restarts if it died."""
        self.io.left = after
        try:
            work()
        except Crash:
            self.start()
            return True
        self.io.left = 10**9
        return False

    after = st.one_of(st.just(10**9), st.integers(0, 12))
    chains = st.integers(0, len(CHAINS) - 1)
    keys = st.sampled_from(sorted(BY_KEY))

    @rule(chain=chains, upto=st.integers(1, 8), after=after, replace=st.booleans())
    def publish(self, chain, upto, after, replace):
        blocks = CHAINS[chain][:upto]
        wanted = {(b.group, str(b.chain)) for b in blocks}
        new = wanted - self.held - self.loose
        damaged = self.index_damaged
        if self.crash(after, lambda: self.store.publish(blocks, replace=replace)):
            self.loose |= wanted
            here = self.look(least=self.held)
            whole = new <= here or not new & here
            assert whole or damaged, "half of a call is visible"
        else:
            here = self.look(least=self.held | wanted)
        self.held = here

    @rule(key=keys)
    def fetch(self, key):
        found = right(self.store, BY_KEY[key])
        assert found is not False
        assert found or key not in self.held
        assert not found or key in self.held | self.loose
        listed = self.store.contains(key[0], samples.LAYOUT, key[1])
        assert listed == (found is True)

    @rule(key=keys)
    def pin(self, key):
        self.store.pin([key[1]])
        self.pins.append(key[1])

    @rule()
    def unpin(self):
        if self.pins:
            self.store.unpin([self.pins.pop()])

    @rule(budget=st.integers(0, 12_000), after=after)
    def evict(self, budget, after):
        before = {key[1] for key in self.look(least=self.held)}
        pins = set().union(*(connected(digest, before) for digest in self.pins))
        died = self.crash(after, lambda: self.store.gc(budget))
        kept = {key for key in self.held if key[1] in pins}
        here = self.look(least=kept)
        total = self.store.stats.bytes_on_disk
        if died:
            self.loose |= self.held
        else:
            gone = before - {key[1] for key in here}
            for key in here:
                assert not gone & connected(key[1], before), "stands on what went"
            assert total <= budget or all(key[1] in pins for key in here)
            self.loose = set()
        self.held = here

    @rule(key=keys, after=after)
    def forget(self, key, after):
        doomed = {k for k in BY_KEY if key[1] in ancestors(k[1])}
        died = self.crash(after, lambda: self.store.forget([key[1]]))
        if died:
            self.loose |= self.held & doomed
        here = self.look(least=self.held - doomed)
        if not died:
            known = {k for k in doomed if k in self.held}
            assert not known & here
        self.held = here

    @rule(key=keys, bit=st.integers(0, 3500))
    def damage(self, key, bit):
        block = BY_KEY[key]
        if key not in self.held:
            return
        payload = self.store.fetch(block.group, block.layout, block.chain)
        assert payload is not None
        generation = payload.header.generation
        name = object_name(block.group, block.chain, generation)
        samples.flip(self.root / "s" / name, bit)
        if bit % 2:
            report = self.store.verify()
            assert name in report.damaged
        found = right(self.store, block)
        # An older sound generation may take its place.
        assert found is None or (found and key in self.loose)
        if not found:
            self.held.discard(key)

    @rule(name=st.sampled_from(["seal", "manifest.ocdbt"]), bit=st.integers(0, 900))
    def damage_index(self, name, bit):
        path = next((self.root / "s" / "index").rglob(name), None)
        if path is not None:
            samples.flip(path, bit % (8 * path.stat().st_size))
            self.index_damaged = True

    @rule()
    def reopen(self):
        self.store.close()
        self.start()
        self.held = self.look(least=self.held)

    @rule()
    def rebuild_index(self):
        self.store.rebuild_index()
        self.index_damaged = False
        self.held = self.look(least=self.held)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "store"):
            assert self.store.stats.blocks >= len(self.held)


def run(examples: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_events():
    run(50)


@pytest.mark.slow
def test_any_order_of_many_events():
    run(500)
