"""The window kernel: interpreted, lowered, refused, differentiated, on a device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.softmax import finish
from pallas_kernels.window_attention import mosaic_gpu
from pallas_kernels.window_attention.api import window_attention
from pallas_kernels.window_attention.mosaic_gpu import Config
from pallas_kernels.window_attention.reference import reference
from tests.pallas_kernels.kernel_arrays import (
    ATOL,
    abstract,
    given,
    integers,
    rounded,
    same_gradients,
    sees_nothing,
)

SLOPES = np.array([0.0, 0.3, 0.1, 1.0], np.float32)


def _case(normal, b, t, n, k, h, window, *, shared=True, s=None):
    """(arrays, positions) of a step whose keys are contiguous; row 0 starts at 0."""
    s = t + window - 1 if s is None else s
    query, key = rounded(normal(b, t, n, h)), rounded(normal(b, s, k, h))
    value = key if shared else rounded(normal(b, s, k, h))
    start = 17 * np.arange(b)[:, None]
    at = start + np.arange(t)
    positions = start - (window - 1) + np.arange(s)
    return (query, key, value), (at.astype(np.int32), positions.astype(np.int32))


def _run(arrays, places, *, config=None, visible_from=None, decay=None, **options):
    return mosaic_gpu.window_attention(
        *given(*arrays),
        *map(jnp.asarray, places),
        decay=None if decay is None else jnp.asarray(decay),
        visible_from=None if visible_from is None else jnp.asarray(visible_from),
        config=config,
        **options,
    )


@pytest.mark.parametrize(
    ("b", "t", "n", "k", "h", "window", "shared", "decay", "config"),
    [
        (2, 1, 4, 1, 64, 1, True, True, None),
        # Several tiles; rows, keys and blocks that are no multiples of a tile.
        (1, 150, 2, 2, 64, 70, False, False, Config(64, 2, 2)),
        (2, 40, 4, 2, 64, 20, True, True, Config(64, 3, 1)),
        # Two warpgroups divide the channels.
        (1, 2, 4, 1, 512, 100, True, True, None),
    ],
)
def test_contiguous(b, t, n, k, h, window, shared, decay, config, normal, agrees):
    arrays, places = _case(normal, b, t, n, k, h, window, shared=shared)
    options = dict(window=window, scale=h**-0.5, decay=SLOPES if decay else None)
    if b == 2 and t > 1:
        # Packed documents: keys before the own one's start are not read.
        column = np.arange(t)
        start = np.stack([column - column % 5, 17 + np.where(column < 30, 0, 30)])
        options["visible_from"] = start
    want = reference(*arrays, *places, **options)
    with interpreted():
        got = _run(arrays, places, contiguous=True, config=config, **options)
        agrees(got, want, atol=ATOL)


def test_ring(normal, agrees):
    """Slots in any order, some empty, two batch sizes through one function."""
    window, size, h = 5, 76, 64
    run = jax.jit(
        functools.partial(
            window_attention,
            window=window,
            scale=0.3,
            contiguous=False,
            implementation="mosaic_gpu",
        )
    )
    slot = np.arange(size)
    with interpreted():
        for length in (np.array([1, 6, 300]), np.array([80])):
            (query, key, value), _ = _case(
                normal, len(length), 2, 4, 1, h, window, shared=False, s=size
            )
            at = (length[:, None] + np.arange(2) - 1).astype(np.int32)
            positions = at[:, -1:] - (at[:, -1:] - slot) % size
            want = reference(
                query, key, value, at, positions, window=window, scale=0.3, decay=SLOPES
            )
            got = run(
                *given(query, key, value),
                jnp.asarray(at),
                jnp.asarray(positions),
                decay=jnp.asarray(SLOPES),
            )
            agrees(got, want, atol=ATOL)


@pytest.mark.parametrize(("t", "s"), [(0, 3), (2, 0), (2, 6)])
def test_nothing_is_seen(t, s, normal):
    """No queries, no keys, and keys that are all empty slots."""
    arrays, (at, _) = _case(normal, 2, t, 4, 2, 64, 4, s=s)
    none = np.full((2, s), -1, np.int32)
    with interpreted():
        got = _run(
            arrays, (at, none), window=4, scale=1.0, decay=None, contiguous=False
        )
        sees_nothing(got, (2, t, 4, 64))


def _arrays(b, t, n, k, h, s, *, dtype=jnp.bfloat16):
    return (
        abstract(b, t, n, h, dtype=dtype),
        abstract(b, s, k, h, dtype=dtype),
        integers(b, t),
        integers(b, s),
        abstract(n, dtype=jnp.float32),
    )


def _call(function, *, contiguous, shared=True, **options):
    def call(query, key, at, positions, decay):
        value = key if shared else key + 1
        return function(
            query,
            key,
            value,
            at,
            positions,
            window=128,
            scale=0.1,
            decay=decay,
            contiguous=contiguous,
            **options,
        )

    return call


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("n", [64, 128])
def test_lowers_v4(n, device):
    """Prefill of 2^17 tokens, whose output has 2^32 numbers, and decode from a ring."""
    call = functools.partial(_call, window_attention, implementation="mosaic_gpu")
    for t, s in ((2**17, 2**17 + 127), (1, 130)):
        arrays = _arrays(1, t, n, 1, 512, s)
        text = lower(call(contiguous=t > 1), *arrays, device=device)
        assert kernels(text) == 1


@pytest.mark.parametrize(
    "device", ["h100", pytest.param("h200", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("h", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_lowers_every_configuration(h, device):
    arrays = _arrays(2, 33, 16, 4, h, 160)
    query, key, *_ = arrays
    value = key.update()
    configs = mosaic_gpu.configurations(query, key, value)
    assert mosaic_gpu.default(query, key, value) in configs
    for config, contiguous in zip(configs, itertools.cycle([True, False])):
        call = _call(
            mosaic_gpu.window_attention,
            contiguous=contiguous,
            shared=False,
            config=config,
        )
        assert kernels(lower(call, *arrays, device=device)) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "h", "reason"),
    [
        ("a100", jnp.bfloat16, 64, r"needs compute capability 9\.0"),
        ("b200", jnp.bfloat16, 64, r"needs compute capability 9\.0"),
        ("h100", jnp.float32, 64, "multiplies bfloat16, not float32"),
        ("h100", jnp.bfloat16, 96, "channels a head, not 96"),
        ("h100", jnp.bfloat16, 1024, "channels a head, not 1024"),
    ],
)
def test_refusal(device, dtype, h, reason):
    call = _call(window_attention, contiguous=False, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match=reason):
        lower(call, *_arrays(1, 1, 2, 1, h, 8, dtype=dtype), device=device)


def test_gradient(normal):
    """The gradient of values, keys, queries and slopes is XLA's."""
    arrays, places = _case(normal, 1, 3, 4, 1, 64, 5)
    query, key, _ = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
    places = tuple(map(jnp.asarray, places))

    def gradient(implementation):
        def loss(query, key, decay):
            partial = window_attention(
                query,
                key,
                key,
                *places,
                window=5,
                scale=0.2,
                decay=decay,
                contiguous=True,
                implementation=implementation,
            )
            return jnp.sum(jnp.sin(3 * finish(partial, jnp.zeros(4))))

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return grad(query, key, jnp.asarray(SLOPES))

    with interpreted():
        got = jax.block_until_ready(gradient("mosaic_gpu"))
    same_gradients(got, gradient("xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("t", [1, 130])
def test_on_a_device(t, n, normal, agrees):
    window = 128
    arrays, places = _case(normal, 2, t, n, 1, 512, window)
    slopes = np.linspace(0, 0.1, n).astype(np.float32)
    options = dict(window=window, scale=512**-0.5, decay=slopes)
    want = reference(*arrays, *places, **options)
    for contiguous in (True, False):
        got = _run(arrays, places, contiguous=contiguous, **options)
        agrees(got, want, atol=ATOL)


@pytest.mark.gpu
def test_every_configuration_on_a_device(normal, agrees):
    arrays, places = _case(normal, 2, 70, 8, 2, 128, 100, shared=False)
    options = dict(window=100, scale=128**-0.5, decay=None)
    want = reference(*arrays, *places, **options)
    for config in mosaic_gpu.configurations(*(abstract(*x.shape) for x in arrays)):
        got = _run(arrays, places, contiguous=True, config=config, **options)
        agrees(got, want, atol=ATOL)
