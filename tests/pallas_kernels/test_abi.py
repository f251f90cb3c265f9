"""Layouts: strides, hashes, checks that name both sides, conversions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import abi
from pallas_kernels.abi import Layout, LayoutError
from pallas_kernels.compressed_attention import api as compressed
from pallas_kernels.indexer_topk import api as indexer
from pallas_kernels.indexer_topk.api import indexer_topk
from pallas_kernels.sparse_attention import api as sparse
from pallas_kernels.window_attention import api as window

RECORDS = Layout(
    axes=("b", "e", "r"),
    sizes=(None, None, 584),
    dtype="uint8",
    quantization="record",
    alignment=8,
    ratio=4,
)


def test_strides_are_bytes():
    layout = Layout(axes=("b", "s", "h"), sizes=(None, 3, 5), dtype="bfloat16")
    assert layout.strides == (30, 10, 2)
    assert RECORDS.strides == (None, 584, 1)


def test_hash_sees_every_field():
    changed = dict(
        axes=("b", "r", "e"),
        sizes=(None, 7, 584),
        dtype="int8",
        quantization="none",
        alignment=4,
        ratio=128,
        version=2,
    )
    assert set(changed) == {field.name for field in dataclasses.fields(Layout)}
    hashes = {RECORDS.hash()}
    for name, value in changed.items():
        hashes.add(dataclasses.replace(RECORDS, **{name: value}).hash())
    assert len(hashes) == len(changed) + 1
    # Stored beside the data, so the same in every process and release.
    assert RECORDS.hash() == dataclasses.replace(RECORDS).hash() == "4b505a118cb70bdb"


@pytest.mark.parametrize(
    "array",
    [
        jnp.zeros((2, 3, 583), jnp.uint8),
        jnp.zeros((2, 584), jnp.uint8),
        jnp.zeros((2, 3, 584), jnp.int8),
    ],
)
def test_check_names_both_sides(array):
    with pytest.raises(LayoutError) as caught:
        RECORDS.check(array, "entries")
    text = str(caught.value)
    assert f"entries: given {array.dtype.name}{list(array.shape)}" in text
    assert "expected uint8[b, e, r=584] record, aligned to 8 bytes" in text


def test_check_while_tracing():
    def read(x):
        RECORDS.check(x, "entries")
        return x

    jax.eval_shape(read, abi.abstract(RECORDS, b=2, e=0))
    with pytest.raises(LayoutError):
        jax.eval_shape(read, jax.ShapeDtypeStruct((2, 1, 640), jnp.uint8))


def test_expect_names_each_field():
    other = dataclasses.replace(RECORDS, ratio=128, alignment=4)
    with pytest.raises(LayoutError) as caught:
        RECORDS.expect(other, "entries")
    assert "alignment 4, expected 8" in str(caught.value)
    assert "ratio 128, expected 4" in str(caught.value)
    assert other.hash() in str(caught.value)
    RECORDS.expect(dataclasses.replace(RECORDS), "entries")


def test_refused_descriptions():
    with pytest.raises(LayoutError, match="rank"):
        dataclasses.replace(RECORDS, axes=("b",))
    with pytest.raises(LayoutError, match="power of two"):
        dataclasses.replace(RECORDS, alignment=24)
    with pytest.raises(LayoutError, match="no multiple"):
        dataclasses.replace(RECORDS, alignment=64)


@pytest.mark.parametrize(
    ("alignment", "size"), [(1, 584), (16, 592), (64, 640), (128, 640), (256, 768)]
)
def test_aligned(alignment, size):
    layout = abi.aligned(RECORDS, alignment)
    assert layout.sizes[-1] == size and layout.alignment == alignment


def test_generations():
    """Unpadded 584-byte records cannot be copied in bulk, which only Hopper has."""
    assert abi.adapt(RECORDS, (8, 0)) == RECORDS
    assert abi.adapt(RECORDS, (9, 0)).sizes[-1] == 592
    assert not abi.bulk_copyable(RECORDS, (9, 0))
    assert abi.bulk_copyable(abi.adapt(RECORDS, (9, 0)), (9, 0))
    assert not abi.bulk_copyable(abi.adapt(RECORDS, (9, 0)), (8, 0))
    assert not abi.bulk_copyable(RECORDS, None)
    with pytest.raises(LayoutError, match=r"\(7, 5\): expected one of"):
        abi.adapt(RECORDS, (7, 5))


def test_padding_converts_and_converts_back():
    data = np.arange(2 * 3 * 584, dtype=np.uint8).reshape(2, 3, 584)
    wide = abi.aligned(RECORDS, 128)
    padded = abi.convert(jnp.asarray(data), RECORDS, wide)
    wide.check(padded, "padded")
    np.testing.assert_array_equal(np.asarray(padded)[..., 584:], 0)
    back = abi.convert(padded, wide, RECORDS)
    np.testing.assert_array_equal(np.asarray(back), data)


def test_conversion_needs_an_adapter():
    floats = Layout(axes=("b", "e"), sizes=(None, 4), dtype="float32")
    halves = dataclasses.replace(floats, dtype="bfloat16", version=-1)
    x = jnp.ones((2, 4))
    with pytest.raises(LayoutError, match="dtype 'float32', expected 'bfloat16'"):
        abi.convert(x, floats, halves)
    abi.register_adapter(floats, halves, lambda a: a.astype(jnp.bfloat16))
    assert abi.convert(x, floats, halves).dtype == jnp.bfloat16
    with pytest.raises(LayoutError):
        abi.convert(x.astype(jnp.int32), floats, halves)


def test_plain_numbers_are_not_cut():
    """Without a codec nothing says which of the channels are padding."""
    wide = Layout(axes=("b", "c"), sizes=(None, 8), dtype="float32")
    narrow = dataclasses.replace(wide, sizes=(None, 4))
    with pytest.raises(LayoutError):
        abi.convert(jnp.ones((1, 8)), wide, narrow)


def test_operation_checks_the_owners_layout():
    layout = Layout(axes=("b", "e", "c"), sizes=(None, None, None), dtype="float32")
    args = (jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1)), jnp.ones((1, 4, 4)))
    visible = jnp.ones((1, 1), jnp.int32)
    with pytest.raises(LayoutError, match=r"given axes \('b', 'e', 'c'\)"):
        indexer_topk(*args, visible, k=1, key_layout=layout)
    layout = dataclasses.replace(layout, axes=("b", "c", "e"), dtype="bfloat16")
    with pytest.raises(LayoutError, match="given float32"):
        indexer_topk(*args, visible, k=1, key_layout=layout)
    layout = dataclasses.replace(layout, dtype="float32")
    index, _ = indexer_topk(*args, visible, k=1, key_layout=layout)
    assert int(index[0, 0, 0]) == 0


QUERY, ENTRIES = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4))
PLACE, INDEX = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 3), jnp.int32)
SCORED = (jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1)), jnp.ones((1, 4, 3)))
CALLS = {
    "window_attention": lambda layout: window.window_attention(
        *(QUERY, ENTRIES, ENTRIES, PLACE, INDEX),
        window=2,
        scale=1.0,
        decay=None,
        contiguous=False,
        key_layout=layout,
    ),
    "compressed_attention": lambda layout: compressed.compressed_attention(
        *(QUERY, ENTRIES, ENTRIES, PLACE),
        scale=1.0,
        static=False,
        entry_layout=layout,
    ),
    "sparse_attention": lambda layout: sparse.sparse_attention(
        *(QUERY, ENTRIES, ENTRIES, INDEX[:, None]),
        scale=1.0,
        entry_layout=layout,
    ),
    "indexer_topk": lambda layout: indexer.indexer_topk(
        *SCORED, PLACE, k=1, key_layout=layout
    ),
    "indexer_scores": lambda layout: indexer.indexer_scores(*SCORED, key_layout=layout),
}


@pytest.mark.parametrize("op", CALLS)
def test_every_operation_checks(op):
    """Axes, version, codes, dtype and sizes of keys, in one operation as in another."""
    axes = indexer.KEY_AXES
    if not op.startswith("indexer"):
        axes = window.KEY_AXES if op == "window_attention" else sparse.ENTRY_AXES
    good = Layout(axes=axes, sizes=(None,) * len(axes), dtype="float32")
    CALLS[op](good)
    for change, message in (
        ({"axes": axes[::-1]}, "given axes"),
        ({"version": 0}, "given axes .* of version 0, expected"),
        ({"quantization": "int8"}, "given 'int8' codes, expected plain numbers"),
        ({"dtype": "bfloat16"}, r"given float32\[1, "),
        ({"sizes": (*good.sizes[:-1], 8)}, r"given float32\[1, "),
    ):
        with pytest.raises(LayoutError, match=f"{op} key: {message}"):
            CALLS[op](dataclasses.replace(good, **change))
