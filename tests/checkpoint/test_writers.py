"""Fencing, failing storage, retention, and death at every write in turn."""

import errno
import itertools
import shutil

import pytest

from hybrid_attn import checkpoint
from hybrid_attn.checkpoint import layout
from hybrid_attn.checkpoint.files import Files
from hybrid_attn.checkpoint.retention import last_sequences
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session, same

CALLS = (
    "create",
    "write",
    "sync",
    "rename",
    "truncate",
    "unlink",
    "make_directory",
    "remove_tree",
)


class Killed(BaseException):
    """Ends a writer in the test's own process, where it stands."""


class Faulty(Files):
    """Raises at the k-th writing call, a write half done; counts them all."""

    def __init__(self, at: int | None = None, error: BaseException | None = None):
        self.at, self.error, self.calls = at, error or Killed(), 0

    def _point(self) -> bool:
        self.calls += 1
        return self.at is not None and self.calls > self.at

    def write(self, descriptor, data) -> None:
        if self._point():
            super().write(descriptor, memoryview(data).cast("B")[: len(data) // 2])
            raise self.error
        super().write(descriptor, data)


def _wrapped(name):
    def call(self, *args):
        if self._point():
            raise self.error
        return getattr(Files, name)(self, *args)

    return call


for _name in set(CALLS) - {"write"}:
    setattr(Faulty, _name, _wrapped(_name))


def _restore(path):
    return checkpoint.restore(path, CONFIG, model_id=MODEL_ID)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a checkpoint to go on with, its session, the session one token later)."""
    path, session = tmp_path_factory.mktemp("made"), Session()
    session.read(30, 12)
    with session.checkpointer(path) as writer:
        session.observe(writer)
        session.read(1, 1)
        session.observe(writer)
    later = session.copy()
    later.read(1, 1)
    return path, session, later


def _go_on(path, later, files, operation):
    """Opens, restores and writes; True once the write is acknowledged."""
    with later.checkpointer(path, files=files, keep=1) as writer:
        if operation == "reset":
            later.observe(writer)
        else:
            writer.restore(CONFIG)
            later.observe(writer)
            if operation == "snapshot":
                writer.snapshot(later.caches, later.tokens)
    return True


@pytest.mark.parametrize(
    "operation", ["record", "snapshot", pytest.param("reset", marks=pytest.mark.slow)]
)
def test_death_at_each_write(made, tmp_path, operation):
    """After restart the old state or the new; never less than was acknowledged."""
    path, session, later = made
    versions = set()
    # Orbax does not write the same number of files each time: until one run survives.
    for at in itertools.count():
        root = tmp_path / str(at)
        shutil.copytree(path, root)
        try:
            _go_on(root, later, Faulty(at), operation)
        except Killed:
            pass
        else:
            same(_restore(root).caches["main"], later.cache)
            break
        restored = _restore(root)
        assert restored.report.lost == 0
        new = restored.caches["main"].length[0] == later.cache.length[0]
        same(restored.caches["main"], (later if new else session).cache)
        versions.add(bool(new))
        if at % 5 == 0:
            # And the next writer goes on as if nothing had been.
            _go_on(root, later, None, "record")
            same(_restore(root).caches["main"], later.cache)
        shutil.rmtree(root)
    assert at > 8 and versions == {False, True}


def test_a_full_disk_is_reported_and_survived(made, tmp_path):
    path, _, later = made
    shutil.copytree(path, tmp_path / "c")
    files = Faulty(error=OSError(errno.ENOSPC, "no space"))
    with later.checkpointer(tmp_path / "c", files=files) as writer:
        writer.restore(CONFIG)
        for offset in range(3):
            files.at = files.calls + offset
            with pytest.raises(checkpoint.CheckpointWriteError, match="no space"):
                later.observe(writer)
        files.at = None
        later.observe(writer)
    same(_restore(tmp_path / "c").caches["main"], later.cache)


def test_an_older_writer_is_fenced_off(made, tmp_path):
    path, session, later = made
    shutil.copytree(path, tmp_path / "c")
    old = session.checkpointer(tmp_path / "c")
    old.restore(CONFIG)
    with session.checkpointer(tmp_path / "c") as new:
        new.restore(CONFIG)
        with pytest.raises(checkpoint.FencedError, match="epoch"):
            later.observe(old)
        with pytest.raises(checkpoint.FencedError, match="epoch"):
            old.snapshot(later.caches, later.tokens)
        later.observe(new)
    old.close()
    same(_restore(tmp_path / "c").caches["main"], later.cache)


def test_retention(tmp_path):
    session = Session()
    session.read(5, 5)
    with session.checkpointer(
        tmp_path, every_tokens=2, keep=2, keep_every=4, background=False
    ) as writer:
        for _ in range(20):
            session.observe(writer)
            session.read(1, 1)
        session.observe(writer)
        assert writer.statistics.snapshots == 11
    found = [
        layout.unseal(p / "manifest.json")["number"]
        for p in layout.snapshots(tmp_path).values()
    ]
    assert found == [4, 8, 10, 11]
    # The log still leads from the older of the two newest to the end.
    newest = list(layout.snapshots(tmp_path).values())
    shutil.rmtree(newest[-1])
    restored = _restore(tmp_path)
    assert restored.report.snapshot == newest[-2].name
    same(restored.caches["main"], session.cache)
    assert len(layout.logs(tmp_path)) <= 3


def test_last_sequences_follow_epochs():
    name = layout.Name
    names = [name(1, 1), name(6, 1), name(4, 2), name(9, 2)]
    assert last_sequences(names) == {
        name(1, 1): 3,
        name(6, 1): 3,
        name(4, 2): 8,
        name(9, 2): None,
    }


@pytest.mark.parametrize(
    "options", [{"every_tokens": 6}, {"every_bytes": 5_000}, {"every_seconds": 1e-4}]
)
def test_intervals(tmp_path, options):
    session = Session()
    session.read(5, 5)
    with session.checkpointer(tmp_path, **options) as writer:
        for _ in range(12):
            session.observe(writer)
            session.read(1, 0)
        writer.wait()
        assert writer.statistics.snapshots >= 2
        assert writer.statistics.records == 11


def test_without_a_log_snapshots_alone_count(tmp_path):
    session = Session()
    session.read(5, 5)
    with session.checkpointer(tmp_path, log_tokens=None, every_tokens=4) as writer:
        for _ in range(5):
            session.observe(writer)
            session.read(1, 0)
        assert writer.statistics.records == 0
    restored = _restore(tmp_path)
    assert restored.caches["main"].length.tolist() == [9, 5]
