"""Resident copies: a flip in a sealed array is found, wherever the array lives."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hybrid_attn.store.scrub import Finding, Scrubber, Sealed


def block(number: int, kind=np.array) -> Sealed:
    rng = np.random.default_rng(number)
    return Sealed.of(
        f"block {number}",
        {
            "entries": kind(rng.normal(size=(2, 3)).astype(np.float32)),
            "index": kind(rng.normal(size=(4,)).astype(ml_dtypes.bfloat16)),
        },
    )


def test_every_bit_of_a_host_copy_counts():
    sealed = block(0)
    assert sealed.damaged() == [] and sealed.nbytes == 32
    for name, array in sealed.arrays.items():
        raw = array.reshape(-1).view(np.uint8)
        for bit in range(raw.size * 8):
            raw[bit // 8] ^= 1 << bit % 8
            assert sealed.damaged() == [name]
            raw[bit // 8] ^= 1 << bit % 8
    assert sealed.damaged() == []


def test_device_copies_are_checked_through_their_bytes():
    host, device = block(0), block(0, jnp.asarray)
    assert dict(host.crcs) == dict(device.crcs) and device.damaged() == []
    changed = {**device.arrays, "index": device.arrays["index"].at[2].set(9)}
    assert Sealed(device.name, changed, device.crcs).damaged() == ["index"]


def test_the_scrubber_reaches_every_block_within_two_rounds():
    found = []
    scrubber = Scrubber(report=found.append)
    blocks = [block(number) for number in range(20)]
    for sealed in blocks:
        scrubber.add(sealed)
    assert scrubber.scrub() == [] and scrubber.checked_bytes == 20 * 32
    assert scrubber.scrub(5) == [] and scrubber.checked_bytes == 25 * 32
    blocks[7].arrays["entries"][1, 1] += 1
    rounds = 0
    while not found:
        rounds += 1
        assert scrubber.scrub(4) == found
    assert rounds <= 10
    assert found == [Finding("block 7", "entries")]
    # It is not watched until it is added anew.
    assert scrubber.scrub() == []
    scrubber.add(block(7))
    scrubber.remove("block 3")
    scrubber.remove("block 3")
    before = scrubber.checked_bytes
    assert scrubber.scrub(100) == []
    assert scrubber.checked_bytes - before == 19 * 32
    with pytest.raises(ValueError, match="sample=-1"):
        scrubber.scrub(-1)
