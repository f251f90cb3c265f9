"""Attention over all visible entries of a history."""

from typing import overload

from pallas_kernels.abi import Layout, check_stored
from pallas_kernels.array_typing import Entries, Mass, Queries, Visible, typed
from pallas_kernels.compressed_attention import mosaic_gpu, xla
from pallas_kernels.dispatch import SM90, Dispatch, Implementation
from pallas_kernels.softmax import Partial, check_groups, check_mass_block

DISPATCH = Dispatch(
    "compressed_attention",
    Implementation(
        "mosaic_gpu", mosaic_gpu.compressed_attention, SM90, mosaic_gpu.refuses
    ),
    Implementation("xla", xla.compressed_attention),
)
ENTRY_AXES = ("b", "e", "k", "h")


@overload
def compressed_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    visible: Visible,
    *,
    scale: float,
    static: bool,
    visible_from: Visible | None = None,
    mass_block: None = None,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> Partial: ...


@overload
def compressed_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    visible: Visible,
    *,
    scale: float,
    static: bool,
    visible_from: Visible | None = None,
    mass_block: int,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Partial, Mass]: ...


@typed
def compressed_attention(
    query: Queries,
    key: Entries,
    value: Entries,
    visible: Visible,
    *,
    scale: float,
    static: bool,
    visible_from: Visible | None = None,
    mass_block: int | None = None,
    entry_layout: Layout | None = None,
    implementation: str | None = None,
) -> Partial | tuple[Partial, Mass]:
    """Softmax sums over entries visible_from..visible-1 of each query.

    Args:
      query: float[b, t, n, h]; key, value: float[b, e, k, h].
      visible: int32[b, t].
      scale: factor on q·k.
      static: read every block (differentiable) instead of the blocks in use.
      visible_from: int32[b, t], the first entry that each query may read; None for 0.
      mass_block: entries per block; return the attention mass of each block too, which
        predicts what the next queries read.
      entry_layout: the owner's description of key and value, checked if given.
      implementation: a name of ``DISPATCH.names``; None for the best supported.

    Returns:
      The sums; with ``mass_block`` (sums, mass float32[b, t, ceil(e / mass_block)]):
      the softmax weights over the entries that a query may read, summed per block and
      averaged over query heads. A row adds up to 1, or to 0 where it may read none.

    Raises:
      ValueError: ``mass_block`` is not positive, or the key/value heads do not divide
        the query heads.
      LayoutError: key or value is not as described.
      Unsupported: the named implementation does not serve the call.

    Source: the boundary rule and joint softmax of DeepSeek-V4 (arXiv 2606.19348).
    """
    check_mass_block(mass_block)
    check_groups(query, key)
    check_stored(entry_layout, ENTRY_AXES, key, "compressed_attention key")
    check_stored(entry_layout, ENTRY_AXES, value, "compressed_attention value")
    return DISPATCH(
        query,
        key,
        value,
        visible,
        scale=scale,
        static=static,
        visible_from=visible_from,
        mass_block=mass_block,
        implementation=implementation,
    )
