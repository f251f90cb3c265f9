"""Records: exact bytes, sizes and error bounds, in XLA and by the kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.abi import LayoutError, convert
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.api import FORMATS, pack, unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.kv_quant.reference import reference_pack, reference_unpack
from pallas_kernels.lowering import kernels, lower

# (format, channels, rotary, bytes of a record)
RECORDS = [
    ("fp8", 512, 64, 584),
    ("fp8", 128, 0, 136),
    ("fp8", 64, 0, 72),
    ("fp4", 128, 0, 68),
    ("fp4", 512, 64, 368),
    ("int8", 128, 0, 132),
    ("int8", 512, 64, 592),
    ("int4", 128, 0, 72),
    ("int4", 512, 64, 380),
]
SMALL = [("fp8", 80, 16), ("fp4", 32, 0), ("int8", 64, 0), ("int4", 64, 0)]


def _rows(format: str, channels: int, rotary: int) -> np.ndarray:
    """Normal rows of many magnitudes, and the rows at the edges of the format."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((17, channels)).astype(np.float32)
    rows *= 10.0 ** np.linspace(-30, 30, 17, dtype=np.float32)[:, None]
    rows[0], rows[1, ::2], rows[2, 0] = 0, 0, np.nan
    rows[3, channels - rotary - 1], rows[4] = -np.inf, 2.0**-140
    rows[5], rows[6] = -0.0, np.finfo(np.float32).tiny
    rows[7] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], channels)
    # Halves between fp8 codes, next to the largest magnitude of the format.
    rows[8] = (rng.integers(0, 32, channels) + 0.5) * 8
    rows[8, 0] = 448.0
    rows[9] = np.nextafter(np.float32(448.0), np.float32(500))
    rows[10] = np.finfo(np.float32).max / 4
    return np.asarray(jnp.asarray(rows, jnp.bfloat16), np.float32)


@pytest.mark.parametrize(("format", "channels", "rotary", "size"), RECORDS)
def test_bytes(format, channels, rotary, size):
    """Byte for byte the reference; sizes as published."""
    x = _rows(format, channels, rotary)
    layout = record_layout(format, channels, rotary=rotary, leading=("n",))
    assert layout.sizes[-1] == size
    want = reference_pack(x, format, rotary, size)
    got = np.asarray(pack(jnp.asarray(x), format=format, rotary=rotary))
    assert got.dtype == np.uint8 and got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    back = np.asarray(unpack(jnp.asarray(got), layout))
    np.testing.assert_array_equal(
        back, reference_unpack(want, format, channels, rotary)
    )


@pytest.mark.parametrize(("format", "bits"), [("fp8", 8), ("fp4", 4)])
def test_every_code(format, bits):
    """Each code decodes to its value, and its value encodes to it."""
    channels = 256 if bits == 8 else 32
    layout = record_layout(format, channels, leading=("n",))
    codes = (np.arange(channels) % (1 << bits)).astype(np.uint8)
    if bits == 8:
        codes[[127, 255]] = 0
    data = codes if bits == 8 else codes[::2] | codes[1::2] << 4
    record = np.zeros((1, layout.sizes[-1]), np.uint8)
    record[0, : len(data)] = data
    count = channels // FORMATS[format].block
    # Blocks whose largest magnitude is below the format's would choose other scales.
    record[0, len(data) : len(data) + count] = 127
    values = unpack(jnp.asarray(record), layout)
    want = reference_unpack(record, format, channels, 0)
    np.testing.assert_array_equal(np.asarray(values), want)
    back = np.asarray(pack(values, format=format))
    again = np.asarray(unpack(jnp.asarray(back), layout))
    np.testing.assert_array_equal(again, want)


def _bound(format: str, x: np.ndarray) -> np.ndarray:
    block = FORMATS[format].block
    largest = np.abs(x).reshape(len(x), -1, block).max(axis=2, keepdims=True)
    largest = np.broadcast_to(largest, (*largest.shape[:2], block)).reshape(x.shape)
    return {
        "fp8": np.maximum(np.abs(x) / 16, largest / 229376),
        "fp4": np.maximum(np.abs(x) / 4, largest / 12),
        "int8": largest / 253,
        "int4": largest / 13.9,
    }[format]


@pytest.mark.parametrize("format", FORMATS)
def test_error_bound(format, normal):
    x = normal(200, 128) * np.exp(3 * normal(200, 1))
    layout = record_layout(format, 128, leading=("n",))
    got = np.asarray(unpack(pack(jnp.asarray(x), format=format), layout))
    error = np.abs(got - x)
    assert (error <= _bound(format, x) * (1 + 1e-6)).all()
    # The bounds are no looser than twice what is seen.
    assert (error >= _bound(format, x) / 2).any()


@pytest.mark.parametrize("format", FORMATS)
def test_poison_stays_in_its_block(format, normal):
    x = normal(3, 128)
    clean = np.asarray(pack(jnp.asarray(x), format=format))
    layout = record_layout(format, 128, leading=("n",))
    block = FORMATS[format].block
    for bad in (np.nan, np.inf, -np.inf):
        poisoned = x.copy()
        poisoned[1, block + 3] = bad
        got = np.asarray(unpack(pack(jnp.asarray(poisoned), format=format), layout))
        nan = np.isnan(got)
        assert nan[1, block : 2 * block].all() and nan.sum() == block
        want = np.asarray(unpack(jnp.asarray(clean), layout))
        np.testing.assert_array_equal(got[~nan], want[~nan])


@pytest.mark.parametrize("shape", [(0, 512), (2, 0, 512), (1, 512), (2, 3, 1, 512)])
def test_shapes(shape, normal):
    x = jnp.asarray(normal(*shape))
    records = pack(x, format="fp8", rotary=64)
    assert records.shape == (*shape[:-1], 584)
    leading = tuple("abc"[: len(shape) - 1])
    layout = record_layout("fp8", 512, rotary=64, leading=leading)
    assert unpack(records, layout).shape == shape


@pytest.mark.parametrize(
    ("alignment", "size"), [(1, 584), (16, 592), (64, 640), (128, 640), (256, 768)]
)
def test_alignment(alignment, size, normal):
    x = jnp.asarray(normal(2, 512))
    plain = pack(x, format="fp8", rotary=64)
    got = pack(x, format="fp8", rotary=64, alignment=alignment)
    options = dict(rotary=64, leading=("n",))
    layout = record_layout("fp8", 512, alignment=alignment, **options)
    assert got.shape[-1] == size
    narrow = record_layout("fp8", 512, **options)
    np.testing.assert_array_equal(
        np.asarray(got), np.asarray(convert(plain, narrow, layout))
    )
    np.testing.assert_array_equal(
        np.asarray(unpack(got, layout)), np.asarray(unpack(plain, narrow))
    )


def test_refusals(normal):
    x = jnp.asarray(normal(2, 128))
    with pytest.raises(ValueError, match="'fp6': expected one of fp8, fp4"):
        pack(x, format="fp6")
    with pytest.raises(ValueError, match="128 channels less 16 rotary"):
        pack(x, format="fp8", rotary=16)
    records = pack(x, format="fp8")
    with pytest.raises(LayoutError, match=r"r=68\] fp4/128/0"):
        unpack(records, record_layout("fp4", 128, leading=("n",)))
    with interpreted():
        with pytest.raises(Unsupported, match="packs bfloat16, not float32"):
            pack(x, format="fp8", implementation="mosaic_gpu")
        layout = record_layout("fp8", 128, leading=("n",))
        with pytest.raises(Unsupported, match="unpacks to bfloat16"):
            unpack(records, layout, implementation="mosaic_gpu")


@pytest.mark.parametrize(("format", "channels", "rotary"), SMALL)
def test_kernel(format, channels, rotary):
    """Interpreted: the XLA bytes (which are the reference's), a partial tile too."""
    rows = np.tile(_rows(format, channels, rotary), (4, 1))[: 64 + 3]
    x = jnp.asarray(rows, jnp.bfloat16)
    layout = record_layout(format, channels, rotary=rotary, leading=("n",))
    options = dict(format=format, rotary=rotary)
    want = reference_pack(rows, format, rotary, layout.sizes[-1])
    values = reference_unpack(want, format, channels, rotary)
    with interpreted():
        got = np.asarray(pack(x, implementation="mosaic_gpu", **options))
        back = unpack(
            jnp.asarray(want), layout, dtype=jnp.bfloat16, implementation="mosaic_gpu"
        )
        back = np.asarray(back, np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        back, np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)
    )


V4 = ("fp8", 512, 64)
LOWERED = [
    *itertools.product([V4], [1, 128], ["h100", "h200"]),
    *itertools.product([V4, ("fp4", 128, 0)], [64], ["a100", "b200"]),
    *itertools.product(
        [("fp8", 128, 0), ("fp4", 128, 0), ("int8", 128, 0), ("int4", 64, 0)],
        [1],
        ["h100", "h200"],
    ),
]


@pytest.mark.parametrize(("record", "alignment", "device"), LOWERED)
def test_lowers(record, alignment, device):
    """2^26 rows: bytes beyond 2^31."""
    format, channels, rotary = record
    n = 2**26 + 5
    layout = record_layout(
        format, channels, rotary=rotary, leading=("n",), alignment=alignment
    )
    text = lower(
        pack,
        jax.ShapeDtypeStruct((n, channels), jnp.bfloat16),
        device=device,
        format=format,
        rotary=rotary,
        alignment=alignment,
        implementation="mosaic_gpu",
    )
    assert kernels(text) == 1
    text = lower(
        unpack,
        jax.ShapeDtypeStruct((n, layout.sizes[-1]), jnp.uint8),
        device=device,
        layout=layout,
        dtype=jnp.bfloat16,
        implementation="mosaic_gpu",
    )
    assert kernels(text) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "channels", "rotary", "size"), RECORDS)
def test_on_a_device(format, channels, rotary, size):
    rows = np.tile(_rows(format, channels, rotary), (9, 1))
    x = jnp.asarray(rows, jnp.bfloat16)
    layout = record_layout(format, channels, rotary=rotary, leading=("n",))
    for implementation in ("xla", "mosaic_gpu"):
        options = dict(format=format, rotary=rotary, implementation=implementation)
        try:
            got = np.asarray(pack(x, **options))
        except Unsupported:
            assert rotary and FORMATS[format].bits == 4
            continue
        np.testing.assert_array_equal(got, reference_pack(rows, format, rotary, size))
        back = unpack(
            jnp.asarray(got),
            layout,
            dtype=jnp.bfloat16,
            implementation=implementation,
        )
        want = jnp.asarray(
            reference_unpack(got, format, channels, rotary), jnp.bfloat16
        )
        np.testing.assert_array_equal(
            np.asarray(back, np.float32), np.asarray(want, np.float32)
        )
