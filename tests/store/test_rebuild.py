"""The rebuilding pipeline: sources in order, readers meanwhile, cancel anywhere."""

import queue
import threading

import pytest

import hybrid_attn.store as stores
from hybrid_attn.store.rebuild import STAGES, BlockKey, Rebuilder
from tests.store import samples
from tests.store.samples import ENTRIES, LAYOUT, make, open_store, right


def key_of(block: stores.Block) -> BlockKey:
    return BlockKey(block.group, block.layout, block.chain)


def damage(root, store, blocks) -> None:
    """Flips a bit in each object and lets the store find it."""
    for block in blocks:
        samples.flip(samples.object_of(root, block), 3500)
    assert not store.verify().sound


def test_replicas_are_tried_in_order_and_recomputing_last(tmp_path):
    blocks = make(samples.tokens(16), groups=[ENTRIES])
    near, far = open_store(tmp_path / "near"), open_store(tmp_path / "far")
    near.publish(blocks[:2])
    far.publish(blocks[:3])
    samples.flip(samples.object_of(tmp_path / "near", blocks[1]), 3500)
    store = open_store(tmp_path / "store")
    made = []

    def recompute(key):
        made.append(key)
        (block,) = [b for b in blocks if b.chain == key.chain]
        return block

    with Rebuilder(store, replicas=[near, far], recompute=recompute) as rebuilder:
        futures = [rebuilder.submit(key_of(block)) for block in blocks]
        results = [future.result(20) for future in futures]
    assert all(result.ok and result.seconds > 0 for result in results)
    sources = [result.source for result in results]
    assert sources == [near.url, far.url, far.url, "recompute"]
    assert made == [key_of(blocks[3])]
    assert all(right(store, block) for block in blocks)
    assert near.stats.quarantined == 1 and store.stats.rebuilt == 4


def test_quarantined_blocks_are_rebuilt_as_they_are_found(tmp_path):
    blocks = make(samples.tokens(80))
    store = open_store(tmp_path)
    store.publish(blocks)
    by_key = {key_of(block): block for block in blocks}
    with Rebuilder(store, recompute=by_key.get, depth=64) as rebuilder:
        rebuilder.watch()
        damage(tmp_path, store, blocks)
    assert all(right(store, block) for block in blocks)
    assert store.stats.quarantined == store.stats.rebuilt == 40
    assert store.verify().sound


def test_a_failure_is_reported_and_harms_no_other(tmp_path):
    blocks = make(samples.tokens(16), groups=[ENTRIES])
    store = open_store(tmp_path)

    def recompute(key):
        if key.chain == blocks[0].chain:
            raise ArithmeticError("no such thing")
        if key.chain == blocks[1].chain:
            return None
        return blocks[3]

    with Rebuilder(store, recompute=recompute) as rebuilder:
        results = [rebuilder.submit(key_of(b)).result(20) for b in blocks]
    assert [result.ok for result in results] == [False, False, False, True]
    assert results[0].error == "make: ArithmeticError: no such thing"
    assert "no source has the block" in results[1].error
    assert "expected " + ENTRIES in results[2].error
    failed = [event for event in store.events if event.kind == "rebuild_failed"]
    assert len(failed) == 3 and store.stats.blocks == 1


def test_readers_keep_the_old_generation_until_the_new_one_is_there(tmp_path):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    (new,) = make(samples.tokens(4), groups=[ENTRIES], origin="rebuild")
    store = open_store(tmp_path)
    store.publish([block])
    inside, go_on = threading.Event(), threading.Event()

    def recompute(_):
        inside.set()
        assert go_on.wait(20)
        return new

    with Rebuilder(store, recompute=recompute) as rebuilder:
        future = rebuilder.submit(key_of(block), replace=True)
        assert inside.wait(20)
        assert rebuilder.submit(key_of(block)) is future
        old = store.fetch(ENTRIES, LAYOUT, block.chain)
        assert old is not None and old.header.origin == "prefill"
        go_on.set()
        assert future.result(20).ok
    found = store.fetch(ENTRIES, LAYOUT, block.chain)
    assert found is not None and found.header.origin == "rebuild"
    assert store.stats.misses == 0


@pytest.mark.parametrize("stage", STAGES)
def test_cancelling_in_any_stage_leaves_no_half_state(tmp_path, stage):
    """The block is held up inside the stage, or before it, while it is cancelled."""
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    replica = open_store(tmp_path / "replica")
    replica.publish([block])
    store = open_store(tmp_path / "store")
    inside, go_on = threading.Event(), threading.Event()

    class Held(Rebuilder):
        pass

    def hold(self, item):
        inside.set()
        assert go_on.wait(20)
        getattr(Rebuilder, f"_{stage}")(self, item)

    setattr(Held, f"_{stage}", hold)
    with Held(store, replicas=[replica]) as rebuilder:
        future = rebuilder.submit(key_of(block))
        assert inside.wait(20)
        cancelled = future.cancel()
        go_on.set()
    assert cancelled and future.cancelled()
    assert store.stats.published == 0 and not store.events
    report = store.verify()
    assert report.sound and report.checked == 0 and not report.orphaned
    with Rebuilder(store, replicas=[replica]) as rebuilder:
        assert rebuilder.submit(key_of(block)).result(20).ok


def test_queues_are_bounded(tmp_path):
    blocks = make(samples.tokens(80), groups=[ENTRIES])
    store = open_store(tmp_path)
    go_on = threading.Event()
    by_key = {key_of(block): block for block in blocks}

    def recompute(key):
        assert go_on.wait(20)
        return by_key[key]

    with Rebuilder(store, recompute=recompute, depth=1) as rebuilder:
        futures = []
        with pytest.raises(queue.Full):
            for block in blocks:
                futures.append(rebuilder.submit(key_of(block), wait=False))
                threading.Event().wait(0.02)
        assert 3 <= len(futures) <= 7
        go_on.set()
        assert all(future.result(20).ok for future in futures)
    assert store.stats.blocks == len(futures)


def test_closing_with_cancel_ends_at_once(tmp_path):
    blocks = make(samples.tokens(40), groups=[ENTRIES])
    store = open_store(tmp_path)
    go_on = threading.Event()
    rebuilder = Rebuilder(store, recompute=lambda _: go_on.wait(20) and None)
    futures = [rebuilder.submit(key_of(block)) for block in blocks[:6]]
    threading.Timer(0.1, go_on.set).start()
    rebuilder.close(cancel=True)
    assert all(future.cancelled() for future in futures) and not store.stats.blocks
    with pytest.raises(RuntimeError, match="closed"):
        rebuilder.submit(key_of(blocks[0]))
    with pytest.raises(ValueError, match="expected positive numbers"):
        Rebuilder(store, workers={"cook": 1})
