"""The kernel for chosen entries, bfloat16 or packed: interpreted and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.abi import LayoutError
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.api import pack, unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.softmax import finish
from pallas_kernels.sparse_attention import mosaic_gpu, packed
from pallas_kernels.sparse_attention.api import (
    masked_attention,
    sparse_attention,
    sparse_attention_packed,
)
from pallas_kernels.sparse_attention.config import Config
from pallas_kernels.sparse_attention.reference import reference
from tests.pallas_kernels.kernel_arrays import abstract, integers, sees_nothing

# bfloat16 weights against float64 ones: 2^-9 of the largest value, and the sums' own.
_WEIGHTS, _SUMS = 2**-8, 2e-5


def _chosen(b, t, e, c) -> np.ndarray:
    """Lists with -1 between the entries, one of only -1, and an entry chosen twice."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(-1, e, (b, t, c))
    chosen[0, 0] = -1
    chosen[-1, -1, :2] = e - 1
    return chosen.astype(np.int32)


def _unused(chosen, e) -> np.ndarray:
    """bool[b, e]: entries that nobody chose."""
    return np.stack([~np.isin(np.arange(e), row) for row in chosen])


def _agrees(partial, want) -> None:
    output, log_sum = want[:2]
    got = np.asarray(finish(partial, None))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, output, atol=_WEIGHTS * np.abs(output).max())
    b, k, t, g = partial.total.shape
    with np.errstate(divide="ignore"):
        mass = np.log(np.asarray(partial.total, np.float64))
    mass = mass + np.asarray(partial.maximum, np.float64) * np.log(2)
    mass = mass.transpose(0, 2, 1, 3).reshape(b, t, k * g)
    np.testing.assert_allclose(mass, log_sum, atol=_SUMS * np.abs(output).max())


def _run(normal, sizes, config, *, shared, mass_block=None) -> None:
    b, t, e, n, k, h, c = sizes
    query, key = normal(b, t, n, h), normal(b, e, k, h)
    value = key if shared else normal(b, e, k, h)
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (query, key, value))
    chosen = _chosen(b, t, e, c)
    want = reference(query, key, value, chosen, scale=0.3)
    poison = _unused(chosen, e)[:, :, None, None]
    key = jnp.where(poison, jnp.nan, key)
    value = key if shared else jnp.where(poison, jnp.nan, value)
    with interpreted():
        result = mosaic_gpu.sparse_attention(
            query,
            key,
            value,
            jnp.asarray(chosen),
            scale=0.3,
            mass_block=mass_block,
            config=config,
        )
        result = jax.tree.map(np.asarray, result)
    if mass_block is None:
        return _agrees(result, want)
    partial, mass = result
    _agrees(partial, want)
    start = np.arange(0, e, mass_block)
    want_mass = np.add.reduceat(want[2], start, axis=2)
    np.testing.assert_allclose(mass, want_mass, atol=_WEIGHTS)


@pytest.mark.parametrize("b", [1, 2])
def test_small_heads(b, normal):
    """Grouped heads that fill no tile, values apart from keys, two batch sizes."""
    _run(normal, (b, 2, 9, 4, 2, 64, 5), Config(32, 1, 32, 2), shared=False)


def test_shared(normal):
    """Lists of several blocks and parts, two ready ahead; mass of 7 entries each."""
    sizes = (1, 2, 40, 4, 1, 128, 70)
    _run(normal, sizes, Config(64, 2, 16, 4), shared=True, mass_block=7)


def test_splits(normal):
    """A list in two splits of which the second may be empty."""
    sizes = (1, 2, 9, 4, 2, 64, 70)
    _run(normal, sizes, Config(32, 1, 32, 2, 2), shared=True, mass_block=16)


def test_wide(normal):
    """V4's head: two warpgroups of 256 channels each."""
    _run(normal, (2, 1, 20, 64, 1, 512, 33), Config(32, 2, 32, 2), shared=True)


def test_one_entry(normal):
    _run(normal, (2, 1, 1, 2, 1, 64, 1), Config(32, 1, 32, 2), shared=True)


@pytest.mark.parametrize(
    ("n", "e", "h", "rotary", "alignment"), [(64, 10, 512, 64, 1), (4, 9, 128, 0, 16)]
)
def test_packed(n, e, h, rotary, alignment, normal):
    """584-byte records, and rows of whole 16 bytes, with every kind of number."""
    layout = record_layout("fp8", h, rotary=rotary, alignment=alignment)
    size = np.exp2(np.random.default_rng(2).integers(-12, 3, (2, e, h)))
    records = pack(
        jnp.asarray(normal(2, e, h) * size),
        format="fp8",
        rotary=rotary,
        alignment=alignment,
    )
    query = jnp.asarray(normal(2, 1, n, h), jnp.bfloat16)
    chosen = _chosen(2, 1, e, 40)
    key = unpack(records, layout)[:, :, None]
    want = reference(query, key, key, chosen, scale=0.05)
    records = jnp.where(_unused(chosen, e)[..., None], 0xFF, records)
    records = records.astype(jnp.uint8)
    arrays = (query, records, layout, jnp.asarray(chosen))
    got = sparse_attention_packed(*arrays, scale=0.05, mass_block=4)
    np.testing.assert_allclose(
        np.asarray(finish(got[0], None)), want[0], atol=2e-6 * np.abs(want[0]).max()
    )
    np.testing.assert_allclose(np.asarray(got[1]).sum(-1), want[2].sum(-1), atol=1e-6)
    with interpreted():
        partial = sparse_attention_packed(
            *arrays, scale=0.05, implementation="mosaic_gpu"
        )
        partial = jax.tree.map(np.asarray, partial)
    _agrees(partial, want)


@pytest.mark.parametrize(("e", "c"), [(0, 3), (5, 0)])
def test_nothing_to_choose(e, c, normal):
    query = jnp.asarray(normal(2, 3, 4, 64), jnp.bfloat16)
    key = jnp.zeros((2, e, 1, 64), jnp.bfloat16)
    with interpreted():
        partial = sparse_attention(
            query,
            key,
            key,
            jnp.full((2, 3, c), -1),
            scale=1.0,
            implementation="mosaic_gpu",
        )
        sees_nothing(partial, (2, 3, 4, 64))


def test_channel_order():
    """Tiles take the words' bytes apart; joining them is the inverse."""
    x = jnp.arange(512)
    split = packed.split_words(x, 64)
    np.testing.assert_array_equal(split[:32], [*range(0, 64, 4), *range(1, 64, 4)])
    np.testing.assert_array_equal(split[448:464], np.arange(448, 480, 2))
    np.testing.assert_array_equal(packed.join_words(split, 64), x)


# Name: (query, entries or records, lists) of V4-Flash, V4-Pro and ordinary heads.
CALLS = {
    "flash": (
        abstract(8, 32, 64, 512),
        abstract(8, 2**20, 1, 512),
        integers(8, 32, 512),
    ),
    # More queries than CUDA takes blocks along any axis but a grid's last.
    "prefill": (
        abstract(1, 2**17, 64, 512),
        abstract(1, 2**15, 1, 512),
        integers(1, 2**17, 512),
    ),
    "pro": (abstract(1, 2, 128, 512), abstract(1, 4096, 1, 512), integers(1, 2, 1024)),
    "flash fp8": (
        abstract(8, 32, 64, 512),
        abstract(8, 2**20, 584, dtype=jnp.uint8),
        integers(8, 32, 512),
    ),
    "pro fp8": (
        abstract(1, 2, 128, 512),
        abstract(1, 4096, 640, dtype=jnp.uint8),
        integers(1, 2, 1024),
    ),
    "grouped": (abstract(2, 8, 32, 128), abstract(2, 512, 8, 128), integers(2, 8, 64)),
    "small": (abstract(1, 1, 4, 64), abstract(1, 99, 1, 64), integers(1, 1, 100)),
    "odd": (abstract(1, 2, 64, 384), abstract(1, 99, 1, 384), integers(1, 2, 33)),
}


def _function(name, config=None):
    if name.endswith("fp8"):
        return functools.partial(
            packed.sparse_attention, format="fp8", rotary=64, scale=0.1, config=config
        )
    if name in ("grouped", "small"):
        return lambda query, key, chosen: mosaic_gpu.sparse_attention(
            query, key, key + 1, chosen, scale=0.1, config=config
        )
    return lambda query, key, chosen: mosaic_gpu.sparse_attention(
        query, key, key, chosen, scale=0.1, config=config
    )


def _configurations(name):
    query, entries, chosen = CALLS[name]
    if name.endswith("fp8"):
        return packed.configurations(query, entries, chosen)
    value = None if name in ("grouped", "small") else entries
    return mosaic_gpu.configurations(query, entries, value, chosen)


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("name", CALLS)
def test_lowers(name, device):
    """The default configuration; entries beyond 2^31 elements and bytes."""
    assert kernels(lower(_function(name), *CALLS[name], device=device)) == 1


@pytest.mark.parametrize("name", ["flash", "flash fp8", "small"])
def test_every_configuration_lowers(name):
    configs = _configurations(name)
    assert len(configs) >= 5
    for config in configs:
        text = lower(_function(name, config), *CALLS[name], device="h200")
        assert kernels(text) == 1, config


def test_mass_and_splits_lower():
    def function(query, key, chosen):
        return sparse_attention(
            query,
            key,
            key,
            chosen,
            scale=0.1,
            mass_block=64,
            implementation="mosaic_gpu",
        )

    query, key, chosen = CALLS["pro"]
    assert mosaic_gpu.default(query, key, key, chosen).splits > 1
    assert kernels(lower(function, query, key, chosen)) == 1


def test_gradient_lowers():
    def loss(query, key, chosen):
        partial = sparse_attention(
            query, key, key, chosen, scale=0.1, implementation="mosaic_gpu"
        )
        return jnp.sum(finish(partial, None) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1))
    assert kernels(lower(gradient, *CALLS["small"])) == 1

    def packed_loss(query, records, chosen):
        partial = _function("flash fp8")(query, records, chosen)
        return jnp.sum(finish(partial, None) ** 2)

    assert kernels(lower(jax.grad(packed_loss), *CALLS["flash fp8"])) == 1


def test_chosen_by_default():
    text = lower(
        lambda query, key, chosen: sparse_attention(query, key, key, chosen, scale=0.1),
        *CALLS["flash"],
    )
    assert kernels(text) == 1


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_other_devices(device):
    """Matrix products of 9.0 lower for any GPU, so the capability must refuse."""
    query, key, chosen = CALLS["small"]
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        lower(
            lambda q, k, c: sparse_attention(
                q, k, k, c, scale=1.0, implementation="mosaic_gpu"
            ),
            query,
            key,
            chosen,
            device=device,
        )
    query, records, chosen = CALLS["flash fp8"]
    layout = record_layout("fp8", 512, rotary=64)
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        lower(
            lambda q, r, c: sparse_attention_packed(
                q, r, layout, c, scale=1.0, implementation="mosaic_gpu"
            ),
            query,
            records,
            chosen,
            device=device,
        )


@pytest.mark.parametrize(
    ("query", "c", "reason"),
    [
        (abstract(1, 1, 1, 64, dtype=jnp.float32), 4, "multiplies bfloat16"),
        (abstract(1, 1, 1, 96), 4, "channels a head, not 96"),
        (abstract(1, 1, 1, 64), 10**7, "lists in shared memory"),
    ],
)
def test_refusals(query, c, reason):
    key = abstract(1, 8, 1, query.shape[3], dtype=query.dtype)
    with pytest.raises(Unsupported, match=reason):
        lower(
            lambda q, k, i: sparse_attention(
                q, k, k, i, scale=1.0, implementation="mosaic_gpu"
            ),
            query,
            key,
            integers(1, 1, c),
        )


@pytest.mark.parametrize(
    ("format", "rotary", "e", "reason"),
    [("int8", 64, 8, "fp8 records"), ("fp8", 16, 8, "rotary"), ("fp8", 64, 3, "pairs")],
)
def test_packed_refusals(format, rotary, e, reason):
    layout = record_layout(format, 448 + rotary, rotary=rotary)
    records = abstract(1, e, layout.sizes[-1], dtype=jnp.uint8)
    with pytest.raises(Unsupported, match=reason):
        lower(
            lambda q, r, c: sparse_attention_packed(
                q, r, layout, c, scale=1.0, implementation="mosaic_gpu"
            ),
            abstract(1, 1, 64, 448 + rotary),
            records,
            integers(1, 1, 4),
        )


def test_packed_channels():
    layout = record_layout("fp8", 512, rotary=64)
    with pytest.raises(LayoutError, match="of 512 channels, expected 256"):
        sparse_attention_packed(
            jnp.zeros((1, 1, 1, 256)),
            jnp.zeros((1, 2, 584), jnp.uint8),
            layout,
            jnp.zeros((1, 1, 1), jnp.int32),
            scale=1.0,
        )


def test_masked_attention_has_no_kernel(normal):
    x = jnp.asarray(normal(1, 1, 1, 64))
    with pytest.raises(Unsupported, match="expected one of xla"):
        masked_attention(
            x,
            x,
            x,
            jnp.ones((1, 1, 1), bool),
            scale=1.0,
            implementation="mosaic_gpu",
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"prefill"}))
def test_on_a_device(name, normal):
    """Both implementations, on fewer entries."""
    query, entries, chosen = CALLS[name]
    b, e = query.shape[0], min(entries.shape[1], 4096)
    query = jnp.asarray(normal(*query.shape), jnp.bfloat16)
    chosen = jnp.asarray(_chosen(b, query.shape[1], e, chosen.shape[2]))
    rows = jnp.asarray(normal(b, e, *entries.shape[2:]), jnp.bfloat16)
    if name.endswith("fp8"):
        alignment = 1 if entries.shape[2] == 584 else 128
        layout = record_layout("fp8", 512, rotary=64, alignment=alignment)
        rows = jnp.asarray(normal(b, e, 512))
        records = pack(rows, format="fp8", rotary=64, alignment=alignment)
        arrays = (query, records, layout, chosen)
        function = sparse_attention_packed
    else:
        arrays = (query, rows, rows, chosen)
        function = sparse_attention
    got, want = (
        np.asarray(finish(function(*arrays, scale=0.1, implementation=which), None))
        for which in ("mosaic_gpu", "xla")
    )
    np.testing.assert_allclose(got, want, atol=2**-7 * np.abs(want).max())
