"""Sizes at which lowering failed: refused with a reason, or served."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.codec_transform import api as codec
from pallas_kernels.codec_transform.reference import reference_transform
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.interpret import interpreted
from pallas_kernels.kv_quant.api import unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.lowering import kernels, lower
from pallas_kernels.pool.api import overlapping_pool, pool
from pallas_kernels.sparse_attention.api import sparse_attention_packed
from tests.pallas_kernels.kernel_arrays import abstract, integers

NAMED = dict(implementation="mosaic_gpu")


def _packed(alignment, **options):
    """Lowers attention over records of 584 bytes, padded."""
    layout = record_layout("fp8", 512, rotary=64, alignment=alignment)

    def call(query, records, chosen):
        return sparse_attention_packed(
            query, records, layout, chosen, scale=0.1, **options
        )

    records = abstract(1, 64, layout.sizes[-1], dtype=jnp.uint8)
    return lower(call, abstract(1, 1, 64, 512), records, integers(1, 1, 32))


def test_wide_records():
    """A bulk copy moves 256 words; wider records are read by XLA."""
    assert kernels(_packed(1024, **NAMED)) == 1
    with pytest.raises(Unsupported, match="records of up to 1024 bytes, not 2048"):
        _packed(2048, **NAMED)
    with pytest.warns(RuntimeWarning, match="not 4096; falls back") as warned:
        assert kernels(_packed(4096)) == kernels(_packed(4096)) == 0
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.parametrize(
    ("format", "channels", "rotary", "alignment", "served"),
    [
        ("int8", 448, 128, 4, False),
        ("int8", 144, 16, 2, False),
        ("int8", 448, 128, 8, True),
        ("int8", 512, 64, 1, True),
        ("int8", 128, 0, 1, True),
        ("int4", 96, 0, 1, True),
    ],
)
def test_rotary_channels(format, channels, rotary, alignment, served):
    """Rotary channels are read as 64-bit words of a row."""
    layout = record_layout(
        format, channels, rotary=rotary, leading=("n",), alignment=alignment
    )
    run = functools.partial(unpack, layout=layout, dtype=jnp.bfloat16, **NAMED)
    records = abstract(64, layout.sizes[-1], dtype=jnp.uint8)
    if served:
        assert kernels(lower(run, records)) == 1
        return
    reason = f"a multiple of 8 bytes, not {layout.sizes[-1]}"
    with pytest.raises(Unsupported, match=reason):
        lower(run, records)


@pytest.mark.parametrize(("n", "s"), [(65, 1), (130, 2), (65, 4)])
@pytest.mark.parametrize("function", ["transform", "inverse", "transform_pack"])
def test_rows_beyond_the_last_tile(function, n, s):
    """Copies take 8 rows as one; other numbers of rows are cut before."""
    options = {"format": "int8"} if function == "transform_pack" else {}
    run = functools.partial(
        getattr(codec, function), tokens="hadamard", **NAMED, **options
    )
    assert kernels(lower(run, abstract(n, s, 64))) == 1


def test_a_cut_tile(normal):
    """Every row is transformed, also those that fill no tile."""
    x = jnp.asarray(normal(67, 1, 16), jnp.bfloat16)
    with interpreted():
        got = np.asarray(codec.transform(x, channels="cosine", **NAMED))
    np.testing.assert_allclose(got, reference_transform(x, None, "cosine"), atol=3e-6)


@pytest.mark.parametrize(
    ("function", "shape"), [(pool, (2, 3, 0, 128)), (overlapping_pool, (2, 4, 0, 256))]
)
def test_no_slots(function, shape):
    """Nothing is read, and the sum over no slots is zero."""
    x = jnp.zeros(shape)
    assert kernels(lower(functools.partial(function, **NAMED), x, x)) == 0
    with interpreted():
        got = np.asarray(function(x, x, **NAMED))
    np.testing.assert_array_equal(got, np.zeros((2, 3, 128)))
