"""Paged entries: a few device slots give what all entries at once give."""

import jax.numpy as jnp
import numpy as np
import pytest

import hybrid_attn as ha
from hybrid_attn.cache.layout import layout_of
from hybrid_attn.serving.paging import (
    BlockPager,
    PagingError,
    attend_all,
    attend_chosen,
)
from hybrid_attn.testing import small_config
from pallas_kernels.compressed_attention.xla import compressed_attention
from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention.xla import sparse_attention

BLOCKS, HEADS = 6, 4


@pytest.fixture
def case():
    """(group, payloads by key, all entries [1, e, k, h])."""
    config = small_config("csa")
    layout = layout_of(ha.init_cache(config, 1, 16))
    group = next(g for g in layout.family("history") if g.name.startswith("entries"))
    generator = np.random.default_rng(0)
    (array,) = group.arrays
    blocks = generator.normal(size=(BLOCKS, *array.shape)).astype(np.float32)
    payloads = {f"block{i}": group.pack([block]) for i, block in enumerate(blocks)}
    return group, payloads, jnp.asarray(blocks.reshape(1, -1, *array.shape[1:]))


def _query(entries, t):
    shape = (1, t, HEADS, entries.shape[-1])
    generator = np.random.default_rng(1)
    return jnp.asarray(generator.normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("slots", [1, 2, 4, 6])
def test_every_entry(case, slots):
    group, payloads, entries = case
    pager = BlockPager(group, payloads.get, slots=slots)
    query = _query(entries, 3)
    visible = jnp.asarray([[0, 7, 21]], jnp.int32)
    want = compressed_attention(
        query, entries, entries, visible, scale=0.3, static=False
    )
    got = attend_all(pager, list(payloads), query, visible, arrays=(0, 0), scale=0.3)
    np.testing.assert_allclose(finish(got, None), finish(want, None), atol=2e-6)
    size = group.arrays[0].shape[0]
    # Blocks beyond the last visible entry are left where they are.
    assert pager.counts["misses"] == -(-21 // size)
    assert pager.device_bytes == slots * group.nbytes


def test_chosen_entries(case):
    group, payloads, entries = case
    pager = BlockPager(group, payloads.get, slots=3)
    query = _query(entries, 2)
    for chosen in ([[0, 9, 8], [1, 9, -1]], [[-1] * 3] * 2, [[20, 21, 22], [23, 1, 0]]):
        index = jnp.asarray([chosen], jnp.int32)
        want = sparse_attention(query, entries, entries, index, scale=0.3)
        got = attend_chosen(
            pager, list(payloads), query, index, arrays=(0, 0), scale=0.3
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_old_pages_stay_valid(case):
    group, payloads, _ = case
    pager = BlockPager(group, payloads.get, slots=2)
    first = pager.read(["block0", "block1"])
    before = [np.array(array) for array in first.arrays]
    pager.read(["block2", "block3"])
    assert pager.counts == {"misses": 4, "evictions": 2, "hits": 0}
    for array, old in zip(first.arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)
    pager.read(["block3"])
    pager.read(["block4"])  # block2 goes: block3 was read since
    pager.read(["block3"])
    assert pager.counts["hits"] == 2


def test_lost_blocks_and_too_many(case):
    group, payloads, _ = case
    pager = BlockPager(group, payloads.get, slots=2)
    pager.read(["block0"])
    with pytest.raises(PagingError, match="3 blocks at once, 2 slots"):
        pager.read(["block0", "block1", "block2"])
    with pytest.raises(PagingError, match="block9 is lost"):
        pager.read(["block9"])
    pager.forget(["block0", "nobody"])
    pager.read(["block0"])
    assert pager.counts["misses"] == 2
    with pytest.raises(ValueError, match="slots=0"):
        BlockPager(group, payloads.get, slots=0)
