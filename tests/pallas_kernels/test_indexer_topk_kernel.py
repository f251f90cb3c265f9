"""The indexer's kernels: interpreted, lowered, refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.indexer_topk import mosaic_gpu
from pallas_kernels.indexer_topk.api import indexer_scores, indexer_topk
from pallas_kernels.indexer_topk.mosaic_gpu import Config
from pallas_kernels.indexer_topk.reference import reference_choice, reference_scores
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower


@pytest.fixture
def draw(normal):
    """draw(b, t, heads, channels, entries): query, weight and key."""

    def arrays(b, t, heads, channels, entries):
        query = jnp.asarray(normal(b, t, heads, channels), jnp.bfloat16)
        weight = jnp.asarray(normal(b, t, heads))
        return query, weight, jnp.asarray(normal(b, channels, entries), jnp.bfloat16)

    return arrays


def _choose(query, weight, key, visible, k, config=None):
    """Interpreted, and what the reference chooses from finite keys."""
    want_scores = reference_scores(query, weight, jnp.nan_to_num(key))
    want = reference_choice(want_scores, visible, k)
    with interpreted():
        run = jax.jit(
            functools.partial(mosaic_gpu.indexer_topk, k=k, config=config)
            if config
            else functools.partial(indexer_topk, k=k, implementation="mosaic_gpu")
        )
        index, best = run(query, weight, key, jnp.asarray(visible))
        index, best = np.asarray(index), np.asarray(best)
    np.testing.assert_array_equal(index, want[..., : index.shape[2]])
    picked = np.take_along_axis(want_scores, np.maximum(index, 0), axis=2)
    picked[index < 0] = -np.inf
    np.testing.assert_allclose(best, picked, atol=2e-5)
    return index


@pytest.mark.parametrize(
    ("entries", "visible", "config"),
    [
        # Entries that fill no block, a row that sees nothing, one that sees one.
        (400, [[400, 130], [0, 1]], Config(queries=2, splits=1, stages=2)),
        (768, [[767, 257], [0, 500]], Config(queries=1, splits=2, stages=2)),
        (528, [[528, 300], [256, 9]], Config(block=256, queries=2, splits=2, stages=2)),
    ],
)
def test_topk(entries, visible, config, draw):
    """What no query of a row sees holds NaN."""
    query, weight, key = draw(2, 2, 3, 16, entries)
    visible = np.array(visible, np.int32)
    hidden = np.arange(entries) >= visible.max(1)[:, None, None]
    key = jnp.where(hidden, jnp.nan, key)
    _choose(query, weight, key, visible, 5, config)


def test_batch_shapes(draw):
    """By name, with the default configuration; fewer entries than a block; none."""
    for b, t, entries in ((1, 1, 272), (2, 3, 256), (2, 1, 64), (1, 1, 0), (0, 1, 256)):
        visible = np.full((b, t), entries, np.int32)
        query, weight, key = draw(b, t, 8, 16, entries)
        index = _choose(query, weight, key, visible, 4)
        assert index.shape == (b, t, min(4, entries))


def test_ties_go_to_the_lowest_index():
    """Within a slot, across slots and splits, and beyond the last whole block."""
    rng = np.random.default_rng(0)
    query = rng.integers(-1, 2, (1, 2, 2, 16))
    weight = rng.integers(-1, 2, (1, 2, 2)).astype(np.float32)
    key = rng.integers(0, 2, (1, 16, 656))
    key[:, :, 500:] = 0
    query, weight, key = (
        jnp.asarray(query, jnp.bfloat16),
        jnp.asarray(weight),
        jnp.asarray(key, jnp.bfloat16),
    )
    visible = np.array([[656, 611]], np.int32)
    _choose(query, weight, key, visible, 40, Config(queries=2, splits=2, stages=2))
    # relu(0) · -1 is -0.0, and no less than 0.0.
    weight, key = -jnp.ones_like(weight), jnp.zeros_like(key)
    config = Config(queries=1, splits=3, stages=2)
    index = _choose(query, weight, key, visible, 8, config)
    assert (index == np.arange(8)).all()


def test_a_slot_that_keeps_too_few(draw):
    """The best entries all in one slot: found, and scored anew."""
    query, weight, key = draw(1, 1, 4, 16, 768)
    query = jnp.abs(query)
    key = jnp.abs(key).at[:, :, 7::128].multiply(16)
    config = Config(splits=1, stages=2)
    assert mosaic_gpu._depth(5, config, 6) < 5
    index = _choose(query, jnp.abs(weight), key, np.array([[768]], np.int32), 5, config)
    assert (index % 128 == 7).all()


def test_merged_splits(draw, monkeypatch):
    """Candidates of three splits by twos; ties; and a slot of a pair that is full."""
    monkeypatch.setattr(mosaic_gpu, "_MERGED", 2)
    config = Config(splits=3, stages=2)
    query, weight, key = draw(1, 1, 4, 16, 1296)
    visible = np.array([[1290]], np.int32)
    _choose(query, weight, key, visible, 9, config)
    _choose(query, weight, jnp.round(key).clip(-1, 1), visible, 60, config)
    query, weight, key = (jnp.abs(x) for x in (query, weight, key))
    index = _choose(query, weight, key.at[:, :, 7::128].add(9), visible, 6, config)
    assert (index % 128 == 7).all()


def test_depth():
    """Few enough to keep, and at least what falls into a slot on average."""
    for k, splits, blocks in ((512, 132, 2048), (1024, 1, 2048), (512, 4, 16)):
        config = Config(splits=splits)
        depth = mosaic_gpu._depth(k, config, blocks)
        assert k / (splits * config.block) < depth <= -(-blocks // splits)
    # Thrown at random, no slot of 1000 queries gets as many as it keeps.
    rng = np.random.default_rng(0)
    thrown = rng.integers(0, 4 * 128, (1000, 512))
    thrown += np.arange(1000)[:, None] * 512
    most = np.bincount(thrown.ravel(), minlength=512000).max()
    assert most < mosaic_gpu._depth(512, Config(splits=4), 2048)


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((2, 2, 3, 32, 288), Config(queries=2, stages=2)),
        ((1, 1, 8, 16, 512), Config(block=256, splits=2, stages=2)),
    ],
)
def test_scores(shape, config, draw):
    query, weight, key = draw(*shape)
    with interpreted():
        got = jax.jit(functools.partial(mosaic_gpu.indexer_scores, config=config))(
            query, weight, key
        )
        got = np.asarray(got)
    np.testing.assert_allclose(got, reference_scores(query, weight, key), atol=2e-5)


def _abstract(b, t, heads, channels, entries):
    shapes = (b, t, heads, channels), (b, t, heads), (b, channels, entries)
    dtypes = jnp.bfloat16, jnp.float32, jnp.bfloat16
    arrays = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, dtypes, strict=True)]
    return (*arrays, jax.ShapeDtypeStruct((b, t), jnp.int32))


def test_refusals():
    """Each reason; the numbers of a case are b, t, heads, channels, entries and k."""
    run = functools.partial(lower, indexer_topk, implementation="mosaic_gpu")
    for *shape, k, reason in (
        (1, 1, 4, 24, 256, 1, "a multiple of 16 up to 256 channels, not 24"),
        (1, 1, 129, 16, 256, 1, "1 to 128 indexer heads, not 129"),
        (1, 1, 64, 128, 4104, 1, "a multiple of 64 entries, not 4104"),
        (40, 4, 128, 256, 65536, 60000, "cannot keep 60000 of 65536 entries"),
    ):
        with pytest.raises(Unsupported, match=reason):
            run(*_abstract(*shape), k=k)
    query, *others = _abstract(1, 1, 4, 16, 256)
    args = jax.ShapeDtypeStruct(query.shape, jnp.float32), *others
    with pytest.raises(Unsupported, match="scores bfloat16, not float32"):
        run(*args, k=1)
    with pytest.raises(Unsupported, match="scores bfloat16, not float32"):
        lower(indexer_scores, *args[:3], implementation="mosaic_gpu")


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_other_devices(device):
    args = _abstract(1, 1, 64, 128, 4096)
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        lower(indexer_topk, *args, device=device, k=512, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        lower(indexer_scores, *args[:3], device=device, implementation="mosaic_gpu")
    with pytest.warns(RuntimeWarning, match="falls back"):
        assert kernels(lower(indexer_topk, *args, device=device, k=512)) == 0


SHAPES = [
    # V4-Flash and V4-Pro: decoding and 128 queries; a small indexer; many rows, with
    # offsets beyond 2^31.
    ((1, 1, 64, 128, 262144), 512),
    ((1, 1, 64, 128, 262144), 1024),
    ((1, 128, 64, 128, 262144), 1024),
    ((1, 1, 4, 32, 262144), 512),
    ((3, 2, 5, 16, 1040), 4),
    ((128, 1, 64, 128, 262144), 512),
    # More groups of queries than CUDA takes blocks along any axis but a grid's last.
    ((1, 2**18, 64, 128, 4096), 512),
]


@pytest.mark.parametrize(("shape", "k"), SHAPES)
@pytest.mark.parametrize("device", ["h100", "h200"])
def test_chosen_configuration_lowers(shape, k, device):
    args = _abstract(*shape)
    merged = mosaic_gpu.default(*args[:3], k=k).splits > mosaic_gpu._MERGED
    assert kernels(lower(indexer_topk, *args, device=device, k=k)) == 1 + merged
    assert kernels(lower(indexer_scores, *args[:3], device=device)) == 1


@pytest.mark.parametrize(("shape", "k"), [SHAPES[0], SHAPES[2], SHAPES[4]])
def test_configurations_lower(shape, k):
    args = query, weight, key, visible = _abstract(*shape)
    legal = mosaic_gpu.configurations(query, weight, key, visible, k=k)
    assert len(legal) > 3
    for number, config in enumerate(legal):
        device = ("h100", "h200")[number % 2]
        run = functools.partial(mosaic_gpu.indexer_topk, k=k, config=config)
        merged = config.splits > mosaic_gpu._MERGED
        assert kernels(lower(run, *args, device=device)) == 1 + merged


def test_gradient():
    """XLA's, beside the kernel."""

    def loss(*arrays):
        return jnp.sum(indexer_scores(*arrays, implementation="mosaic_gpu") ** 2)

    args = _abstract(1, 16, 64, 128, 4096)[:3]
    assert kernels(lower(jax.grad(loss, argnums=(0, 1, 2)), *args)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("t", "k"), [(1, 512), (4, 512), (2, 1024)])
def test_on_a_device(t, k, draw):
    query, weight, key = draw(1, t, 64, 128, 8256)
    visible = jnp.asarray([[8256 - 999 * i for i in range(t)]], jnp.int32)
    arrays = query, weight, key, visible
    by_name = functools.partial(indexer_scores, query, weight, key)
    scores = np.asarray(by_name(implementation="mosaic_gpu"))
    want = by_name(implementation="xla")
    np.testing.assert_allclose(scores, np.asarray(want), rtol=2e-3, atol=2e-3)
    index, best = indexer_topk(*arrays, k=k, implementation="mosaic_gpu")
    again = np.asarray(indexer_topk(*arrays, k=k, implementation="mosaic_gpu")[0])
    np.testing.assert_array_equal(np.asarray(index), again)
    picked = np.take_along_axis(scores, np.asarray(index), axis=2)
    np.testing.assert_allclose(np.asarray(best), picked, rtol=1e-6, atol=1e-6)
    chosen = reference_choice(scores, visible, k)
    np.testing.assert_array_equal(np.asarray(index), chosen)
