"""Public functions refuse wrong shapes and dtypes before anything is traced."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from pallas_kernels.codec_transform import api as codec
from pallas_kernels.compressed_attention import api as compressed
from pallas_kernels.indexer_topk import api as indexer
from pallas_kernels.kv_quant import api as kv_quant
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.lowering import lower
from pallas_kernels.morton import api as morton
from pallas_kernels.pool import api as pooling
from pallas_kernels.sparse_attention import api as sparse
from pallas_kernels.window_attention import api as window
from tests.pallas_kernels.kernel_arrays import abstract, integers


def _bytes(*shape):
    return abstract(*shape, dtype=jnp.uint8)


QUERY, KEY = abstract(2, 3, 4, 64), abstract(2, 5, 1, 64)
LAYOUT = record_layout("fp8", 64)
WINDOW = dict(window=4, scale=1.0, decay=None, contiguous=False)
INDEXER = (abstract(2, 3, 4, 16), abstract(2, 3, 4), abstract(2, 16, 256))

# Function, its dispatch, arrays, options, and one wrong array: its place, itself, its
# name, and what the message says was given and expected.
CASES = [
    (
        window.window_attention,
        window.DISPATCH,
        (QUERY, KEY, KEY, integers(2, 3), integers(2, 5)),
        WINDOW,
        (1, abstract(2, 5, 1, 32), "key", "bf16[2,5,1,32]", "b s k h"),
    ),
    (
        compressed.compressed_attention,
        compressed.DISPATCH,
        (QUERY, KEY, KEY, integers(2, 3)),
        dict(scale=1.0, static=False),
        (3, integers(2, 4), "visible", "i32[2,4]", "b t"),
    ),
    (
        sparse.sparse_attention,
        sparse.DISPATCH,
        (QUERY, KEY, KEY, integers(2, 3, 7)),
        dict(scale=1.0),
        (3, abstract(2, 3, 7), "chosen", "bf16[2,3,7]", "b t c"),
    ),
    (
        sparse.sparse_attention_packed,
        sparse.PACKED_DISPATCH,
        (QUERY, _bytes(2, 5, LAYOUT.sizes[-1])),
        dict(layout=LAYOUT, chosen=jnp.zeros((2, 3, 7), jnp.int32), scale=1.0),
        (1, _bytes(3, 5, 72), "records", "u8[3,5,72]", "b e r"),
    ),
    (
        sparse.masked_attention,
        sparse.MASKED_DISPATCH,
        (QUERY, KEY, KEY, abstract(2, 3, 5, dtype=jnp.bool)),
        dict(scale=1.0),
        (3, integers(2, 3, 5), "mask", "i32[2,3,5]", "b t e"),
    ),
    (
        pooling.pool,
        pooling.DISPATCH,
        (abstract(2, 3, 4, 128), abstract(2, 3, 4, 128)),
        {},
        (1, abstract(2, 3, 4), "score", "bf16[2,3,4]", "b g s c"),
    ),
    (
        pooling.overlapping_pool,
        pooling.OVERLAPPING_DISPATCH,
        (abstract(2, 3, 4, 256), abstract(2, 3, 4, 256)),
        {},
        (1, abstract(2, 3, 5, 256), "score", "bf16[2,3,5,256]", "b before_g s two_c"),
    ),
    (
        indexer.indexer_scores,
        indexer.SCORES_DISPATCH,
        INDEXER,
        {},
        (2, abstract(2, 256, 16), "key", "bf16[2,256,16]", "b c e"),
    ),
    (
        indexer.indexer_topk,
        indexer.DISPATCH,
        (*INDEXER, integers(2, 3)),
        dict(k=4),
        (1, abstract(2, 3, 5), "weight", "bf16[2,3,5]", "b t i"),
    ),
    (
        kv_quant.pack,
        kv_quant.PACK_DISPATCH,
        (abstract(64, 64),),
        dict(format="fp8"),
        (0, integers(64, 64), "x", "i32[64,64]", "*n c"),
    ),
    (
        kv_quant.unpack,
        kv_quant.UNPACK_DISPATCH,
        (_bytes(64, LAYOUT.sizes[-1]),),
        dict(layout=record_layout("fp8", 64, leading=("n",)), dtype=jnp.bfloat16),
        (0, integers(64, 72), "records", "i32[64,72]", "*n r"),
    ),
    (
        morton.encode,
        morton.ENCODE_DISPATCH,
        (abstract(2, 1024, dtype=jnp.uint32),),
        dict(bits=4),
        (0, integers(2, 1024), "coordinates", "i32[2,1024]", "d n"),
    ),
    (
        morton.decode,
        morton.DECODE_DISPATCH,
        (abstract(1024, dtype=jnp.uint32),),
        dict(dimensions=2, bits=4),
        (0, abstract(2, 4, dtype=jnp.uint32), "codes", "u32[2,4]", "n"),
    ),
    (
        codec.transform,
        codec.DISPATCH,
        (abstract(8, 8, 32),),
        dict(channels="hadamard"),
        (0, abstract(64, 32), "x", "bf16[64,32]", "n s c"),
    ),
    (
        codec.inverse,
        codec.INVERSE_DISPATCH,
        (abstract(8, 8, 32),),
        dict(tokens="cosine"),
        (0, integers(8, 8, 32), "x", "i32[8,8,32]", "n s c"),
    ),
    (
        codec.hadamard,
        codec.DISPATCH,
        (abstract(64, 32),),
        {},
        (0, _bytes(64, 32), "x", "u8[64,32]", "*n c"),
    ),
    (
        codec.transform_pack,
        codec.PACK_DISPATCH,
        (abstract(8, 8, 64),),
        dict(format="fp8"),
        (0, abstract(8, 64), "x", "bf16[8,64]", "n s c"),
    ),
    (
        codec.unpack_inverse,
        codec.UNPACK_DISPATCH,
        (_bytes(8, 8, LAYOUT.sizes[-1]),),
        dict(layout=record_layout("fp8", 64, leading=("n", "s"))),
        (0, abstract(8, 8, 72), "records", "bf16[8,8,72]", "n s r"),
    ),
]


def _call(case, implementation):
    function, _, _, options, _ = case
    return functools.partial(function, **options, implementation=implementation)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_wrong_arrays(case):
    """The same error for every implementation, and where none is named."""
    function, dispatch, arrays, _, (place, wrong, name, given, expected) = case
    arrays = [*arrays[:place], wrong, *arrays[place + 1 :]]
    for implementation in (None, *dispatch.names):
        with pytest.raises(TypeCheckError) as raised:
            lower(_call(case, implementation), *arrays)
        text = str(raised.value).split("-----")[0]
        assert f"{function.__module__}.{function.__name__}." in text
        assert f"parameter '{name}'" in text
        assert f"Actual value: {given}" in text
        assert f"'{expected}'" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_checks_leave_no_trace(case):
    """What is compiled is what would be without the checks."""
    function, _, arrays, *_ = case
    assert _text(_call(case, "xla"), arrays) == _text(
        _call((function.__wrapped__, *case[1:]), "xla"), arrays
    )


def _text(function, arrays):
    return jax.jit(lambda *arrays: function(*arrays)).lower(*arrays).as_text()


def test_groups_of_heads():
    """Key/value heads must divide the query heads, whatever computes."""
    key = abstract(2, 5, 3, 64)
    for call in (
        lambda q, k, i: window.window_attention(q, k, k, i[..., 0], i[:, 0], **WINDOW),
        lambda q, k, i: compressed.compressed_attention(
            q, k, k, i[..., 0], scale=1.0, static=False
        ),
        lambda q, k, i: sparse.sparse_attention(q, k, k, i, scale=1.0),
        lambda q, k, i: sparse.masked_attention(q, k, k, i > 0, scale=1.0),
    ):
        with pytest.raises(ValueError, match="4 query heads over 3 key/value heads"):
            lower(call, QUERY, key, integers(2, 3, 5))


@pytest.mark.parametrize("shape", [(2, 0, 4, 256), (2, 3, 4, 5)])
def test_nothing_overlaps(shape):
    with pytest.raises(ValueError, match="expected at least one group and an even"):
        lower(pooling.overlapping_pool, abstract(*shape), abstract(*shape))
