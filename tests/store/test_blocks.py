"""The block object: its bytes, and that no bit of it can change unseen."""

import dataclasses
import hashlib
import json
import struct

import google_crc32c
import ml_dtypes
import numpy as np
import pytest

import hybrid_attn.store as stores
from hybrid_attn.store import blocks
from tests.store import samples

BLOCK = stores.Block(
    "csa4.entries",
    "0123456789abcdef",
    "00112233445566778899aabbccddeeff",
    1,
    8,
    bytes(range(50)),
    "decode",
    alignment=64,
    parent="ff" * 16,
    tokens="ab" * 16,
)


def test_golden_bytes():
    """The format is a contract: these bytes lie on disks."""
    data = blocks.encode(BLOCK, 5, samples.MODEL)
    assert len(data) == 448
    magic, version, crc, header_crc, size, total = struct.unpack_from("<8sIIIIQ", data)
    assert (magic, version, total) == (b"HYATBLK\n", 1, 448)
    header = json.loads(data[32 : 32 + size])
    assert header == {
        "alignment": 64,
        "chain": "00112233445566778899aabbccddeeff",
        "generation": 5,
        "group": "csa4.entries",
        "index": 1,
        "layout": "0123456789abcdef",
        "length": 8,
        "model_id": samples.MODEL,
        "origin": "decode",
        "parent": "ff" * 16,
        "payload_bytes": 50,
        "tokens": "ab" * 16,
    }
    assert data[384:434] == BLOCK.payload
    assert data[434:] == bytes(14)
    assert crc == google_crc32c.value(data[:12] + data[16:])
    assert header_crc == google_crc32c.value(data[:12] + data[20:384])
    assert hashlib.sha256(data).hexdigest() == GOLDEN


GOLDEN = "b137d002fd476f7f707be269e71a2958640e4adc418b8a8e2c5e0f5a39bd78e4"


def test_crc32c_is_the_known_one():
    assert blocks.crc32c(b"123456789") == 0xE3069283
    assert blocks.crc32c(b"1234", memoryview(b"567"), b"", b"89") == 0xE3069283


def test_every_single_bit_is_covered():
    data = blocks.encode(BLOCK, 5, samples.MODEL)
    assert blocks.decode("object", data).data.tobytes() == BLOCK.payload
    reasons = set()
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(stores.BlockError) as caught:
            blocks.decode("object", bytes(broken))
        reasons.add(caught.value.reason)
    assert reasons == {"magic", "version", "size", "crc"}


def test_every_length_but_the_right_one_is_refused():
    data = blocks.encode(BLOCK, 5, samples.MODEL)
    for length in range(len(data)):
        with pytest.raises(stores.BlockError):
            blocks.decode("object", data[:length])
    with pytest.raises(stores.BlockError, match="449 bytes, expected 448"):
        blocks.decode("object", data + b"\0")


@pytest.mark.parametrize("alignment", [64, 128, 256, 4096])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 5000])
def test_sizes_are_multiples_of_the_alignment(alignment, size):
    block = dataclasses.replace(BLOCK, payload=bytes(size), alignment=alignment)
    data = blocks.encode(block, 0, samples.MODEL)
    assert len(data) % alignment == 0
    found = blocks.decode("object", data)
    assert found.data.shape == (size,) and not found.data.flags.writeable
    assert found.header.payload_bytes == size


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_payloads_are_any_bytes(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for form in (array, array.tobytes(), bytearray(array.tobytes())):
        block = dataclasses.replace(BLOCK, payload=form)
        found = blocks.decode("object", blocks.encode(block, 0, samples.MODEL))
        assert found.data.tobytes() == array.tobytes()
    turned = dataclasses.replace(BLOCK, payload=array.T)
    found = blocks.decode("object", blocks.encode(turned, 0, samples.MODEL))
    assert found.data.tobytes() == array.T.tobytes()


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("group", "../up", "group='../up': expected letters"),
        ("layout", "XYZ", "layout='XYZ': expected 8 to 64 hex digits"),
        ("chain", "ab", "chain='ab': expected 32 hex digits"),
        ("index", -1, "block -1"),
        ("length", 0, "length 0"),
        ("parent", "", "block 1 has parent ''"),
        ("origin", "guess", "origin='guess'"),
        ("alignment", 100, "alignment=100: expected a power of two"),
    ],
)
def test_a_block_that_could_not_be_stored_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BLOCK, **{field: value})


def test_headers_are_read_from_the_first_bytes_alone():
    data = blocks.encode(BLOCK, 5, samples.MODEL)
    header, start, total = blocks.read_header("object", data[:384])
    assert (header.chain, start, total) == (BLOCK.chain, 384, 448)
    for bit in range(384 * 8):
        broken = bytearray(data[:384])
        broken[bit // 8] ^= 1 << bit % 8
        if 12 <= bit // 8 < 16:
            continue  # the whole object's CRC
        with pytest.raises(stores.BlockError):
            blocks.read_header("object", bytes(broken))
