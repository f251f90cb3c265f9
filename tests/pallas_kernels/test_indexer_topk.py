import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_topk import xla
from pallas_kernels.indexer_topk.reference import reference_choice, reference_scores
from pallas_kernels.indexer_topk.xla import indexer_scores, indexer_topk

SHAPES = [(1, 1, 1, 1), (2, 5, 7, 3), (3, 4, 20, 6), (2, 3, 19, 8), (1, 2, 5, 9)]


def _visible(b: int, t: int, e: int) -> np.ndarray:
    choice = np.array([0, 1, e, min(e, 9), e // 2])
    return choice[(np.arange(b)[:, None] * 2 + np.arange(t)) % 5].astype(np.int32)


def _check(query, weight, key, visible, k):
    index, best = indexer_topk(*map(jnp.asarray, (query, weight, key, visible)), k=k)
    index, best = np.asarray(index), np.asarray(best)
    want = reference_choice(reference_scores(query, weight, key), visible, k)
    width = min(k, key.shape[2])
    assert index.shape == best.shape == (*visible.shape, width)
    np.testing.assert_array_equal(index, want[..., :width])
    assert (want[..., width:] == -1).all()
    np.testing.assert_array_equal(best > -np.inf, index >= 0)
    return index, best


@pytest.mark.parametrize("block", [4096, 8])
@pytest.mark.parametrize(("b", "t", "e", "k"), SHAPES)
def test_reference(b, t, e, k, block, normal, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", block)
    query, weight, key = normal(b, t, 3, 8), normal(b, t, 3), normal(b, 8, e)
    scores = reference_scores(query, weight, key)
    got = indexer_scores(*map(jnp.asarray, (query, weight, key)))
    np.testing.assert_allclose(np.asarray(got), scores, atol=2e-5)
    index, best = _check(query, weight, key, _visible(b, t, e), k)
    picked = np.take_along_axis(scores, np.maximum(index, 0), axis=-1)
    np.testing.assert_allclose(best[index >= 0], picked[index >= 0], atol=2e-5)


@pytest.mark.parametrize("block", [4096, 8])
def test_ties_go_to_the_lowest_index(block, monkeypatch):
    """Across blocks too; -0.0 is no less than 0.0; k beyond what is visible."""
    monkeypatch.setattr(xla, "BLOCK", block)
    rng = np.random.default_rng(0)
    # Small whole numbers: scores are exact and many are equal.
    query = rng.integers(-1, 2, (3, 4, 2, 3)).astype(np.float32)
    weight = rng.integers(-1, 2, (3, 4, 2)).astype(np.float32)
    key = rng.integers(-1, 2, (3, 3, 21)).astype(np.float32)
    for k in (1, 5, 8):
        index, best = _check(query, weight, key, _visible(3, 4, 21), k)
    equal = best[..., 1:] == best[..., :-1]
    assert (equal & (index[..., 1:] >= 0)).any()
    assert (np.diff(index)[equal & (index[..., 1:] >= 0)] > 0).all()
    weight[:] = -1.0  # relu(negative) · -1 is -0.0
    key[:] = 0
    index, _ = _check(query, weight, key, np.full((3, 4), 21, np.int32), 8)
    assert (index == np.arange(8)).all()


@pytest.mark.parametrize("block", [4096, 8])
def test_poisoned_padding(block, normal, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", block)
    query, weight, key = normal(4, 2, 3, 8), normal(4, 2, 3), normal(4, 8, 19)
    used = np.array([0, 1, 9, 19], np.int32)
    visible = np.stack([used, used // 2], axis=1)
    want = reference_choice(reference_scores(query, weight, key), visible, 4)
    key[np.broadcast_to(np.arange(19) >= used[:, None, None], key.shape)] = np.nan
    index, best = indexer_topk(*map(jnp.asarray, (query, weight, key, visible)), k=4)
    np.testing.assert_array_equal(np.asarray(index), want)
    assert not np.isnan(np.asarray(best)).any()


@pytest.mark.parametrize("narrow", [256, 0])
@pytest.mark.parametrize("collected", [16, 1 << 22])
def test_one_query(narrow, collected, normal, monkeypatch):
    """The shortest prefix that holds what is visible, or groups of blocks."""
    for name, value in (
        ("DECODE_BLOCK", 4),
        ("_NARROW", narrow),
        ("_COLLECTED", collected),
    ):
        monkeypatch.setattr(xla, name, value)
    query, weight, key = normal(2, 1, 3, 8), normal(2, 1, 3), normal(2, 8, 131)
    choose = jax.jit(indexer_topk, static_argnames="k")
    for most in (0, 1, 9, 33, 34, 131):
        visible = np.array([[most], [most // 2]], np.int32)
        hidden = np.arange(131) >= visible[:, :, None]
        poisoned = np.where(hidden, np.nan, key)
        index, best = choose(*map(jnp.asarray, (query, weight, poisoned, visible)), k=5)
        want = reference_choice(reference_scores(query, weight, key), visible, 5)
        np.testing.assert_array_equal(np.asarray(index), want)
        np.testing.assert_array_equal(np.asarray(best) > -np.inf, want >= 0)


def test_all_rows_masked(normal):
    index, best = indexer_topk(
        jnp.asarray(normal(2, 3, 2, 8)),
        jnp.asarray(normal(2, 3, 2)),
        jnp.full((2, 8, 6), jnp.nan),
        jnp.zeros((2, 3), jnp.int32),
        k=4,
    )
    assert (np.asarray(index) == -1).all()
    assert (np.asarray(best) == -np.inf).all()
