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

from tests.store import samples
from tests.store.samples import make, open_store, right

_IDS = samples.tokens(16)
# Three chains: one branches off the first after two blocks, one stands alone.
CHAINS = [
    make(_IDS),
    make(np.concatenate([_IDS[:8], _IDS[8:] + 1])),
    make(samples.tokens(12, 1)),
]
BLOCKS = [block for blocks in CHAINS for block in blocks]
BY_KEY = {(block.group, str(block.chain)): block for block in BLOCKS}
PARENT = {str(block.chain): block.parent for block in BLOCKS}


class Crash(BaseException):
    """The process is gone: not even cleaning up happens any more."""


class Crashing:
    """Storage that ends at its k-th writing call, and does nothing after it."""

    def __init__(self, objects):
        self._objects = objects
        self.left = 10**9

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def write_many(self, values) -> None:
        for key, value in values.items():
            self._count()
            self._objects.write_many({key: value})

    def delete_many(self, keys) -> None:
        for key in keys:
            self._count()
            self._objects.delete_many([key])

    def commit(self, transaction, prefix) -> None:
        self._count()
        self._objects.commit(transaction, prefix)


def ancestors(digest: str) -> set[str]:
    found = set()
    while digest:
        found.add(digest)
        digest = PARENT[digest]
    return found


class StoreMachine(RuleBasedStateMachine):
    """``held`` is the model: what was acknowledged and not taken away again."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.held: set[tuple[str, str]] = set()
        self.pins: list[str] = []

    def teardown(self):
        shutil.rmtree(self.root)

    @initialize()
    def start(self):
        def wrap(objects):
            self.io = Crashing(objects)
            return self.io

        self.store = open_store(self.root / "s", wrap=wrap)

    def present(self) -> set[tuple[str, str]]:
        found = {key: right(self.store, block) for key, block in BY_KEY.items()}
        assert False not in found.values(), "wrong bytes"
        return {key for key, ok in found.items() if ok}

    def restart(self):
        self.pins = []
        self.start()

    def crash(self, after: int, work) -> bool:
        """Does the work, or as much of it as ``after`` writes; restarts if it died."""
        self.io.left = after
        try:
            work()
        except Crash:
            self.restart()
            return True
        self.io.left = 10**9
        return False

    after = st.one_of(st.just(10**9), st.integers(0, 12))
    chains = st.integers(0, len(CHAINS) - 1)

    @rule(chain=chains, upto=st.integers(1, 8), after=after, replace=st.booleans())
    def publish(self, chain, upto, after, replace):
        blocks = CHAINS[chain][:upto]
        keys = {(b.group, str(b.chain)) for b in blocks}
        new = keys - self.held
        died = self.crash(after, lambda: self.store.publish(blocks, replace=replace))
        here = self.present()
        assert self.held <= here
        if died:
            assert new <= here or not new & here, "half of a call is visible"
        else:
            assert new <= here
        self.held = here

    @rule(key=st.sampled_from(sorted(BY_KEY)))
    def fetch(self, key):
        block = BY_KEY[key]
        found = right(self.store, block)
        assert (found is True) == (key in self.held)
        assert self.store.contains(key[0], samples.LAYOUT, key[1]) == (key in self.held)

    @rule(key=st.sampled_from(sorted(BY_KEY)))
    def pin(self, key):
        self.store.pin([key[1]])
        self.pins.append(key[1])

    @rule()
    def unpin(self):
        if self.pins:
            self.store.unpin([self.pins.pop()])

    @rule(budget=st.integers(0, 12_000), after=after)
    def evict(self, budget, after):
        pins = set().union(*(ancestors(digest) for digest in self.pins))
        died = self.crash(after, lambda: self.store.gc(budget))
        here = self.present()
        assert here <= self.held
        assert {key for key in self.held if key[1] in pins} <= here
        gone = {key[1] for key in self.held - here}
        for key in here:
            assert not gone & ancestors(key[1]), "stands on what went"
        total = self.store.stats.bytes_on_disk
        assert died or total <= budget or all(key[1] in pins for key in here)
        self.held = here

    @rule(key=st.sampled_from(sorted(BY_KEY)), after=after)
    def forget(self, key, after):
        doomed = {k for k in BY_KEY if key[1] in ancestors(k[1])}
        died = self.crash(after, lambda: self.store.forget([key[1]]))
        here = self.present()
        assert self.held - doomed <= here <= self.held
        assert died or not doomed & here
        self.held = here

    @rule(key=st.sampled_from(sorted(BY_KEY)), bit=st.integers(0, 3500))
    def damage(self, key, bit):
        if key in self.held:
            path = samples.object_of(self.root / "s", BY_KEY[key])
            samples.flip(path, bit)
            self.held.discard(key)
            if bit % 2:
                assert right(self.store, BY_KEY[key]) is None
            else:
                report = self.store.verify()
                assert list(report.damaged) == [str(path.relative_to(self.root / "s"))]

    @rule(name=st.sampled_from(["seal", "manifest.ocdbt"]), bit=st.integers(0, 900))
    def damage_index(self, name, bit):
        path = next((self.root / "s" / "index").rglob(name), None)
        if path is not None:
            samples.flip(path, bit % (8 * path.stat().st_size))

    @rule()
    def reopen(self):
        self.store.close()
        self.restart()

    @rule()
    def rebuild_index(self):
        self.store.rebuild_index()

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
