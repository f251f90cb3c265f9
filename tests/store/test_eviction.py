"""Eviction, pins, forgetting."""

import numpy as np
import pytest

import hybrid_attn.store as stores
from hybrid_attn.store.eviction import plan
from hybrid_attn.store.index import Entry, make_key
from tests.store import samples
from tests.store.samples import ENTRIES, WINDOW, open_store, right


@pytest.fixture
def url(tmp_path):
    return tmp_path / "store"


def make(ids, **fields):
    """Blocks of one size each, whatever their headers hold."""
    return samples.make(ids, alignment=1024, **fields)


def here(store, blocks) -> list[int]:
    """Indices of the boundaries that are still there, whole."""
    found = [right(store, block) for block in blocks]
    assert False not in found
    return sorted({b.index for b, ok in zip(blocks, found, strict=True) if ok})


def test_the_end_of_a_chain_goes_first(url):
    blocks = make(samples.tokens(20))
    store = open_store(url)
    store.publish(blocks)
    size = store.stats.bytes_on_disk // 10
    for left in (4, 2, 0):
        report = store.gc(2 * left * size)
        assert here(store, blocks) == list(range(left))
        assert report.bytes_after == 2 * left * size == store.stats.bytes_on_disk
    assert store.stats.evicted == 10 and store.stats.evicted_bytes == 10 * size
    assert len(samples.files(url / "blocks")) == 0


def test_the_chain_used_longest_ago_goes_first(url):
    old, used, new = (make(samples.tokens(12, seed)) for seed in range(3))
    store = open_store(url)
    for blocks in (old, used, new):
        store.publish(blocks)
    assert right(store, used[-1])
    store.close()
    # Uses are remembered over a restart.
    store = open_store(url)
    size = store.stats.bytes_on_disk // 9
    store.gc(5 * size)
    assert (here(store, old), here(store, used)) == ([], [0, 1, 2])
    assert here(store, new) == [0, 1]


def test_a_shared_start_stays_as_long_as_any_end(url):
    ids = samples.tokens(16)
    other = np.concatenate([ids[:8], ids[8:] + 1])
    store = open_store(url)
    store.publish(make(ids))
    store.publish(make(other))
    size = store.stats.bytes_on_disk // 6
    store.gc(4 * size)
    assert here(store, make(ids)) == [0, 1]
    assert here(store, make(other)) == [0, 1, 2, 3]


def test_pinned_chains_stay_with_all_they_stand_on(url):
    blocks, others = make(samples.tokens(16)), make(samples.tokens(16, 1))
    store = open_store(url)
    store.publish(blocks)
    store.publish(others)
    with store.pin([blocks[4].chain]):
        assert store.gc(0).bytes_after > 0
        assert (here(store, blocks), here(store, others)) == ([0, 1, 2], [])
    store.pin([blocks[0].chain])
    store.pin([blocks[0].chain])
    store.unpin([blocks[0].chain])
    store.gc(0)
    assert here(store, blocks) == [0]
    store.unpin([blocks[0].chain])
    with pytest.raises(ValueError, match="expected pinned chains"):
        store.unpin([blocks[0].chain])
    store.gc(0)
    assert here(store, blocks) == []
    with pytest.raises(ValueError, match="budget_bytes=-1"):
        store.gc(-1)


def test_what_lost_its_start_goes_before_all():
    """Nobody can use it; least of all is it worth a sound chain's block."""

    def key(digit):
        return make_key(samples.MODEL, ENTRIES, samples.LAYOUT, digit * 32)

    entries = {
        key("a"): Entry(0, 0, 4, 10, ""),
        key("b"): Entry(0, 1, 8, 10, "a" * 32),
        key("d"): Entry(0, 3, 16, 10, "c" * 32),
        key("e"): Entry(0, 4, 20, 10, "d" * 32),
    }
    used = {key("d"): 9.0, key("e"): 9.0}
    assert plan(entries, used, set(), 20) == [key("e"), key("d")]
    assert plan(entries, used, set(), 40) == []
    assert plan(entries, used, set(), 0)[2:] == [key("b"), key("a")]
    assert plan(entries, used, {"e" * 32}, 0) == [key("b"), key("a")]


def test_plans_against_brute_force():
    """Random forests: the rest fits, nothing stands on what went, pins stay."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        entries, parents, keys = {}, [], []
        for number in range(int(rng.integers(1, 12))):
            parent = int(rng.integers(-1, number)) if number else -1
            digest = f"{number:032x}"
            key = make_key(samples.MODEL, ENTRIES, samples.LAYOUT, digest)
            depth = 0 if parent < 0 else entries[keys[parent]].index + 1
            before = "" if parent < 0 else f"{parent:032x}"
            if parent == 0:
                before = f"{0:031x}f"  # a parent that is not there
            size = int(rng.integers(1, 5))
            entries[key] = Entry(0, max(depth, bool(before)), 4, size, before)
            parents.append(parent if parent != 0 else -1)
            keys.append(key)
        pinned = {f"{n:032x}" for n in range(len(keys)) if rng.random() < 0.1}
        used = {key: float(rng.integers(5)) for key in keys}
        budget = int(rng.integers(0, 30))
        gone = plan(entries, used, pinned, budget)
        assert len(set(gone)) == len(gone)
        left = [key for key in keys if key not in gone]
        for number, parent in enumerate(parents):
            if keys[number] in left and parent >= 0:
                assert keys[parent] in left
            if f"{number:032x}" in pinned:
                assert keys[number] in left
        total = sum(entries[key].size for key in left)
        held = {n for n in range(len(keys)) if f"{n:032x}" in pinned}
        for number in sorted(held):
            while (number := parents[number]) >= 0:
                held.add(number)
        assert total <= budget or len(left) == len(held)
        # No more than needed: without the last boundary the rest would not have fit.
        if gone:
            assert total + entries[gone[-1]].size > budget


def test_forgetting_takes_all_descendants_everywhere(url):
    ids = samples.tokens(16)
    branch = np.concatenate([ids[:8], ids[8:] + 1])
    blocks, others = make(ids), make(branch)
    store = open_store(url)
    store.publish(blocks)
    store.publish(others)
    store.publish([blocks[2]], replace=True)
    kept = make(samples.tokens(8, 3))
    store.publish(kept)
    # One of the descendants lies in quarantine, one is an orphan, one was half
    # written by a writer that died.
    samples.flip(samples.object_of(url, blocks[6]), 3500)
    assert right(store, blocks[6]) is None
    path = samples.object_of(url, blocks[7])
    store.rebuild_index()
    (path.parent / f"{path.name}.__lock").write_bytes(b"half of it")
    count = store.forget([blocks[2].chain])
    assert count == 10
    assert here(store, blocks) == here(store, others) == [0]
    assert here(store, kept) == [0, 1]
    doomed = {str(block.chain) for block in [*blocks, *others] if block.index}
    for path in samples.files(url, locks=True):
        assert not any(digest in path.name for digest in doomed)
        data = path.read_bytes()
        for digest in doomed:
            assert digest.encode() not in data, path
    again = open_store(url)
    assert here(again, blocks) == [0] and not again.events
    assert again.rebuild_index() == 6
    assert store.forget([blocks[2].chain]) == 0


def test_forgetting_takes_orphans_by_their_headers(url):
    """A chain's middle is not in the index any more; its end still stands behind it."""
    blocks = make(samples.tokens(16), groups=[ENTRIES])
    store = open_store(url)
    store.publish(blocks)
    kept = [samples.object_of(url, block) for block in blocks]
    data = [path.read_bytes() for path in kept]
    store.gc(0)
    for path, content in zip(kept, data, strict=True):
        path.write_bytes(content)
    samples.flip(kept[2], 8 * 40)
    assert store.forget([blocks[1].chain]) == 3
    assert [path.exists() for path in kept] == [True, False, False, False]


def test_a_tenant_cannot_find_anothers_blocks(url):
    ids = samples.tokens(8)
    store = open_store(url)
    store.publish(make(ids, salt="one"))
    for salt in (None, "", "two"):
        assert not any(right(store, block) for block in make(ids, salt=salt))
    assert WINDOW in {block.group for block in make(ids)}
    assert isinstance(store.stats, stores.Stats)
