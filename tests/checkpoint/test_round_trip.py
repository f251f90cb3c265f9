"""What was recorded comes back bit for bit, and goes on as if nothing had stopped."""

import numpy as np
import pytest

import hybrid_attn as ha
from hybrid_attn import checkpoint
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session, model, same


def test_save_and_restore(tmp_path):
    session = Session()
    session.read(37, 21)
    saved = checkpoint.save(
        tmp_path, session.caches, session.tokens, {"seed": 3}, model_id=MODEL_ID
    )
    assert checkpoint.latest(tmp_path) == saved
    assert saved.lengths == {"main": [37, 21]}
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], session.cache)
    assert restored.info == {"seed": 3}
    assert restored.report.from_snapshot == 58
    assert not restored.report.lost and not restored.report.refused


@pytest.mark.parametrize("stride", [1, 3, 16])
def test_log_brings_the_snapshot_to_the_last_record(tmp_path, stride):
    """Single tokens over boundaries, in records of one, few and many tokens."""
    session = Session()
    session.read(13, 6)
    with session.checkpointer(tmp_path, log_tokens=stride) as writer:
        session.observe(writer)
        recorded = session.copy()
        for i in range(40):
            session.read(1, 1 if i % 3 else 0)
            if session.observe(writer, info=i) > recorded.sequence:
                recorded = session.copy()
        assert writer.statistics.snapshots == 1
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], recorded.cache)
    assert restored.report.sequence == recorded.sequence
    assert restored.report.from_log == recorded.held - 19
    for row, ids in enumerate(restored.tokens["main"]):
        np.testing.assert_array_equal(ids, recorded.rows[row])


def test_going_on_gives_the_bits_of_never_having_stopped(tmp_path):
    session = Session()
    session.read(30, 9)
    with session.checkpointer(tmp_path) as writer:
        session.observe(writer)
        for _ in range(11):
            session.read(1, 1)
            session.observe(writer)
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    prompt = np.array([[5], [6]], np.int32)
    ours = ha.generate(model(), restored.caches["main"], prompt, 12)
    theirs = ha.generate(model(), session.cache, prompt, 12)
    np.testing.assert_array_equal(ours[0], theirs[0])
    same(ours[2], theirs[2])


def test_a_reopened_checkpoint_goes_on_with_the_log(tmp_path):
    session = Session()
    session.read(20, 20)
    with session.checkpointer(tmp_path) as writer:
        session.observe(writer)
        session.read(1, 1)
        session.observe(writer)
    for _ in range(3):
        with session.checkpointer(tmp_path) as writer:
            restored = writer.restore(CONFIG)
            session.continue_from(restored)
            session.read(1, 1)
            session.observe(writer)
            assert writer.statistics.snapshots == 0
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], session.cache)
    assert (restored.report.from_snapshot, restored.report.from_log) == (40, 8)


def test_rewinds_are_recorded(tmp_path):
    """Drafts that are taken back leave other bytes behind in rings and entries."""
    session = Session()
    session.read(26, 30)
    with session.checkpointer(tmp_path) as writer:
        session.observe(writer)
        for kept in (1, 0, 4, 7, 2, 5):
            session.read(7, 7)
            session.rewind(7 - kept)
            session.read(1, 1)
            session.observe(writer)
            restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
            same(restored.caches["main"], session.cache)


@pytest.mark.parametrize("tokens", ["other", "same"])
def test_a_row_that_another_sequence_takes_is_written_anew(tmp_path, tokens):
    session = Session()
    session.read(40, 33)
    with session.checkpointer(tmp_path) as writer:
        session.observe(writer)
        session.replace_row(1, seed=9 if tokens == "other" else 0, length=38)
        session.observe(writer)
        assert writer.statistics.snapshots == 1
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], session.cache)


def test_a_grown_cache_gets_a_snapshot(tmp_path):
    session = Session()
    session.read(20, 20)
    with session.checkpointer(tmp_path) as writer:
        session.observe(writer)
        session.cache = ha.transforms.grow(session.cache)
        session.observe(writer)
        assert writer.statistics.snapshots == 2
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], session.cache)


def test_pending_tokens_and_several_caches(tmp_path):
    one, two = Session(), Session(seed=4)
    one.read(10, 12)
    two.read(7, 3)
    caches = {"a": one.cache, "b": two.cache}
    tokens = {
        "a": [np.append(row, 17) for row in one.rows],
        "b": two.rows,
    }
    with one.checkpointer(tmp_path) as writer:
        writer.observe(caches, tokens)
        two.read(1, 0)
        writer.observe(caches | {"b": two.cache}, tokens | {"b": two.rows})
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["a"], one.cache)
    same(restored.caches["b"], two.cache)
    assert restored.tokens["a"][1].tolist() == [*one.rows[1].tolist(), 17]


def test_bfloat16_and_donated_caches(tmp_path):
    session = Session(dtypes="bfloat16", donate=True)
    session.read(33, 12)
    with session.checkpointer(tmp_path, every_tokens=4) as writer:
        for _ in range(12):
            session.observe(writer)
            session.read(1, 1)
        session.observe(writer)
    restored = checkpoint.restore(tmp_path, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], session.cache)
