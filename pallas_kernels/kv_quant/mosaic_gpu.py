"""Packing and unpacking of bfloat16 rows on registers, without tensor cores.

Two neighbouring channels are read as one 32-bit word: their codes then meet in one lane
and are stored together, see `registers`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.device import Target
from pallas_kernels.kv_quant import registers, xla
from pallas_kernels.kv_quant.formats import Format, format_named
from pallas_kernels.kv_quant.registers import TILE
from pallas_kernels.launch import kernel, store
from pallas_kernels.register_tiles import load, load_rows
from pallas_kernels.tiles import by_tiles


def refuses_pack(
    target: Target, x: Any, *, format: str, rotary: int, size: int
) -> str | None:
    """Why rows are not packed by the kernel, or None."""
    del target, size
    if x.dtype != jnp.bfloat16:
        return f"packs bfloat16, not {x.dtype}"
    return _refuses_rotary(format_named(format), rotary)


def refuses_unpack(
    target: Target,
    records: Any,
    *,
    format: str,
    channels: int,
    rotary: int,
    dtype: Any,
) -> str | None:
    """Why records are not unpacked by the kernel, or None."""
    del target, channels
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"unpacks to bfloat16, not {jnp.dtype(dtype)}"
    spec = format_named(format)
    # Four lanes read a row's rotary channels, two words each.
    unit = 8 if rotary else 4
    if records.shape[1] % unit:
        return f"reads records of a multiple of {unit} bytes, not {records.shape[1]}"
    return _refuses_rotary(spec, rotary)


def _refuses_rotary(spec: Format, rotary: int) -> str | None:
    if rotary % 16:
        return f"takes a multiple of 16 rotary channels, not {rotary}"
    if rotary and spec.bits == 4:
        return f"keeps no rotary channels beside {spec.name} codes"
    return None


def pack(x: Array, *, format: str, rotary: int, size: int) -> Array:
    """uint8[n, size] records of bfloat16[n, c]."""
    rest = functools.partial(xla.pack, format=format, rotary=rotary, size=size)
    run = functools.partial(_pack, format_named(format), rotary=rotary, size=size)
    return by_tiles(run, rest, TILE, x)


def unpack(
    records: Array, *, format: str, channels: int, rotary: int, dtype: Any
) -> Array:
    """bfloat16[n, channels] of uint8[n, r] records."""

    def rest(rows: Array) -> Array:
        values = xla.unpack(rows, format=format, channels=channels, rotary=rotary)
        return values.astype(dtype)

    run = functools.partial(
        _unpack, format_named(format), channels=channels, rotary=rotary
    )
    return by_tiles(run, rest, TILE, records)


def _pack(spec: Format, x: Array, *, rotary: int, size: int) -> Array:
    n, channels = x.shape
    # A record is a whole number of words.
    word = registers.word(spec)
    width = jnp.dtype(word).itemsize
    words = -(-size // width)
    blocks, pairs = (channels - rotary) // spec.block, spec.block // 2
    code_bytes, scale_at = (
        spec.code_bytes(channels, rotary),
        spec.scale_at(channels, rotary),
    )
    used = scale_at + blocks * spec.scale_bytes

    def body(pair_ref, half_ref, out_ref):
        rows = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)

        def put(column: Any, value: Array) -> None:
            store(out_ref.at[rows, column], value.astype(word))

        scales: list[Array] = []
        for block in range(blocks):
            pair = load(pair_ref.at[rows, pl.ds(block * pairs, pairs)])
            codes, scale = registers.encode(
                spec, pair << 16, pair & jnp.uint32(0xFFFF0000)
            )
            put(pl.ds(block * pairs, pairs), codes)
            scales += scale
        if rotary:
            start = channels - rotary
            tail = load(half_ref.at[rows, pl.ds(start, rotary)])
            put(pl.ds(code_bytes // width, rotary), tail)
        # Zeros, but not a constant: those cannot be stored as one value a row.
        scales += [scales[0] >> 8] * (words * width - used)
        registers.put_scales(put, spec, scales, scale_at)

    out = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, words), word),
        grid=(n // TILE,),
        grid_names=("tile",),
        kernel_name=f"kv_quant_pack_{spec.name}",
        cost_estimate=pl.CostEstimate(
            flops=8 * n * channels,
            transcendentals=0,
            bytes_accessed=n * (2 * channels + size),
        ),
    )(_words(x, jnp.uint32), _words(x, jnp.uint16))
    return _words(out, jnp.uint8)[:, :size]


def _unpack(spec: Format, records: Array, *, channels: int, rotary: int) -> Array:
    n, size = records.shape
    word = registers.word(spec)
    blocks, pairs = (channels - rotary) // spec.block, spec.block // 2
    code_bytes, scale_at = (
        spec.code_bytes(channels, rotary),
        spec.scale_at(channels, rotary),
    )

    def body(word_ref, byte_ref, tail_ref, out_ref):
        rows = pl.ds(jax.lax.axis_index("tile") * TILE, TILE)

        def put(column: Any, value: Array) -> None:
            store(out_ref.at[rows, column], value)

        for block in range(blocks):
            codes = load(word_ref.at[rows, pl.ds(block * pairs, pairs)])
            at = scale_at + block * spec.scale_bytes
            scale = [
                load_rows(byte_ref.at[rows, at + i]).astype(jnp.uint32)
                for i in range(spec.scale_bytes)
            ]
            low, high = (
                registers.bfloat16_bits(half)
                for half in registers.decode(spec, codes.astype(jnp.uint32), scale)
            )
            put(pl.ds(block * pairs, pairs), low | high << 16)
        if rotary:
            tail = load(tail_ref.at[rows, pl.ds(code_bytes // 4, rotary // 2)])
            put(pl.ds((channels - rotary) // 2, rotary // 2), tail)

    out = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, channels // 2), jnp.uint32),
        grid=(n // TILE,),
        grid_names=("tile",),
        kernel_name=f"kv_quant_unpack_{spec.name}",
        cost_estimate=pl.CostEstimate(
            flops=6 * n * channels,
            transcendentals=0,
            bytes_accessed=n * (2 * channels + size),
        ),
    )(_words(records, word), records, _words(records, jnp.uint32))
    return _words(out, jnp.bfloat16)


def _words(x: Array, dtype: Any) -> Array:
    """Rows seen as elements of another width: no bytes move."""
    old, new = x.dtype.itemsize, jnp.dtype(dtype).itemsize
    if new > old:
        x = x.reshape(len(x), x.shape[1] * old // new, new // old)
    width = x.size * old // len(x) // new
    return jax.lax.bitcast_convert_type(x, dtype).reshape(len(x), width)
