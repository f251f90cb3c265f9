"""Products of small bases with tiles of 64 rows, fused with packing and unpacking.

The operands of the tensor cores are bfloat16. A float32 operand is the sum of three
bfloat16 parts, cut from its bits; the products of parts that matter in float32 are
added up in float32. Codes of 4 bits need the even and the odd channels apart: a basis
with its columns (or rows) so divided gives (or takes) them, and no lane is moved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_quant import registers
from pallas_kernels.kv_quant.codes import to_bits
from pallas_kernels.kv_quant.formats import Format
from pallas_kernels.kv_quant.registers import TILE
from pallas_kernels.launch import PROCESSORS, kernel, store
from pallas_kernels.register_tiles import load, load_rows

PARTS = 3
# Rows that the copies into shared memory take as one.
_COPIED_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a call is divided.

    Attributes:
      blocks: for each processor; each goes over many tiles.
      stages: tiles of rows in shared memory; records are read directly.
    """

    blocks: int = 1
    stages: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a kernel does.

    Attributes:
      width: channels, a multiple of 16.
      tokens: rows of a group if their axis is transformed, a divisor of 64; else 0.
      channels: whether that axis is transformed.
      packs, unpacks: the format of the records written or read; None for numbers.
    """

    width: int
    tokens: int
    channels: bool
    packs: Format | None = None
    unpacks: Format | None = None

    @property
    def halves(self) -> int:
        """How many ways the basis of the channels is divided."""
        return 1 if self.packs is None and self.unpacks is None else 2

    @property
    def columns(self) -> int:
        """Channels of one product."""
        return self.width // (1 if self.packs is None else 2)

    @property
    def depth(self) -> int:
        """Channels that one product sums over."""
        return self.width // (1 if self.unpacks is None else 2)

    @property
    def value_parts(self) -> int:
        """Parts of a number that is read: codes of 8 bits times 8 bits of scale."""
        exact = self.unpacks is None or self.unpacks.scale_bytes == 1
        return 1 if exact else 2

    @property
    def poisons(self) -> bool:
        """Whether a tile holds groups that must not see each other's NaN."""
        return 0 < self.tokens < TILE

    def shared_bytes(self, config: Config) -> int:
        """Shared memory of a block, barriers aside."""
        count = config.stages * self.width
        if self.unpacks is not None:
            count = 2 * self.value_parts * self.depth
        if self.tokens:
            count += (PARTS + 1) * (TILE + self.columns)
        if self.channels:
            count += self.halves * PARTS * self.depth * self.columns // TILE
        return 2 * TILE * count


def parts(x: Array, count: int = PARTS) -> list[Array]:
    """bfloat16 arrays that add up to float32 ``x``, three of them exactly."""
    out = []
    for _ in range(count):
        # Of the bits: compilers drop a conversion to bfloat16 and back.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        out.append(part.astype(jnp.bfloat16))
        x = x - part
    return out


def products(plan: Plan, channels: Array | None, tokens: Array | None) -> list[Array]:
    """The bases as the kernel reads them.

    Args:
      channels: float32[c, c], multiplied from the right; tokens: float32[s, s], from
        the left.

    Returns:
      those given of bfloat16[halves · PARTS, depth, columns] and bfloat16[PARTS + 1,
      64, 64]: block-diagonal, and the ones of its blocks.
    """
    out = []
    if channels is not None:
        halves = [channels]
        if plan.packs is not None:
            halves = [channels[:, ::2], channels[:, 1::2]]
        elif plan.unpacks is not None:
            halves = [channels[::2], channels[1::2]]
        out.append(jnp.stack([part for half in halves for part in parts(half)]))
    if tokens is not None:
        groups = jnp.eye(TILE // plan.tokens, dtype=jnp.float32)
        ones = jnp.kron(groups, jnp.ones_like(tokens)).astype(jnp.bfloat16)
        out.append(jnp.stack([*parts(jnp.kron(groups, tokens)), ones]))
    return out


def run(
    plan: Plan, rows: Array, bases: list[Array], size: int, *, config: Config
) -> Array:
    """The product for every whole tile of rows.

    Args:
      rows: bfloat16[n, c], or uint8[n, r] records to unpack.
      bases: of `products`.
      size: bytes of a record to write.

    Returns:
      float32[n, c], or words [n, ...] of records. Rows of a partial tile are not
      written.
    """
    n = len(rows)
    tiles, width = n // TILE, plan.width
    # Rows beyond the last tile are not read, and are in the way of the copies.
    if plan.unpacks is None and n % _COPIED_ROWS:
        rows = rows[: tiles * TILE]
    grid = min(tiles, PROCESSORS * config.blocks)
    inputs, scratch = _inputs(plan, rows, config)
    if plan.packs is None:
        out_type = jax.ShapeDtypeStruct((n, width), jnp.float32)
    else:
        word = registers.word(plan.packs)
        words = size // jnp.dtype(word).itemsize
        out_type = jax.ShapeDtypeStruct((n, words), word)
    layout = _transforms(plan)
    scratch += [
        plgpu.SMEM(base.shape, jnp.bfloat16, transforms=layout) for base in bases
    ]
    if plan.tokens:
        shape = (PARTS + 1, TILE, plan.columns)
        scratch.append(plgpu.SMEM(shape, jnp.bfloat16, transforms=layout))
    scratch.append(plgpu.Barrier(num_barriers=config.stages))
    scratch.append(plgpu.Barrier(num_barriers=sum(len(base) for base in bases)))

    def body(*refs):
        input_refs, refs = refs[: len(inputs)], refs[len(inputs) :]
        base_refs, refs = refs[: len(bases)], refs[len(bases) :]
        out_ref, row_smem, *smem, row_barrier, base_barrier = refs
        channel_smem = smem.pop(0) if plan.channels else None
        token_smem, part_smem = smem if plan.tokens else (None, None)
        block = jax.lax.axis_index("block")
        steps = (tiles - block + (grid - 1)) // grid

        def tile_of(i):
            return pl.ds((block + i * grid) * TILE, TILE)

        def fetch(i):
            slot = jax.lax.rem(i, config.stages)
            plgpu.copy_gmem_to_smem(
                input_refs[0].at[tile_of(i)], row_smem.at[slot], row_barrier.at[slot]
            )

        copies = [
            (base_ref.at[i], target.at[i])
            for base_ref, target in zip(
                base_refs, filter(None, (channel_smem, token_smem)), strict=True
            )
            for i in range(base_ref.shape[0])
        ]
        for i, (source, target) in enumerate(copies):
            plgpu.copy_gmem_to_smem(source, target, base_barrier.at[i])
        if plan.unpacks is None:
            for i in range(config.stages):
                pl.when(i < steps)(lambda i=i: fetch(jnp.int32(i)))
        for i in range(len(copies)):
            plgpu.barrier_wait(base_barrier.at[i])

        @pl.loop(0, steps)
        def _step(i):
            if plan.unpacks is None:
                slot = jax.lax.rem(i, config.stages)
                plgpu.barrier_wait(row_barrier.at[slot])
                operands = [row_smem.at[slot]]
            else:
                operands = _unpack(plan, input_refs, row_smem, tile_of(i))
            out = []
            for half in range(1 if plan.packs is None else 2):
                if channel_smem is None:
                    value = load(operands[0]).astype(jnp.float32)
                else:
                    value = _by_channels(plan, operands, channel_smem, half)
                if token_smem is not None:
                    value = _by_tokens(plan, value, token_smem, part_smem)
                out.append(value)
            if plan.unpacks is None:
                pl.when(i + config.stages < steps)(lambda: fetch(i + config.stages))
            if plan.packs is None:
                store(out_ref.at[tile_of(i)], out[0])
            else:
                _pack(plan, out, out_ref, tile_of(i), size)

    flops = 2 * n * (width * width * PARTS + TILE * width * 2 * PARTS)
    return kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",),
        kernel_name="codec_transform",
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=rows.size * rows.dtype.itemsize
            + out_type.size * out_type.dtype.itemsize,
        ),
    )(*inputs, *bases)


def _inputs(plan: Plan, rows: Array, config: Config) -> tuple[list[Array], list[Any]]:
    layout = _transforms(plan)
    if plan.unpacks is None:
        shape = (config.stages, TILE, plan.width)
        return [rows], [plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)]
    word = registers.word(plan.unpacks)
    words = rows
    if jnp.dtype(word).itemsize == 2:
        words = rows.reshape(len(rows), rows.shape[1] // 2, 2)
        words = jax.lax.bitcast_convert_type(words, word)
    shape = (2 * plan.value_parts, TILE, plan.depth)
    return [words, rows], [plgpu.SMEM(shape, jnp.bfloat16, transforms=layout)]


def _unpack(plan: Plan, refs: Any, smem: Any, rows: Any) -> list[Any]:
    """Even, then odd channels in shared memory, each in its parts."""
    spec = plan.unpacks
    assert spec is not None
    pairs = spec.block // 2
    for block in range(plan.width // spec.block):
        at = pl.ds(block * pairs, pairs)
        codes = load(refs[0].at[rows, at]).astype(jnp.uint32)
        first = spec.scale_at(plan.width, 0) + block * spec.scale_bytes
        scale = [
            load_rows(refs[1].at[rows, first + i]).astype(jnp.uint32)
            for i in range(spec.scale_bytes)
        ]
        for half, value in enumerate(registers.decode(spec, codes, scale)):
            for i, part in enumerate(parts(value, plan.value_parts)):
                smem[half * plan.value_parts + i, :, at] = part
    plgpu.commit_smem()
    return [smem.at[i] for i in range(2 * plan.value_parts)]


def _by_channels(plan: Plan, operands: list[Any], basis: Any, half: int) -> Array:
    def multiply(acc):
        for i, operand in enumerate(operands):
            side, value = divmod(i, plan.value_parts)
            # Records are read by halves, and written by halves.
            first = PARTS * (side if plan.unpacks is not None else half)
            for part in range(PARTS - value):
                plgpu.wgmma(acc, operand, basis.at[first + part])
        return acc[...]

    shape = (TILE, plan.columns)
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _by_tokens(plan: Plan, value: Array, basis: Any, smem: Any) -> Array:
    # Rows in bfloat16 are their own only part.
    count = PARTS if plan.channels else 1
    if plan.poisons:
        size = to_bits(value) & 0x7FFFFFFF
        finite = size < 0x7F800000
        zero = jnp.zeros_like(value)
        bad = jnp.where(finite, zero, jnp.ones_like(value))
        value = jnp.where(finite, value, zero)
        smem[PARTS] = bad.astype(jnp.bfloat16)
    for i, part in enumerate(parts(value, count)):
        smem[i] = part
    plgpu.commit_smem()

    def multiply(acc):
        for i in range(count):
            for part in range(PARTS - i):
                plgpu.wgmma(acc, basis.at[part], smem.at[i])
        return acc[...]

    def spread(acc):
        plgpu.wgmma(acc, basis.at[PARTS], smem.at[PARTS])
        return acc[...]

    shape = (TILE, plan.columns)
    accumulator = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    out = pl.run_scoped(multiply, accumulator)
    if plan.poisons:
        # A number that is not finite makes its own group NaN and no other.
        bad = pl.run_scoped(spread, accumulator)
        out = jnp.where(bad > 0.0, jnp.full_like(out, jnp.nan), out)
    return out


def _pack(plan: Plan, halves: list[Array], out_ref: Any, rows: Any, size: int) -> None:
    spec = plan.packs
    assert spec is not None

    def put(column: Any, value: Array) -> None:
        value = value.astype(registers.word(spec))
        store(out_ref.at[rows, column], value)

    pairs = spec.block // 2
    scales: list[Array] = []
    for block in range(plan.width // spec.block):
        at = slice(block * pairs, (block + 1) * pairs)
        even, odd = (to_bits(half[:, at]) for half in halves)
        codes, scale = registers.encode(spec, even, odd)
        put(pl.ds(block * pairs, pairs), codes)
        scales += scale
    first = spec.scale_at(plan.width, 0)
    # Zeros, but not a constant: those cannot be stored as one value a row.
    scales += [scales[0] >> 8] * (size - first - len(scales))
    registers.put_scales(put, spec, scales, first)


def _transforms(plan: Plan) -> tuple[Any, Any]:
    # All operands of a product need the same swizzle.
    narrow = min(plan.depth, plan.columns)
    if plan.unpacks is not None:
        # Written block by block.
        narrow = plan.unpacks.block // 2
    width = next(w for w in (64, 32, 16) if narrow % w == 0)
    return (
        plgpu.TilingTransform((8, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(  # pyright: ignore[reportAbstractUsage]
            plgpu.find_swizzle(16 * width)
        ),
    )
