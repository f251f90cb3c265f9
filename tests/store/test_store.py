"""Publishing and fetching: what comes back, who wins, who may look."""

import stat

import numpy as np
import pytest

import hybrid_attn as ha
import hybrid_attn.store as stores
from tests.store import samples
from tests.store.samples import ENTRIES, LAYOUT, MODEL, WINDOW, make, open_store, right


@pytest.fixture(params=["file", "path", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        return f"memory://{tmp_path.name}/store/"
    return f"file://{tmp_path}/new/store" if request.param == "file" else tmp_path / "s"


def test_what_was_published_comes_back(url):
    blocks = make(samples.tokens(40))
    with open_store(url) as store:
        assert store.fetch(ENTRIES, LAYOUT, blocks[0].chain) is None
        store.publish(blocks)
        for block in blocks:
            assert store.contains(block.group, LAYOUT, block.chain)
            found = store.fetch(block.group, LAYOUT, block.chain)
            assert found is not None
            assert found.data.tobytes() == block.payload
            assert found.data.dtype == np.uint8
            header = found.header
            assert (header.index, header.length) == (block.index, block.length)
            assert (header.parent, header.origin) == (block.parent, "prefill")
        stats = store.stats
        assert (stats.hits, stats.misses, stats.published) == (20, 1, 20)
        assert stats.blocks == 20 and stats.bytes_on_disk == stats.published_bytes
        assert stats.verified_bytes == stats.bytes_on_disk and not stats.failed
        assert store.verify().sound
    again = open_store(url)
    assert all(right(again, block) for block in blocks)
    assert not again.events


def test_a_store_opened_earlier_sees_later_blocks_after_refresh(url):
    first, second = open_store(url), open_store(url)
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    second.publish([block])
    assert not first.contains(ENTRIES, LAYOUT, block.chain)
    assert first.refresh() and not first.refresh()
    assert right(first, block)


def test_the_first_writer_wins(url):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    (other,) = make(samples.tokens(4), groups=[ENTRIES], size=90, origin="decode")
    first, second = open_store(url), open_store(url)
    first.publish([block, other])
    second.publish([other])
    for store in (first, second):
        found = store.fetch(ENTRIES, LAYOUT, block.chain)
        assert found is not None and found.header.origin == "prefill"
    assert first.stats.published == 1 and second.stats.published == 0
    assert second.stats.kept == 1
    # The object of the one that lost is gone again.
    assert first.verify().orphaned == ()


def test_a_new_generation_replaces_on_request(url):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    store, reader = open_store(url), open_store(url)
    store.publish([block])
    reader.refresh()
    (new,) = make(samples.tokens(4), groups=[ENTRIES], origin="rebuild")
    store.publish([new], replace=True)
    for one in (store, reader):
        found = one.fetch(ENTRIES, LAYOUT, block.chain)
        assert found is not None and found.header.origin == "rebuild"
        assert found.header.generation >> 32 == 1
    assert store.stats.blocks == 1 and store.verify().orphaned == ()


def test_a_damaged_block_that_is_there_does_not_keep_out_a_new_one(tmp_path):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    with open_store(tmp_path) as store:
        store.publish([block])
    samples.flip(samples.object_of(tmp_path, block), 3300)
    store = open_store(tmp_path)
    store.publish([block])
    assert right(store, block)
    assert store.stats.quarantined == 1 and store.stats.published == 1


def test_other_models_layouts_and_salts_never_hit(url):
    ids = samples.tokens(4)
    store = open_store(url)
    store.publish(make(ids))
    other = stores.open(str(url), model_id="2e" * 32)
    own = make(ids)[0].chain
    assert not other.contains(ENTRIES, LAYOUT, own)
    assert other.fetch(ENTRIES, LAYOUT, own) is None
    assert other.chain(LAYOUT, ids, 4)[0] != own
    assert store.chain(LAYOUT, ids, 4) == (own,)
    salted = open_store(url, salt="tenant")
    assert salted.fetch(ENTRIES, LAYOUT, salted.chain(LAYOUT, ids, 4)[0]) is None
    assert store.fetch(ENTRIES, "fedcba9876543210", own) is None
    assert store.fetch("hca.entries", LAYOUT, own) is None
    # Nothing of another's was harmed by looking.
    assert right(store, make(ids)[0]) and not store.events and not other.events


def test_layouts_may_share_a_chain(url):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    twin = stores.Block(
        ENTRIES, "fedcba9876543210", block.chain, 0, 4, b"other", "prefill"
    )
    store = open_store(url)
    store.publish([block, twin])
    store.rebuild_index()
    assert right(store, block) and right(store, twin)


def test_only_the_owner_may_look(tmp_path):
    root = tmp_path / "store"
    root.mkdir(mode=0o755)
    with open_store(root) as store:
        store.publish(make(samples.tokens(12)))
        store.publish(make(samples.tokens(8, seed=1)))
        store.gc(10_000)
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(stores.NotAStoreError, match=r"'thesis\.txt' and no STORE"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(stores.NotAStoreError, match="expected a directory of our own"):
        open_store(tmp_path / "thesis.txt")
    with pytest.raises(stores.NotAStoreError, match="expected a path or a url"):
        open_store("nonsense://x/")


def test_another_format_version_is_refused(tmp_path):
    open_store(tmp_path).close()
    body = b"hybrid_attn store 9\n"
    crc = b"crc32c %08x\n" % stores.blocks.crc32c(body)
    (tmp_path / "STORE").write_bytes(body + crc)
    with pytest.raises(stores.NotAStoreError, match=r"store 9.*expected .*store 1"):
        open_store(tmp_path)


def test_a_closed_store_says_so(url):
    store = open_store(url)
    store.close()
    with pytest.raises(stores.StoreClosedError, match="was closed"):
        store.publish([])
    with pytest.raises(stores.StoreClosedError):
        store.fetch(ENTRIES, LAYOUT, "0" * 32)


def test_names_are_checked_before_anything_is_read(url):
    store = open_store(url)
    with pytest.raises(ValueError, match="chain='x'"):
        store.fetch(ENTRIES, LAYOUT, "x")
    with pytest.raises(ValueError, match="group='a/b'"):
        store.contains("a/b", LAYOUT, "0" * 32)


def test_object_stores_are_urls_of_tensorstore():
    for url in ("gs://some-bucket/prefix/", "s3://some-bucket/prefix/"):
        objects = stores.objects.Objects(url)
        assert objects.url.startswith(url[:17]) and not objects.excludes_writers


def test_a_replica_answers_for_what_was_lost(tmp_path):
    blocks = make(samples.tokens(12))
    replica = open_store(tmp_path / "b")
    replica.publish(blocks)
    store = open_store(tmp_path / "a", replicas=[replica])
    store.publish(blocks)
    samples.flip(samples.object_of(tmp_path / "a", blocks[2]), 3300)
    assert right(store, blocks[2])
    assert store.stats.failed == {"crc": 1}


def test_the_index_stays_small(tmp_path):
    """Each commit adds files; past some hundred they are copied into one."""
    store = open_store(tmp_path)
    for seed in range(150):
        store.publish(make(samples.tokens(4, seed), groups=[ENTRIES]))
    assert len(samples.files(tmp_path / "index")) < 300
    before = store.stats.index_bytes
    store.gc(10**9)
    assert store.stats.index_bytes < before / 3
    assert len(samples.files(tmp_path / "index")) < 10
    again = open_store(tmp_path)
    assert again.stats.blocks == 150 and not again.events


def test_it_is_exported():
    assert ha.store is stores and ha.store.Store is stores.Store
    assert MODEL and WINDOW
