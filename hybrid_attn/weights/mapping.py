"""How the tensors of a file become the parameters of a model, and back.

A family of checkpoints declares an `Entry` for every parameter. A layout says how the
file's tensors are arranged in it; all layouts are permutations of numbers.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

Shape = tuple[int, ...]
# The names that releases use for one tensor; the first is what `save` writes.
Piece = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter.

    Attributes:
      path: attributes from the model down, "blocks.0.mixer.sink".
      layout: a key of `LAYOUTS`.
      pieces: the tensors it is made of.
      experts: for stacked experts, the pieces of each one, in the layout "linear",
        where a release keeps them apart.
      head_dim: channels of a head, for the layouts that permute within heads.
    """

    path: str
    layout: str
    pieces: tuple[Piece, ...]
    experts: tuple[tuple[Piece, ...], ...] = ()
    head_dim: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrangement of n pieces in a parameter.

    Attributes:
      shape: (parameter's shape, n) -> the shape of a piece in the file.
      place: (parameter, i, n, piece i) -> None; writes the piece into the parameter.
      take: (parameter, i, n) -> piece i as the file has it.

    Those that permute within heads take the keyword ``head_dim`` too; `layout_of`
    fills it in.
    """

    shape: Callable[[Shape, int], Shape]
    place: Callable[..., None]
    take: Callable[..., np.ndarray]


def _place_same(whole, i, n, piece):
    whole[...] = piece


def _columns(whole, i, n):
    width = whole.shape[1] // n
    return whole[:, i * width : (i + 1) * width]


def _place_linear(whole, i, n, piece):
    _columns(whole, i, n)[...] = piece.T


# Channel j < h/2 of a half-split head turns with channel j + h/2, channel 2j of an
# interleaved one with channel 2j + 1.
def _place_half_split(whole, i, n, piece, *, head_dim):
    if i:
        _place_linear(whole, i, n, piece)
        return
    halves = piece.T.reshape(len(whole), -1, 2, head_dim // 2)
    for member in (0, 1):
        _columns(whole, i, n)[:, member::2] = halves[:, :, member].reshape(
            len(whole), -1
        )


def _take_half_split(whole, i, n, *, head_dim):
    columns = _columns(whole, i, n)
    if i:
        return columns.T
    pairs = columns.reshape(len(whole), -1, head_dim // 2, 2)
    return pairs.swapaxes(2, 3).reshape(columns.shape).T


def _place_grouped(whole, i, n, piece):
    groups, inputs, outputs = whole.shape
    whole[...] = piece.reshape(groups, outputs, inputs).transpose(0, 2, 1)


def _place_experts(whole, i, n, piece):
    whole[...] = np.swapaxes(piece, 1, 2)


LAYOUTS = {
    "same": Layout(
        shape=lambda s, n: s,
        place=_place_same,
        take=lambda x, i, n: x,
    ),
    # Files hold [outputs, inputs]; matrices of equal size stand side by side.
    "linear": Layout(
        shape=lambda s, n: (s[1] // n, s[0]),
        place=_place_linear,
        take=lambda x, i, n: _columns(x, i, n).T,
    ),
    # As "linear"; the heads of the first piece (queries, or keys with their values
    # beside them) turn half-split in files and interleaved here.
    "half_split": Layout(
        shape=lambda s, n: (s[1] // n, s[0]),
        place=_place_half_split,
        take=_take_half_split,
    ),
    # Tables of indices, int64 in files.
    "table": Layout(
        shape=lambda s, n: s,
        place=_place_same,
        take=lambda x, i, n: x.astype(np.int64),
    ),
    # [groups · outputs, inputs] in files, [groups, inputs, outputs] here.
    "grouped": Layout(
        shape=lambda s, n: (s[0] * s[2], s[1]),
        place=_place_grouped,
        take=lambda x, i, n: x.transpose(0, 2, 1).reshape(-1, x.shape[1]),
    ),
    # [experts, outputs, inputs] in files, [experts, inputs, outputs] here.
    "experts": Layout(
        shape=lambda s, n: (s[0], s[2], s[1]),
        place=_place_experts,
        take=lambda x, i, n: np.swapaxes(x, 1, 2),
    ),
}


def layout_of(entry: Entry) -> Layout:
    """The layout of an entry, with the entry's head where it needs one."""
    layout = LAYOUTS[entry.layout]
    if not entry.head_dim:
        return layout
    return dataclasses.replace(
        layout,
        place=functools.partial(layout.place, head_dim=entry.head_dim),
        take=functools.partial(layout.take, head_dim=entry.head_dim),
    )
