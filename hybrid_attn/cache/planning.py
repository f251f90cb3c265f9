"""How a cache is cut and kept on a given memory: blocks, slots, alignment, staging."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from hybrid_attn.cache.alignment import CANDIDATES
from hybrid_attn.cache.layout import CacheLayout
from hybrid_attn.cache.spec import CacheSpec

Kind = Literal["cpu", "cuda", "rocm", "tpu", "null"]

DISK_ALIGNMENT = 4096
"""Bytes; what direct I/O asks of files."""
# A copy of a block should last this long, or its launch outweighs it: seconds.
_COPY_SECONDS = 100e-6
# One block is filled while another is on its way.
_BUFFERS = 2
_LEAST_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What a plan depends on.

    Attributes:
      kind: of the adapter.
      name: of the device, for messages.
      total_bytes, free_bytes: memory.
      page_bytes: granule of allocation.
      line_bytes: cache line, or what the device moves at least.
      copy_bandwidth: bytes a second from host memory into it.
      pinned_limit: bytes of host memory that may be locked for copies.
    """

    kind: Kind
    name: str
    total_bytes: int
    free_bytes: int
    page_bytes: int
    line_bytes: int
    copy_bandwidth: float
    pinned_limit: int

    def __post_init__(self):
        if self.kind == "null":
            return
        for field in ("page_bytes", "line_bytes", "copy_bandwidth", "total_bytes"):
            if not getattr(self, field) > 0:
                raise ValueError(
                    f"{self.name}: {field}={getattr(self, field)}: expected above 0"
                )
        if not 0 <= self.free_bytes <= self.total_bytes or self.pinned_limit < 0:
            raise ValueError(
                f"{self.name}: free_bytes={self.free_bytes}, pinned_limit="
                f"{self.pinned_limit}: expected 0..total_bytes={self.total_bytes}, "
                "and from 0"
            )


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of one row: a block of ``block_tokens`` of history, the recent states."""

    block_bytes: int
    recent_bytes: int

    @classmethod
    def of_layout(cls, layout: CacheLayout) -> "Footprint":
        """From the arrays themselves."""
        history, recent = (
            sum(group.nbytes for group in layout.family(family))
            for family in ("history", "recent")
        )
        return cls(history, recent)

    @classmethod
    def of_spec(cls, spec: CacheSpec) -> "Footprint":
        """From the geometry of the layers, where there is no cache yet.

        An estimate: index keys are taken to be as wide as a head, and what a mixer
        keeps beside window, entries and frontier (a token shift) is left out.
        """
        size = {
            field.name: jnp.dtype(getattr(spec.dtypes, field.name)).itemsize
            for field in dataclasses.fields(spec.dtypes)
        }
        block = recent = 0
        for layer in spec.layers:
            recent += max(layer.window - 1, 0) * layer.features * size["window"]
            if not layer.ratio:
                continue
            entries = spec.block_tokens // layer.ratio
            block += entries * layer.features * size["entries"]
            index = layer.head_dim if layer.top_k else 0
            block += entries * index * size["index"]
            if layer.ratio > 1:
                halves = 2 if layer.overlap else 1
                rows = halves * layer.ratio - 1
                # Content and score of every half.
                width = 2 * halves * (layer.features + index)
                recent += rows * width * size["frontier"]
        return cls(block, recent)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a cache lies on a memory; written into a run's env.json.

    Attributes:
      kind, device: of the memory.
      block_tokens: tokens of one block, a multiple of the spec's that divides its
        capacity.
      slots: blocks that the memory holds at a time, over all rows.
      slot_bytes: bytes of a slot, a multiple of ``alignment``.
      alignment, disk_alignment: bytes, of slots and of block objects on disk.
      staging_bytes: locked host memory for copies, whole pages.
      parameter_bytes, recent_bytes: what the memory holds beside the slots; the
        recent states are those of all rows.
      free_bytes: what was free when the plan was made.
    """

    kind: Kind
    device: str
    block_tokens: int
    slots: int
    slot_bytes: int
    alignment: int
    disk_alignment: int
    staging_bytes: int
    parameter_bytes: int
    recent_bytes: int
    free_bytes: int


class DoesNotFit(ValueError):
    """Nothing fits a limit of a memory; the message names the limit."""


def plan(
    memory: DeviceMemory,
    spec: CacheSpec,
    parameters: int,
    *,
    footprint: Footprint | None = None,
    rows: int = 1,
    reserve: float = 0.1,
) -> Plan:
    """Chooses block size, slots, alignment and staging for a memory.

    A block is as many of the spec's blocks as make its copy last 100 µs, and fewer
    where two of them would not fit the pinned limit or the free memory. The slots are
    as many as fit, and no more than all rows fill. Alignment is the least of 64, 128
    and 256 that is whole lines. On a `null` memory nothing is kept: no slots, no
    staging, and what is asked for again is computed again.

    Args:
      memory: probed or described.
      spec: of the cache.
      parameters: bytes of the model's parameters, which lie on the same memory.
      footprint: bytes of a row; None is the estimate `Footprint.of_spec`.
      rows: batch.
      reserve: share of the free memory that is left alone, for activations.

    Raises:
      DoesNotFit: line_bytes, pinned_limit or free_bytes allows no plan.
      ValueError: an argument out of range.
    """
    if parameters < 0 or rows < 1 or not 0 <= reserve < 1:
        raise ValueError(
            f"parameters={parameters}, rows={rows}, reserve={reserve}: expected bytes "
            "from 0, rows from 1, a share in [0, 1)"
        )
    foot = Footprint.of_spec(spec) if footprint is None else footprint
    recent = rows * foot.recent_bytes
    common = (DISK_ALIGNMENT, parameters, recent, memory.free_bytes)
    if memory.kind == "null":
        return _plan(memory, spec.block_tokens, 0, 0, CANDIDATES[0], 0, *common)
    alignment = _alignment(memory)
    budget = int(memory.free_bytes * (1 - reserve)) - parameters - recent
    blocks = spec.capacity // spec.block_tokens
    problem = ""
    for count in _counts(memory, foot, blocks):
        slot = _round_up(max(count * foot.block_bytes, 1), alignment)
        staging = _round_up(_BUFFERS * slot, memory.page_bytes)
        if staging > memory.pinned_limit:
            problem = (
                f"pinned_limit={memory.pinned_limit}: two blocks in flight take "
                f"{staging} bytes"
            )
            continue
        # Where host memory is the memory itself, staging comes out of it.
        room = budget - (staging if memory.kind == "cpu" else 0)
        slots = min(room // slot, rows * (blocks // count))
        if slots < min(_LEAST_SLOTS, rows * blocks):
            problem = (
                f"free_bytes={memory.free_bytes}: {parameters} bytes of parameters, "
                f"{recent} of recent states, {reserve:.0%} in reserve and "
                f"{_LEAST_SLOTS} blocks of {slot} do not fit"
            )
            continue
        tokens = count * spec.block_tokens
        return _plan(memory, tokens, slots, slot, alignment, staging, *common)
    raise DoesNotFit(f"{memory.name} ({memory.kind}): {problem}")


def _plan(
    memory: DeviceMemory,
    tokens: int,
    slots: int,
    slot_bytes: int,
    alignment: int,
    staging: int,
    disk: int,
    parameters: int,
    recent: int,
    free: int,
) -> Plan:
    return Plan(
        kind=memory.kind,
        device=memory.name,
        block_tokens=tokens,
        slots=slots,
        slot_bytes=slot_bytes,
        alignment=alignment,
        disk_alignment=disk,
        staging_bytes=staging,
        parameter_bytes=parameters,
        recent_bytes=recent,
        free_bytes=free,
    )


def _alignment(memory: DeviceMemory) -> int:
    for candidate in CANDIDATES:
        if candidate % memory.line_bytes == 0:
            return candidate
    raise DoesNotFit(
        f"{memory.name} ({memory.kind}): line_bytes={memory.line_bytes} divides none "
        f"of the alignments {CANDIDATES}"
    )


def _counts(memory: DeviceMemory, foot: Footprint, blocks: int) -> list[int]:
    """How many of the spec's blocks one block may hold: the wanted, then fewer."""
    wanted = memory.copy_bandwidth * _COPY_SECONDS / max(foot.block_bytes, 1)
    whole = [count for count in range(1, blocks + 1) if blocks % count == 0]
    # The first that is long enough to copy, leaving at least two blocks a row.
    enough = next((count for count in whole if count >= wanted), blocks)
    most = min(enough, max(1, blocks // 2))
    return [count for count in reversed(whole) if count <= most]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
