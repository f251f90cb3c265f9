"""The transforms' kernels: interpreted, lowered, refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codec_transform import api, mosaic_gpu, product_sm90
from pallas_kernels.codec_transform.bases import basis
from pallas_kernels.codec_transform.product_sm90 import Config, Plan
from pallas_kernels.codec_transform.reference import reference_transform
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.formats import FORMATS, record_layout
from pallas_kernels.lowering import kernels, lower

KERNEL = dict(implementation="mosaic_gpu")


def _interpreted(function, *arrays, **options):
    with interpreted():
        run = jax.jit(functools.partial(function, **options, **KERNEL))
        return np.asarray(run(*arrays))


def _bfloat16(x):
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize(
    ("shape", "tokens", "channels"),
    [
        # A tile, and rows that fill none; channels, tokens, both.
        ((2, 40, 32), None, "hadamard"),
        ((5, 16, 16), "cosine", None),
        ((2, 64, 32), "hadamard", "cosine"),
        ((3, 1, 16), "cosine", "hadamard"),
        ((0, 4, 16), "cosine", "cosine"),
    ],
)
def test_transform(shape, tokens, channels, normal):
    """As exact as in float32, though the operands are bfloat16."""
    x = _bfloat16(normal(*shape))
    options = dict(tokens=tokens, channels=channels)
    got = _interpreted(api.transform, x, **options)
    np.testing.assert_allclose(got, reference_transform(x, tokens, channels), atol=3e-6)


def test_inverse(normal):
    x = _bfloat16(normal(8, 8, 32))
    options = dict(tokens="cosine", channels="hadamard")
    got = _interpreted(api.inverse, x, **options)
    back = reference_transform(got, **options)
    np.testing.assert_allclose(back, np.asarray(x, np.float32), atol=5e-6)


@pytest.mark.parametrize("stages", [1, 2])
def test_many_tiles_of_a_block(stages, normal, monkeypatch):
    """Shared memory is read and filled again; records, too."""
    monkeypatch.setattr(product_sm90, "PROCESSORS", 1)
    x = _bfloat16(normal(17, 16, 32))
    matrix = jnp.asarray(basis("cosine", 16))
    with interpreted():
        run = functools.partial(mosaic_gpu.transform, config=Config(stages=stages))
        got = np.asarray(jax.jit(run)(x, matrix, None))
    np.testing.assert_allclose(got, reference_transform(x, "cosine", None), atol=3e-6)
    if stages > 1:
        return
    pack = functools.partial(api.transform_pack, format="int4", tokens="cosine")
    records = jax.jit(pack)(x)
    layout = record_layout("int4", 32, leading=("n", "s"))
    unpack = functools.partial(api.unpack_inverse, layout=layout, tokens="cosine")
    back = _interpreted(unpack, records)
    np.testing.assert_allclose(back, jax.jit(unpack)(records), atol=1e-5)


def test_hadamard(normal):
    x = _bfloat16(normal(2, 5, 13, 64))
    got = _interpreted(api.hadamard, x)
    want = reference_transform(x.reshape(1, 130, 64), None, "hadamard")
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=3e-6)


def test_poison_stays_in_its_group(normal):
    x = normal(8, 8, 32)
    want = reference_transform(x, None, None)
    x[3, 2], x[5, 1, 4] = np.nan, np.inf
    x = _bfloat16(x)
    options = dict(tokens="cosine", channels="hadamard")
    got = _interpreted(api.transform, x, **options)
    clean = np.arange(8)[~np.isin(np.arange(8), [3, 5])]
    want = reference_transform(x[clean], **options)
    np.testing.assert_allclose(got[clean], want, atol=3e-6)
    assert np.isnan(got[[3, 5]]).all()
    # Without the product along channels, in its channel alone.
    got = _interpreted(api.transform, x, tokens="cosine")
    assert np.isnan(got[5, :, 4]).all() and np.isfinite(got[5, :, 5]).all()
    assert np.isfinite(got[clean]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_packed(format, normal):
    """Records as XLA's, but for codes next to a tie; and back."""
    x = _bfloat16(normal(5, 16, 64))
    options = dict(tokens="cosine", channels="hadamard")
    pack = functools.partial(
        api.transform_pack,
        format=format,
        alignment=16,
        tokens="cosine",
        channels="hadamard",
    )
    records = _interpreted(pack, x)
    layout = record_layout(format, 64, leading=("n", "s"), alignment=16)
    want = np.asarray(jax.jit(pack)(x))
    assert (records != want).mean() < 0.01
    assert (records[..., FORMATS[format].record_bytes(64, 0) :] == 0).all()
    unpack = functools.partial(api.unpack_inverse, layout=layout, **options)
    back = _interpreted(unpack, jnp.asarray(want))
    np.testing.assert_allclose(back, jax.jit(unpack)(jnp.asarray(want)), atol=1e-5)


def test_packed_without_channels(normal):
    """One product less to ask for: the codes are the same."""
    x = _bfloat16(normal(4, 16, 32))
    for tokens in ("cosine", None):
        pack = functools.partial(api.transform_pack, format="fp4", tokens=tokens)
        records = _interpreted(pack, x)
        want = np.asarray(jax.jit(pack)(x))
        assert (records != want).mean() < (0.01 if tokens else 1e-9)


def test_refusals(normal):
    x = _bfloat16(normal(1, 4, 32))
    cases = [
        (x.astype(jnp.float32), dict(tokens="cosine"), "bfloat16, not float32"),
        (x, {}, "has no product"),
        (_bfloat16(normal(1, 4, 24)), dict(tokens="cosine"), "channels, not 24"),
        (_bfloat16(normal(1, 2, 256)), dict(tokens="cosine"), "channels, not 256"),
        (_bfloat16(normal(1, 5, 32)), dict(tokens="cosine"), "a divisor of 64 tok"),
    ]
    for array, options, reason in cases:
        with interpreted(), pytest.raises(Unsupported, match=reason):
            api.transform(array, **options, **KERNEL)


@pytest.mark.parametrize("device", ["a100", "b200"])
def test_other_devices(device):
    x = jax.ShapeDtypeStruct((1, 256, 128), jnp.bfloat16)
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        lower(api.hadamard, x, device=device, **KERNEL)
    with pytest.raises(Unsupported, match=r"needs compute capability 9\.0"):
        run = functools.partial(api.transform_pack, format="fp4", channels="hadamard")
        lower(run, x, device=device, **KERNEL)


@pytest.mark.parametrize(("width", "device"), [(64, "h200"), (128, "h100")])
@pytest.mark.parametrize("format", FORMATS)
def test_packing_lowers(format, width, device):
    """The indexer's keys of 2^20 entries for 40 rows: offsets beyond 2^31."""
    x = jax.ShapeDtypeStruct((40 * 2**20 // 16, 16, width), jnp.bfloat16)
    layout = record_layout(format, width, leading=("n", "s"))
    size = layout.sizes[-1]
    assert size is not None
    records = jax.ShapeDtypeStruct((*x.shape[:2], size), jnp.uint8)
    options = dict(tokens="cosine", channels="hadamard", **KERNEL)
    run = functools.partial(api.transform_pack, format=format, **options)
    assert kernels(lower(run, x, device=device)) == 1
    run = functools.partial(api.unpack_inverse, layout=layout, **options)
    assert kernels(lower(run, records, device=device)) == 1


@pytest.mark.parametrize(
    ("width", "tokens", "channels"), [(128, 0, True), (64, 16, False), (128, 64, True)]
)
def test_configurations_lower(width, tokens, channels):
    plan = Plan(width=width, tokens=tokens, channels=channels)
    legal = mosaic_gpu.configurations(plan)
    assert mosaic_gpu.default(plan) in legal
    x = jax.ShapeDtypeStruct((2**18, tokens or 1, width), jnp.bfloat16)
    for number, config in enumerate(legal):
        matrices = [
            jax.ShapeDtypeStruct((size, size), jnp.float32) if size else None
            for size in (tokens, width * channels)
        ]
        run = functools.partial(mosaic_gpu.transform, config=config)
        device = ("h100", "h200")[number % 2]
        assert kernels(lower(run, x, *matrices, device=device)) == 1


def test_gradient_lowers():
    def loss(x):
        return jnp.sum(api.hadamard(x, **KERNEL) ** 2)

    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    assert kernels(lower(jax.grad(loss), x)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, "cosine"])
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_device(format, tokens, normal):
    x = _bfloat16(normal(300, 16, 128))
    options = dict(tokens=tokens, channels="hadamard")
    got = np.asarray(api.transform(x, **options, **KERNEL))
    want = reference_transform(x, **options)
    np.testing.assert_allclose(got, want, atol=1e-5)
    pack = functools.partial(api.transform_pack, format=format, **options)
    records = pack(x, **KERNEL)
    wanted = pack(x, implementation="xla")
    assert (np.asarray(records) != np.asarray(wanted)).mean() < 0.01
    layout = record_layout(format, 128, leading=("n", "s"))
    unpack = functools.partial(api.unpack_inverse, wanted, layout, **options)
    back = np.asarray(unpack(**KERNEL))
    np.testing.assert_allclose(back, unpack(implementation="xla"), atol=1e-4)
