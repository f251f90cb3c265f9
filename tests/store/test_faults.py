"""Damage of every kind: found, put right, and never given to a reader."""

import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap

import pytest

import hybrid_attn.store as stores
from hybrid_attn.store import blocks as formats
from hybrid_attn.store.objects import Objects
from tests.store import samples
from tests.store.samples import ENTRIES, LAYOUT, WINDOW, make, open_store, right
from tests.store.storage import Ending


@pytest.fixture
def root(tmp_path):
    """A store of 12 blocks, with a quarantined object and uses on record."""
    with open_store(tmp_path / "s") as store:
        store.publish(make(samples.tokens(20)))
        store.publish(make(samples.tokens(24)))
    return tmp_path / "s"


def published() -> list[stores.Block]:
    return make(samples.tokens(24))


def all_right_or_missing(store, blocks) -> int:
    """How many are there; a wrong byte fails."""
    found = [right(store, block) for block in blocks]
    assert False not in found
    return sum(one is True for one in found)


@pytest.mark.parametrize("how", ["verify", "fetch"])
def test_random_flips_over_all_files(root, tmp_path, how):
    """Every file that a reader can reach, the index and its seal included."""
    blocks = published()
    paths = [path.relative_to(root) for path in samples.files(root)]
    kinds = {path.parts[0] for path in paths}
    assert kinds == {"blocks", "index", "usage", "STORE"}
    chance = random.Random(0)
    trials = [path for path in paths for _ in range(3)]
    for number, path in enumerate(trials):
        copy = tmp_path / f"{how}{number}"
        shutil.copytree(root, copy)
        size = (copy / path).stat().st_size
        samples.flip(copy / path, chance.randrange(8 * size))
        store = open_store(copy)
        if how == "verify":
            report = store.verify()
            seen = not report.sound or store.events
            assert seen, path
            if path.parts[0] == "blocks":
                assert list(report.damaged) == [str(path)]
        here = all_right_or_missing(store, blocks)
        lost = path.parts[0] == "blocks"
        assert here == 12 - lost
        assert (store.stats.quarantined == 1) == lost
        # All of it can be put right, and is sound afterwards.
        store.publish(blocks)
        assert all_right_or_missing(store, blocks) == 12
        assert store.verify().sound
        store.close()
        again = open_store(copy)
        assert again.verify().sound and not again.events
        assert all_right_or_missing(again, blocks) == 12
        shutil.rmtree(copy)


def test_every_bit_of_a_small_object_in_place(tmp_path):
    """Through the store, over header, payload and padding."""
    (block,) = make(samples.tokens(4), groups=[ENTRIES], size=10)
    store = open_store(tmp_path)
    store.publish([block])
    path = samples.object_of(tmp_path, block)
    good = path.read_bytes()
    reader = stores.store.Catalog(Objects(str(tmp_path)), stores.statistics.Recorder())
    reader.open()
    ((key, entry),) = reader.entries.items()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(stores.BlockError):
            reader.read(key, entry)
    path.write_bytes(good)
    assert reader.read(key, entry).data.tobytes() == block.payload


@pytest.mark.parametrize("name", ["manifest.ocdbt", "seal", "d/*"])
@pytest.mark.parametrize("how", ["truncate", "empty", "remove", "extend", "directory"])
def test_a_damaged_index_is_rebuilt_from_headers(root, name, how):
    path = sorted((root / "index").rglob(name.split("/")[0]))[0]
    path = next(path.iterdir()) if name == "d/*" else path
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how != "remove":
        cut = {"truncate": data[:-1], "empty": b"", "extend": data + b"\0"}
        path.write_bytes(cut[how])
    if how == "directory" and name == "seal":
        # Nothing can take its place: reads go on, writes are refused.
        store = open_store(root)
        assert all_right_or_missing(store, published()) == 12
        with pytest.raises(stores.StoreWriteError, match="seal"):
            store.publish(make(samples.tokens(4, 5)))
        assert store.stats.blocks == 12
        return
    with open_store(root) as store:
        assert "index_rebuilt" in {event.kind for event in store.events}
        assert all_right_or_missing(store, published()) == 12
        store.publish(make(samples.tokens(4, 5)))
    again = open_store(root)
    assert not again.events and again.stats.blocks == 14


def test_an_index_damaged_under_an_open_store(root):
    store = open_store(root)
    (root / "index" / "seal").write_bytes(b"")
    store.publish(make(samples.tokens(4, 5)))
    assert all_right_or_missing(store, published()) == 12
    manifest = next((root / "index").rglob("manifest.ocdbt"))
    samples.flip(manifest, 100)
    store.publish(make(samples.tokens(4, 6)))
    with open_store(root) as again:
        assert again.stats.blocks == 16 and not again.events


def test_index_values_carry_their_own_crc_and_key():
    entry = stores.index.Entry(3, 1, 8, 448, "ab" * 16)
    value = stores.index.pack_entry("a/b/c/d", entry)
    assert stores.index.unpack_entry("a/b/c/d", value) == entry
    for bit in range(8 * len(value)):
        bad = bytearray(value)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(stores.IndexDamagedError):
            stores.index.unpack_entry("a/b/c/d", bytes(bad))
    with pytest.raises(stores.IndexDamagedError, match="belongs to"):
        stores.index.unpack_entry("a/b/c/e", value)


def test_swapped_blocks_are_refused(root):
    """Each sound, each in the other's place: no CRC can see it."""
    blocks = published()
    one, two = (samples.object_of(root, block) for block in blocks[:4:2])
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    store = open_store(root)
    assert right(store, blocks[0]) is None
    assert store.stats.failed == {"mismatch": 1}
    report = store.verify()
    assert list(report.foreign) == [str(two.relative_to(root))]
    assert "chain is" in next(iter(report.foreign.values()))
    assert all_right_or_missing(store, blocks) == 10
    assert right(store, blocks[1])


def test_a_stale_generation_is_refused(tmp_path):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    (new,) = make(samples.tokens(4), groups=[ENTRIES], origin="rebuild")
    store = open_store(tmp_path)
    store.publish([block])
    stale = samples.object_of(tmp_path, block).read_bytes()
    store.publish([new], replace=True)
    samples.object_of(tmp_path, new).write_bytes(stale)
    assert right(store, new) is None
    assert store.stats.failed == {"mismatch": 1}
    assert "generation is" in store.events[0].detail


def test_an_older_generation_that_is_sound_is_used(tmp_path):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    store = open_store(tmp_path)
    store.publish([block])
    old = samples.object_of(tmp_path, block)
    kept = old.read_bytes()
    store.publish([block], replace=True)
    samples.flip(samples.object_of(tmp_path, block), 3300)
    old.write_bytes(kept)
    assert right(store, block) and right(store, block)
    assert store.stats.failed == {"crc": 1} and store.stats.misses == 0


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_id", "2e" * 32),
        ("layout", "fedcba9876543210"),
        ("group", WINDOW),
        ("chain", "00" * 16),
    ],
)
def test_a_foreign_fingerprint_is_refused(tmp_path, field, value):
    """A block of another model, layout, group or chain under our name."""
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    store = open_store(tmp_path)
    store.publish([block])
    path = samples.object_of(tmp_path, block)
    generation = int(path.name.split("-")[1], 16)
    fields = {"group": ENTRIES, "layout": LAYOUT, "chain": str(block.chain)}
    model = value if field == "model_id" else samples.MODEL
    fields |= {field: value} if field in fields else {}
    foreign = stores.Block(
        index=0, length=4, payload=b"foreign", origin="prefill", **fields
    )
    path.write_bytes(formats.encode(foreign, generation, model))
    assert right(store, block) is None
    assert f"{field} is {value[:32]!r}" in store.events[0].detail


def test_a_forced_hash_collision_is_refused_and_harms_nobody(tmp_path):
    """Two token chains with one digest: the tokens' own digest tells them apart."""
    (block,) = make([1, 2, 3, 4], groups=[ENTRIES])
    (other,) = make([5, 6, 7, 8], groups=[ENTRIES])
    forged = stores.Boundary(
        block.chain, parent="", tokens=other.chain.tokens, index=0, length=4
    )
    store = open_store(tmp_path)
    store.publish([block])
    assert store.fetch(ENTRIES, LAYOUT, forged) is None
    store.publish([stores.Block(ENTRIES, LAYOUT, forged, 0, 4, b"other", "prefill")])
    assert store.fetch(ENTRIES, LAYOUT, forged) is None
    assert right(store, block)
    assert {event.kind for event in store.events} == {"collision"}
    assert store.stats.quarantined == 0 and store.stats.misses == 2


@pytest.mark.parametrize("how", ["short", "empty", "torn", "missing", "directory"])
def test_an_object_that_is_not_whole(tmp_path, how):
    blocks = make(samples.tokens(8), groups=[ENTRIES])
    store = open_store(tmp_path)
    store.publish(blocks)
    path = samples.object_of(tmp_path, blocks[0])
    data = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how != "missing":
        half = data[: len(data) // 2]
        parts = {"short": data[:-1], "empty": b"", "torn": half + bytes(len(half))}
        path.write_bytes(parts[how])
    assert right(store, blocks[0]) is None and right(store, blocks[1])
    assert not store.contains(ENTRIES, LAYOUT, blocks[0].chain)
    store.publish(blocks)
    assert all_right_or_missing(store, blocks) == 2
    assert right(open_store(tmp_path), blocks[0])


def test_foreign_and_orphaned_objects_are_listed(root):
    (root / "blocks" / "notes.txt").write_text("?")
    (root / "todo").write_text("?")
    block = published()[0]
    path = samples.object_of(root, block)
    generation = 1 << 32
    orphan = path.with_name(f"{block.chain}-{generation:016x}")
    orphan.write_bytes(formats.encode(block, generation, samples.MODEL))
    store = open_store(root)
    report = store.verify()
    assert set(report.foreign) == {"blocks/notes.txt", "todo"} and not report.sound
    assert report.orphaned == (str(orphan.relative_to(root)),)
    assert (report.checked, report.damaged, report.missing) == (13, {}, ())
    assert store.gc(10**9).orphans == 1 and not orphan.exists()
    assert store.verify(sample=3).checked == 3
    assert (root / "todo").exists()


class Failing(Ending):
    """A full disk: nothing is written any more, and deleting still works."""

    def __init__(self, objects: Objects, after: int):
        super().__init__(objects, self._full, after)

    @staticmethod
    def _full() -> None:
        raise stores.StoreWriteError("No space left on device")

    def delete_many(self, keys) -> None:
        self._objects.delete_many(keys)


def test_a_publish_that_fails_at_any_write_leaves_nothing(tmp_path):
    """12 objects, the commit and the seal; the commit may be the last that works."""
    blocks = published()
    old = make(samples.tokens(8, seed=9))
    for after in range(15):
        root = tmp_path / str(after)
        with open_store(root) as store:
            store.publish(old)
        box = []

        def wrap(objects, box=box):
            box.append(Failing(objects, 10**9))
            return box[0]

        store = open_store(root, wrap=wrap)
        box[0].left = after
        if after == 14:
            store.publish(blocks)
            continue
        with pytest.raises(stores.StoreWriteError, match="No space left"):
            store.publish(blocks)
        for view in (store, open_store(root)):
            assert all_right_or_missing(view, old) == 4
            assert all_right_or_missing(view, blocks) == 0
            assert view.stats.blocks == 4
        # With space again the same call works.
        box[0].left = 10**9
        store.publish(blocks)
        assert all_right_or_missing(open_store(root), blocks) == 12


NO_SPACE = """
    import resource, sys
    from tests.store.samples import *
    store = open_store(sys.argv[1])
    small, large = make(tokens(8)), make(tokens(8, 1), size=20_000)
    store.publish(small)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        store.publish(large)
    except stores.StoreWriteError as error:
        print(error)
    assert all(right(store, block) for block in small)
    assert not any(right(store, block) for block in large)
    store.publish(make(tokens(8, 2)))
"""


def run(program: str, *arguments, **options) -> subprocess.CompletedProcess:
    """A program of its own, from this checkout."""
    from pathlib import Path

    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


def test_the_system_refusing_a_write(tmp_path):
    """EFBIG, by a limit on file sizes, comes the same way as ENOSPC and EDQUOT."""
    assert resource.RLIMIT_FSIZE is not None
    done = run(NO_SPACE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout and "blocks/" in done.stdout
    store = open_store(tmp_path)
    assert store.stats.blocks == 8 and not store.events
    assert store.verify().sound and not store.verify().orphaned
    assert not list(tmp_path.rglob("*.__lock")) or store.gc(10**9)
    assert not list(tmp_path.rglob("*.__lock"))
