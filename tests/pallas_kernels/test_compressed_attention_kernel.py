"""The kernel over visible entries: interpreted, lowered, refused, differentiated."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressed_attention import mosaic_gpu
from pallas_kernels.compressed_attention.api import compressed_attention
from pallas_kernels.compressed_attention.mosaic_gpu import Config
from pallas_kernels.compressed_attention.reference import reference
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.softmax import finish
from tests.pallas_kernels.kernel_arrays import (
    ATOL,
    abstract,
    given,
    integers,
    rounded,
    same_gradients,
    sees_nothing,
)


def _case(normal, b, t, e, n, k, h, *, shared):
    query, key = rounded(normal(b, t, n, h)), rounded(normal(b, e, k, h))
    return query, key, key if shared else rounded(normal(b, e, k, h))


def _visible(b, t, e):
    """0, 1, the end, and numbers that are no multiple of a block."""
    choice = np.array([e, 0, 1, min(e, 69), e // 2])
    return choice[(np.arange(b)[:, None] * 3 + np.arange(t)) % 5].astype(np.int32)


@pytest.mark.parametrize(
    ("b", "t", "e", "n", "k", "h", "shared", "config"),
    [
        (1, 3, 1, 4, 1, 64, True, None),
        # Several tiles, each two to a block of the grid.
        (1, 50, 130, 6, 2, 64, False, Config(64, 2, 2)),
        # Split keys; more splits than blocks of keys.
        (2, 4, 328, 4, 2, 64, False, Config(64, 2, 1, 4)),
        # Two warpgroups divide the channels.
        (2, 2, 203, 4, 1, 512, True, Config(64, 2, 1, 2)),
    ],
)
def test_reference(b, t, e, n, k, h, shared, config, normal, agrees):
    """Entries that no query of a row sees hold NaN."""
    query, key, value = _case(normal, b, t, e, n, k, h, shared=shared)
    visible = _visible(b, t, e)
    visible[-1] = np.minimum(visible[-1], 69)
    want = reference(query, key, value, visible, scale=h**-0.5)
    dead = np.arange(e) >= visible.max(axis=1)[:, None]
    key[dead], value[dead] = np.nan, np.nan
    with interpreted():
        got = mosaic_gpu.compressed_attention(
            *given(query, key, value),
            jnp.asarray(visible),
            scale=h**-0.5,
            static=False,
            config=config,
        )
        agrees(got, want, atol=ATOL)


def test_mass(normal, agrees):
    """The mass of each block, of split keys and two batch sizes through one function.

    Each query reads a range of entries: empty, or with whole blocks outside it.
    """
    run = jax.jit(
        functools.partial(
            mosaic_gpu.compressed_attention,
            scale=0.2,
            static=False,
            mass_block=128,
            config=Config(64, 2, 1, 3),
        )
    )
    first = np.array([[0, 3, 130, 0], [70, 64, 299, 0]], np.int32)
    visible = np.array([[0, 300, 190, 1], [300, 128, 300, 70]], np.int32)
    query, key, value = _case(normal, 2, 4, 300, 4, 2, 64, shared=False)
    with interpreted():
        for b in (2, 1):
            arrays = query[:b], key[:b], value[:b]
            got, mass = run(
                *given(*arrays),
                jnp.asarray(visible[:b]),
                visible_from=jnp.asarray(first[:b]),
            )
            want = reference(*arrays, visible[:b], scale=0.2, visible_from=first[:b])
            agrees(got, want, atol=ATOL)
            blocks = np.pad(want[2], [(0, 0), (0, 0), (0, 84)]).reshape(b, 4, 3, 128)
            np.testing.assert_allclose(np.asarray(mass), blocks.sum(axis=3), atol=1e-4)


@pytest.mark.parametrize(("t", "e"), [(0, 3), (2, 0), (2, 6)])
def test_nothing_is_seen(t, e, normal):
    """No queries, no entries, and entries that are all NaN."""
    query = jnp.asarray(normal(2, t, 4, 64), jnp.bfloat16)
    nan = jnp.full((2, e, 1, 64), jnp.nan, jnp.bfloat16)
    visible = jnp.zeros((2, t), jnp.int32)
    with interpreted():
        got = compressed_attention(
            query,
            nan,
            nan,
            visible,
            scale=1.0,
            static=False,
            implementation="mosaic_gpu",
        )
        sees_nothing(got, (2, t, 4, 64))


def _arrays(b, t, e, n, k, h, *, dtype=jnp.bfloat16):
    return (
        abstract(b, t, n, h, dtype=dtype),
        abstract(b, e, k, h, dtype=dtype),
        integers(b, t),
    )


def _call(function, *, shared=True, **options):
    def call(query, key, visible):
        value = key if shared else key + 1
        return function(query, key, value, visible, scale=0.1, static=False, **options)

    return call


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("n", [64, 128])
def test_lowers_v4(n, device):
    """Prefill, and decode of 2^22 entries, 2^32 numbers, in every configuration."""
    prefill = _call(compressed_attention, implementation="mosaic_gpu", mass_block=64)
    arrays = _arrays(1, 8192, 8192, n, 1, 512)
    assert kernels(lower(prefill, *arrays, device=device)) == 1
    arrays = query, key, _ = _arrays(2, 1, 2**22, n, 1, 512)
    configs = mosaic_gpu.configurations(query, key, key)
    assert mosaic_gpu.default(query, key, key) in configs
    assert {config.splits for config in configs} == {2048 // n, 4096 // n}
    for config in configs:
        call = _call(mosaic_gpu.compressed_attention, config=config)
        assert kernels(lower(call, *arrays, device=device)) == 1


@pytest.mark.parametrize(
    "device", ["h100", pytest.param("h200", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("h", "t"),
    [
        (128, 1),
        pytest.param(128, 33, marks=pytest.mark.slow),
        pytest.param(64, 1, marks=pytest.mark.slow),
        pytest.param(64, 33, marks=pytest.mark.slow),
    ],
)
def test_lowers_every_configuration(h, t, device):
    arrays = query, key, _ = _arrays(2, t, 4000, 16, 4, h)
    for config, mass_block in zip(
        mosaic_gpu.configurations(query, key, key.update()),
        itertools.cycle([None, 128]),
    ):
        call = _call(
            mosaic_gpu.compressed_attention,
            shared=False,
            config=config,
            mass_block=mass_block,
        )
        assert kernels(lower(call, *arrays, device=device)) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "h", "mass_block", "reason"),
    [
        ("a100", jnp.bfloat16, 64, None, r"needs compute capability 9\.0"),
        ("b200", jnp.bfloat16, 64, None, r"needs compute capability 9\.0"),
        ("h100", jnp.float32, 64, None, "multiplies bfloat16, not float32"),
        ("h100", jnp.bfloat16, 320, None, "channels a head, not 320"),
        ("h100", jnp.bfloat16, 64, 32, "multiples of 64 entries, not 32"),
    ],
)
def test_refusal(device, dtype, h, mass_block, reason):
    call = _call(
        compressed_attention, implementation="mosaic_gpu", mass_block=mass_block
    )
    with pytest.raises(Unsupported, match=reason):
        lower(call, *_arrays(1, 1, 8, 2, 1, h, dtype=dtype), device=device)


def test_gradient(normal):
    """The gradient of queries, keys and values is XLA's, of the mass too."""
    query, key, value = given(*_case(normal, 1, 3, 70, 2, 1, 64, shared=False))
    visible = jnp.array([[0, 5, 70]])

    def gradient(implementation):
        def loss(query, key, value):
            partial, mass = compressed_attention(
                query,
                key,
                value,
                visible,
                scale=0.2,
                static=True,
                mass_block=64,
                implementation=implementation,
            )
            out = jnp.sin(3 * finish(partial, jnp.zeros(2)))
            return jnp.sum(out) + jnp.sum(mass**2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)

    with interpreted():
        got = jax.block_until_ready(gradient("mosaic_gpu"))
    same_gradients(got, gradient("xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("t", [1, 9])
def test_on_a_device(t, n, normal, agrees):
    """Every configuration; NaN beyond the last visible entry."""
    query, key, value = _case(normal, 2, t, 2011, n, 1, 512, shared=True)
    visible = (2005 - np.arange(2 * t).reshape(2, t)).astype(np.int32)
    want = reference(query, key, value, visible, scale=512**-0.5)
    key[:, 2005:] = np.nan
    arrays = given(query, key, value)
    for config in mosaic_gpu.configurations(*arrays):
        got = mosaic_gpu.compressed_attention(
            *arrays,
            jnp.asarray(visible),
            scale=512**-0.5,
            static=False,
            config=config,
        )
        agrees(got, want, atol=ATOL)


@pytest.mark.gpu
def test_mass_on_a_device(normal):
    arrays = given(*_case(normal, 2, 70, 700, 8, 2, 128, shared=False))
    visible = jnp.asarray(_visible(2, 70, 700))
    call = functools.partial(
        compressed_attention, *arrays, visible, scale=0.1, static=False, mass_block=64
    )
    _, got = call(implementation="mosaic_gpu")
    _, want = call(implementation="xla")
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-4)
