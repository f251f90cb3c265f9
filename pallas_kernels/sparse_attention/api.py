"""Attention over a chosen list of entries per query."""

from typing import overload

from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.abi import Layout, LayoutError, check_stored
from pallas_kernels.array_typing import Entries, Mass, Queries, typed
from pallas_kernels.dispatch import PORTABLE, SM90, Dispatch, Implementation
from pallas_kernels.kv_quant.api import record_format
from pallas_kernels.softmax import Partial, check_groups, check_mass_block
from pallas_kernels.sparse_attention import mosaic_gpu, packed, registers, xla

DISPATCH = Dispatch(
    "sparse_attention",
    Implementation("mosaic_gpu", mosaic_gpu.sparse_attention, SM90, mosaic_gpu.refuses),
    Implementation(
        "mosaic_gpu_registers",
        registers.sparse_attention,
        PORTABLE,
        registers.refuses,
    ),
    Implementation("xla", xla.sparse_attention),
)
PACKED_DISPATCH = Dispatch(
    "sparse_attention_packed",
    Implementation("mosaic_gpu", packed.sparse_attention, SM90, packed.refuses),
    Implementation("xla", xla.sparse_attention_packed),
)
# No kernel: it is for training alone, where XLA's products of whole matrices are what a
# kernel would do, and the weights of all entries that it returns are as large as what a
# kernel would not store.
MASKED_DISPATCH = Dispatch(
    "masked_attention", Implementation("xla", xla.masked_attention)
)
ENTRY_AXES = ("b", "e", "k", "h")


@overload
def sparse_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: None = None,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> Partial: ...


@overload
def sparse_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: int,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Partial, Mass]: ...


@typed
def sparse_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: int | None = None,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> Partial | tuple[Partial, Mass]:
    """Softmax sums over the entries that each query chose.

    Args:
      query: float[b, t, n, h]; key, value: float[b, e, k, h].
      chosen: int32[b, t, c], entry indices, -1 = none.
      scale: factor on q·k.
      mass_block: entries per block; return the attention mass of each block too, which
        predicts what the next queries read.
      entry_layout: the owner's description of key and value, checked if given.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Returns:
      The sums; with ``mass_block`` (sums, mass float32[b, t, ceil(e / mass_block)]):
      the softmax weights over the chosen entries, summed per block and
      averaged over query heads. A row adds up to 1, or to 0 where it chose none.

    Raises:
      ValueError: ``mass_block`` is not positive, or the key/value heads do not divide
        the query heads.
      LayoutError: key or value is not as described.
      Unsupported: the named implementation does not serve the call.
    """
    check_mass_block(mass_block)
    check_groups(query, key)
    check_stored(entry_layout, ENTRY_AXES, key, "sparse_attention key")
    check_stored(entry_layout, ENTRY_AXES, value, "sparse_attention value")
    return DISPATCH(
        query,
        key,
        value,
        chosen,
        scale=scale,
        mass_block=mass_block,
        implementation=implementation,
    )


@overload
def sparse_attention_packed(
    query: Queries,
    records: UInt8[Array, "b e r"],
    layout: Layout,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: None = None,
    implementation: str | None = None,
) -> Partial: ...


@overload
def sparse_attention_packed(
    query: Queries,
    records: UInt8[Array, "b e r"],
    layout: Layout,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: int,
    implementation: str | None = None,
) -> tuple[Partial, Mass]: ...


@typed
def sparse_attention_packed(
    query: Queries,
    records: UInt8[Array, "b e r"],
    layout: Layout,
    chosen: Int[Array, "b t c"],
    *,
    scale: float,
    mass_block: int | None = None,
    implementation: str | None = None,
) -> Partial | tuple[Partial, Mass]:
    """`sparse_attention` over packed entries, which are unpacked as they are read.

    An entry is both key and value, of one head. Only chosen records are unpacked.

    Args:
      query: float[b, t, n, h].
      records: uint8[b, e, r] of h channels.
      layout: what they were packed with, from `kv_quant.formats.record_layout`.
      chosen, scale, mass_block: as `sparse_attention`.
      implementation: a name of ``PACKED_DISPATCH.names``; None for the best supported.

    Returns:
      As `sparse_attention`.

    Raises:
      ValueError: ``mass_block`` is not positive.
      LayoutError: the records do not lie as described, are no records or have another
        number of channels.
      Unsupported: the named implementation does not serve the call.
    """
    check_mass_block(mass_block)
    layout.check(records, "sparse_attention_packed records")
    format, channels, rotary = record_format(layout)
    if channels != query.shape[3]:
        raise LayoutError(
            f"sparse_attention_packed records: of {channels} channels, expected "
            f"{query.shape[3]}"
        )
    return PACKED_DISPATCH(
        query,
        records,
        chosen,
        format=format,
        rotary=rotary,
        scale=scale,
        mass_block=mass_block,
        implementation=implementation,
    )


@typed
def masked_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    mask: Bool[Array, "b t e"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Partial, Float[Array, "b t e"]]:
    """`sparse_attention` over a mask, with the attention weight of each entry.

    Args:
      query, key, value, scale, implementation: as `sparse_attention`.
      mask: bool[b, t, e].

    Returns:
      (softmax sums, weights float32[b, t, e] normalised over the mask and averaged
      over heads). Costs t·e, so for training lengths only.

    Raises:
      ValueError: the key/value heads do not divide the query heads.
    """
    check_groups(query, key)
    return MASKED_DISPATCH(
        query, key, value, mask, scale=scale, implementation=implementation
    )
