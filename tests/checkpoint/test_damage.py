"""Damage is found, named and survived: older states and longer logs, never a guess."""

import itertools
import shutil

import numpy as np
import pytest

from hybrid_attn import checkpoint
from hybrid_attn.checkpoint import frames, layout
from hybrid_attn.checkpoint.log import read_chain
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session, model, same


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(directory with two snapshots and two logs, sessions by sequence number)."""
    path, session, states = tmp_path_factory.mktemp("made"), Session(), {}
    session.read(18, 5)
    with session.checkpointer(path, every_tokens=3, background=False) as writer:
        for _ in range(6):
            states[session.observe(writer)] = session.copy()
            session.read(1, 1)
    assert len(layout.snapshots(path)) == 2 == len(layout.logs(path))
    return path, states


@pytest.fixture
def copied(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "c")
    return tmp_path / "c", made[1]


def _restore(path, **options):
    return checkpoint.restore(path, CONFIG, model_id=MODEL_ID, **options)


def _run(path):
    return layout.unseal(path / "EPOCH")["run"]


def _last_log(path):
    return list(layout.logs(path).values())[-1]


def test_a_log_cut_anywhere_loses_only_what_is_cut(copied):
    path, states = copied
    log = _last_log(path)
    data = log.read_bytes()
    ends = [f.end for f in frames.scan(data).frames]
    last = max(states)
    for size in range(ends[-3], len(data)):
        log.write_bytes(data[:size])
        chain = read_chain(path, _run(path))
        reached = last - 2 + sum(size >= end for end in ends[-2:])
        assert max(chain.records) == reached
        if size in (ends[-3], ends[-2] - 1, ends[-2], len(data) - 1):
            restored = _restore(path)
            assert restored.report.sequence == reached
            same(restored.caches["main"], states[reached].cache)
            assert not restored.report.refused
    # Opening for writing cuts the rest of a record off.
    with Session().checkpointer(path):
        assert log.stat().st_size == ends[-2]


def test_a_flip_of_any_byte_of_a_log_is_found(copied):
    path, states = copied
    log = _last_log(path)
    data = bytearray(log.read_bytes())
    whole = frames.scan(bytes(data)).frames
    spans = [(a.end, b.end) for a, b in itertools.pairwise(whole)]
    spans = [(0, whole[0].end), *spans]
    for at in range(len(data)):
        data[at] ^= 1 << (at % 8)
        scan = frames.scan(bytes(data))
        hit = next(i for i, (a, b) in enumerate(spans) if a <= at < b)
        sound = {f.end for f in scan.frames if f.sound}
        assert sound == {b for i, (_, b) in enumerate(spans) if i != hit}, at
        assert scan.damage or scan.torn
        data[at] ^= 1 << (at % 8)
    for at in range(7, len(data), len(data) // 9):
        data[at] ^= 4
        log.write_bytes(data)
        restored = _restore(path)
        same(restored.caches["main"], states[restored.report.sequence].cache)
        assert restored.report.refused and log.name in restored.report.refused[0]
        data[at] ^= 4


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
def test_each_file_of_a_snapshot(copied, how):
    """The older snapshot and the longer log lead to the same bits."""
    path, states = copied
    newest = list(layout.snapshots(path).values())[-1]
    seen = set()
    for file in sorted(f for f in newest.rglob("*") if f.is_file()):
        data = file.read_bytes()
        if not data:
            continue
        if how == "delete":
            file.unlink()
        elif how == "truncate":
            file.write_bytes(data[: len(data) // 2])
        else:
            wrong = bytearray(data)
            wrong[len(data) // 2] ^= 16
            file.write_bytes(wrong)
        restored = _restore(path)
        assert restored.report.sequence == max(states)
        same(restored.caches["main"], states[max(states)].cache)
        assert restored.report.lost == 0
        if restored.report.snapshot != newest.name:
            assert any(newest.name in text for text in restored.report.refused)
            seen.add(file.name)
        if how != "flip":
            assert checkpoint.latest(path).path != newest
        file.write_bytes(data)
    assert {"manifest.json", "tokens.bin"} <= seen
    assert _restore(path).report.snapshot == newest.name


def test_flips_of_array_bytes(copied):
    path, states = copied
    newest = list(layout.snapshots(path).values())[-1]
    file = max((newest / "state").rglob("*"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    refused = 0
    for at in np.linspace(0, len(data) - 1, 25).astype(int):
        data[at] ^= 1
        file.write_bytes(data)
        restored = _restore(path)
        same(restored.caches["main"], states[max(states)].cache)
        refused += restored.report.snapshot != newest.name
        data[at] ^= 1
    # The file has bytes that no array is read from; they harm nothing.
    assert refused > 5


def test_states_lost_from_the_log_are_read_again_or_reported(copied):
    """Token ids outlast the states of a record: they have a CRC of their own."""
    path, states = copied
    log = _last_log(path)
    data = bytearray(log.read_bytes())
    last = frames.scan(bytes(data)).frames[-2]
    data[last.end - 5] ^= 1
    log.write_bytes(data)
    state = states[max(states)]
    restored = _restore(path)
    assert (restored.report.lost, restored.report.recomputed) == (4, 0)
    restored = _restore(path, model=model())
    assert (restored.report.lost, restored.report.recomputed) == (0, 4)
    cache = restored.caches["main"]
    assert cache.length.tolist() == state.cache.length.tolist()
    for ours, theirs in zip(restored.tokens["main"], state.rows, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # What goes on from it stands in the log, and the damaged records are void.
    session = state.copy()
    with session.checkpointer(path) as writer:
        session.continue_from(writer.restore(CONFIG, model=model()))
        session.observe(writer)
    again = _restore(path)
    same(again.caches["main"], session.cache)
    assert again.report.recomputed == again.report.lost == 0


def test_with_no_sound_snapshot_tokens_are_read_again(copied):
    path, states = copied
    for snapshot in layout.snapshots(path).values():
        file = max((snapshot / "state").rglob("*"), key=lambda f: f.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(checkpoint.NothingToRestoreError, match="bytes, expected"):
        _restore(path)
    state = states[max(states)]
    restored = _restore(
        path,
        like={"main": state.cache},
        model=model(),
        tokens={"main": state.rows},
    )
    assert restored.report.recomputed == state.held
    assert restored.caches["main"].length.tolist() == state.cache.length.tolist()


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(checkpoint.NothingToRestoreError, match="none at all"):
        _restore(tmp_path / "none")


def test_a_foreign_log_or_snapshot_is_refused(copied, tmp_path):
    path, states = copied
    session = Session(seed=5)
    session.read(18, 5)
    with session.checkpointer(tmp_path / "other") as writer:
        for _ in range(6):
            session.observe(writer)
            session.read(1, 1)
    _last_log(path).write_bytes(_last_log(tmp_path / "other").read_bytes())
    restored = _restore(path)
    same(restored.caches["main"], states[restored.report.sequence].cache)
    assert "another checkpoint" in restored.report.refused[0]
    newest = list(layout.snapshots(path).values())[-1]
    shutil.rmtree(newest)
    other = next(iter(layout.snapshots(tmp_path / "other").values()))
    shutil.copytree(other, newest)
    restored = _restore(path)
    same(restored.caches["main"], states[restored.report.sequence].cache)
    assert any(newest.name in text for text in restored.report.refused)
