import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressed_attention import api, xla
from pallas_kernels.compressed_attention.reference import reference
from pallas_kernels.compressed_attention.xla import compressed_attention
from pallas_kernels.softmax import finish

# (batch, queries, entries, heads, key heads, block): one block, several, a short last.
SHAPES = [
    (2, 1, 1, 4, 1, 512),
    (2, 3, 7, 4, 2, 512),
    (3, 5, 16, 4, 1, 8),
    (2, 4, 19, 4, 4, 8),
    (1, 33, 9, 2, 1, 8),
]


def _visible(b: int, t: int, e: int) -> np.ndarray:
    """0, 1, the end, and numbers that are no multiple of a block."""
    choice = np.array([0, 1, e, min(e, 9), e // 2])
    return choice[(np.arange(b)[:, None] * 2 + np.arange(t)) % 5].astype(np.int32)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("b", "t", "e", "n", "k", "block"), SHAPES)
def test_reference(b, t, e, n, k, block, static, normal, agrees, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", block)
    query, key, value = normal(b, t, n, 8), normal(b, e, k, 8), normal(b, e, k, 8)
    visible = _visible(b, t, e)
    want = reference(query, key, value, visible, scale=0.4)
    arrays = (jnp.asarray(x) for x in (query, key, value, visible))
    agrees(compressed_attention(*arrays, scale=0.4, static=static), want)
    shared = jnp.asarray(key)
    got = compressed_attention(
        jnp.asarray(query),
        shared,
        shared,
        jnp.asarray(visible),
        scale=0.4,
        static=static,
    )
    agrees(got, reference(query, key, key, visible, scale=0.4))


@pytest.mark.parametrize("block", [512, 8])
def test_visible_from(block, normal, agrees, monkeypatch):
    """A range of entries, empty and whole blocks outside it included."""
    monkeypatch.setattr(xla, "BLOCK", block)
    query, key, value = normal(2, 6, 4, 8), normal(2, 19, 2, 8), normal(2, 19, 2, 8)
    first = np.array([[0, 3, 9, 9, 17, 19], [0, 0, 8, 12, 15, 18]], np.int32)
    visible = np.array([[0, 3, 10, 19, 19, 19], [19, 1, 16, 13, 18, 19]], np.int32)
    want = reference(query, key, value, visible, scale=0.4, visible_from=first)
    arrays = [jnp.asarray(x) for x in (query, key, value, visible)]
    for static in (True, False):
        got = compressed_attention(
            *arrays, scale=0.4, static=static, visible_from=jnp.asarray(first)
        )
        agrees(got, want)


@pytest.mark.parametrize("block", [512, 8])
def test_poisoned_padding(block, normal, agrees, monkeypatch):
    """NaN in entries that no query of a row sees reaches nothing."""
    monkeypatch.setattr(xla, "BLOCK", block)
    query, key, value = normal(4, 3, 4, 8), normal(4, 19, 2, 8), normal(4, 19, 2, 8)
    used = np.array([0, 1, 9, 19])
    visible = np.stack([np.maximum(used - 1, 0), used, used // 2], axis=1)
    want = reference(query, key, value, visible, scale=0.4)
    dead = np.arange(19) >= used[:, None]
    key[dead], value[dead] = np.nan, np.nan
    arrays = (jnp.asarray(x) for x in (query, key, value, visible))
    agrees(compressed_attention(*arrays, scale=0.4, static=False), want)


def test_all_rows_masked(normal):
    nan = jnp.full((2, 19, 1, 8), jnp.nan)
    query = jnp.asarray(normal(2, 3, 4, 8))
    partial = compressed_attention(
        query, nan, nan, jnp.zeros((2, 3), jnp.int32), scale=1.0, static=False
    )
    np.testing.assert_array_equal(np.asarray(finish(partial, jnp.zeros(4))), 0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("block", "mass_block"),
    [(512, 4), (512, 32), (8, 4), (8, 3), (8, 8), (8, 16), (8, 20), (8, 11)],
)
def test_mass(block, mass_block, static, normal, agrees, per_block, monkeypatch):
    """Blocks that divide neither the entries nor what is read at a time; padding."""
    monkeypatch.setattr(xla, "BLOCK", block)
    query, key, value = normal(2, 4, 4, 8), normal(2, 19, 2, 8), normal(2, 19, 2, 8)
    visible = np.array([[0, 1, 9, 18], [3, 17, 19, 0]], np.int32)
    first = np.array([[0, 1, 2, 9], [0, 0, 18, 0]], np.int32)
    want = reference(query, key, value, visible, scale=1.5, visible_from=first)
    key[0, 18:], value[0, 18:] = np.nan, np.nan
    arrays = [jnp.asarray(x) for x in (query, key, value, visible)]
    options = {"visible_from": jnp.asarray(first), "mass_block": mass_block}
    partial, mass = compressed_attention(*arrays, scale=1.5, static=static, **options)
    agrees(partial, want)
    np.testing.assert_allclose(
        np.asarray(mass), per_block(want[2], mass_block), atol=1e-6
    )


def test_no_entries(normal):
    query, none = jnp.asarray(normal(2, 3, 4, 8)), jnp.zeros((2, 0, 1, 8))
    partial, mass = compressed_attention(
        query,
        none,
        none,
        jnp.zeros((2, 3), jnp.int32),
        scale=1.0,
        static=False,
        mass_block=4,
    )
    np.testing.assert_array_equal(np.asarray(finish(partial, None)), 0)
    assert mass.shape == (2, 3, 0)


def test_mass_block_is_checked(normal):
    x = jnp.asarray(normal(1, 1, 1, 8))
    with pytest.raises(ValueError, match="mass_block 0: expected at least 1"):
        api.compressed_attention(
            x,
            x,
            x,
            jnp.ones((1, 1), jnp.int32),
            scale=1.0,
            static=False,
            mass_block=0,
        )


@pytest.mark.parametrize("block", [512, 8])
def test_gradient(block, normal, monkeypatch):
    """Blocks, and a query that sees nothing, against the plain softmax's gradient."""
    monkeypatch.setattr(xla, "BLOCK", block)
    query, key, value = (jnp.asarray(normal(1, s, 2, 4)) for s in (3, 19, 19))
    visible = jnp.array([[0, 5, 19]])

    def blocked(*arrays):
        out = compressed_attention(*arrays, visible, scale=0.5, static=True)
        return jnp.sum(jnp.sin(finish(out, jnp.zeros(2))))

    def plain(query, key, value):
        logits = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
        weights = jnp.where(
            jnp.arange(19) < visible[:, None, :, None], jnp.exp(logits), 0
        )
        weights = weights / (1 + weights.sum(-1, keepdims=True))
        return jnp.sum(jnp.sin(jnp.einsum("bnts,bsnh->btnh", weights, value)))

    got = jax.grad(blocked, argnums=(0, 1, 2))(query, key, value)
    want = jax.grad(plain, argnums=(0, 1, 2))(query, key, value)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-6)
