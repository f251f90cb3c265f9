"""All cases of a profile: shapes for CPU cores, for a GPU, and tiny ones for tests."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from experiments.bench_kernels import entries, indexer, records, window
from experiments.bench_kernels.case import Case
from experiments.bench_kernels.heads import Heads


def cases(profile: str) -> Iterator[Case]:
    """The cases of "cpu", "gpu" or "tiny", in the order of their operations."""
    yield from {"cpu": _cpu, "gpu": _gpu, "tiny": _tiny}[profile]()


def _cpu() -> Iterator[Case]:
    four, one = Heads(4, 4, 64, jnp.float32), Heads(4, 1, 64, jnp.float32)
    yield window.prefill_window("prefill_16k_w128", four, 1 << 14, 128, expected=20.0)
    yield window.decode_window("decode_w128", four, 128, batch=4)
    yield window.decay("decay", four, 1 << 14, 128, expected=7.0)
    yield entries.prefill_compressed("prefill_4k_m16", one, 4096, 16)
    yield entries.decode_compressed("decode_256k_m4", one, 1 << 16)
    yield entries.mass_compressed("mass", one, 1, 1 << 16, 64)
    yield entries.mass_compressed("mass_prefill", one, 256, 8192, 64)
    yield entries.decode_sparse("decode_256k_m4_k512", one, 1 << 18, 4, 512)
    yield entries.prefill_sparse("prefill_k512", one, 256, 1 << 14, 512)
    # Of DeepSeek-V4's heads; the small ones take little longer than starting a call.
    flash = Heads(64, 1, 512, jnp.float32, shared=True)
    yield entries.mass_sparse("mass", flash, 1, 1 << 14, 512, 64)
    yield entries.mass_sparse("mass_small", one, 1, 1 << 16, 512, 64)
    yield entries.mass_sparse("mass_prefill", one, 256, 1 << 14, 512, 64)
    for heads, dim in ((4, 32), (64, 128)):
        yield indexer.choose(
            f"256k_{heads}x{dim}",
            t=1,
            entries=1 << 18,
            heads=heads,
            dim=dim,
            k=512,
            dtype=jnp.float32,
        )
    yield indexer.choose(
        "128_of_16k_4x32",
        t=128,
        entries=1 << 14,
        heads=4,
        dim=32,
        k=512,
        dtype=jnp.float32,
    )
    yield from _streams(2048, 1 << 20, jnp.float32)


def _gpu() -> Iterator[Case]:
    flash = Heads(64, 1, 512, jnp.bfloat16, shared=True)
    plain = Heads(32, 8, 128, jnp.bfloat16)
    yield window.prefill_window("prefill_4k_w128", flash, 4096, 128)
    yield window.prefill_window("prefill_8k_w512_32x128", plain, 8192, 512)
    yield window.decode_window("decode_w128", flash, 128, batch=64)
    yield window.decay("decay", flash, 1 << 14, 128)
    yield entries.prefill_compressed("prefill_8k_m128", flash, 8192, 128)
    yield entries.decode_compressed("decode_256k_m128", flash, 2048, batch=64)
    yield entries.decode_compressed("decode_64k_32x128", plain, 1 << 16)
    yield entries.mass_compressed("mass", flash, 1, 1 << 16, 64)
    yield entries.decode_sparse("decode_256k_m4_k512", flash, 1 << 18, 4, 512)
    yield entries.prefill_sparse("prefill_k512", flash, 1024, 1 << 14, 512)
    yield entries.mass_sparse("mass", flash, 1, 1 << 16, 512, 64)
    for t in (1, 128):
        yield indexer.choose(
            f"{t}_of_32k_64x128" if t > 1 else "256k_64x128",
            t=t,
            entries=1 << 18 if t == 1 else 1 << 15,
            heads=64,
            dim=128,
            k=512,
            dtype=jnp.bfloat16,
        )
    yield from _streams(1 << 15, 1 << 24, jnp.bfloat16)


def _tiny() -> Iterator[Case]:
    heads = Heads(2, 1, 8, jnp.float32)
    yield window.prefill_window("prefill_16k_w128", heads, 64, 16)
    yield window.decode_window("decode_w128", heads, 16, batch=2)
    yield entries.prefill_compressed("prefill_4k_m16", heads, 64, 4)
    yield entries.decode_compressed("decode_256k_m4", heads, 64)
    yield entries.mass_compressed("mass", heads, 1, 64, 8)
    yield entries.decode_sparse("decode_256k_m4_k512", heads, 256, 4, 16)
    yield indexer.choose(
        "256k_4x32", t=1, entries=64, heads=2, dim=4, k=8, dtype=jnp.float32
    )
    yield records.morton_encode(64, 3, 10)
    yield records.unpack(8, 512, "fp8", 64, jnp.float32)


def _streams(rows: int, points: int, dtype: Any) -> Iterator[Case]:
    """Operations whose time goes with the bytes."""
    yield records.pool("m4", rows, 4, 512, dtype, overlap=False)
    yield records.pool("m4_overlapping", rows, 4, 512, dtype, overlap=True)
    for format, channels, rotary in (
        ("int8", 512, 64),
        ("int4", 512, 0),
        ("fp8", 512, 64),
        ("fp4", 128, 0),
    ):
        count = 2 * rows * 512 // channels
        yield records.pack(count, channels, format, rotary, dtype)
        yield records.unpack(count, channels, format, rotary, dtype)
    yield records.morton_encode(points, 3, 10)
    yield records.morton_decode(points, 3, 10)
    yield records.transform(rows // 8, 64, 128, dtype)
    yield records.hadamard(8 * rows, 128, dtype)
