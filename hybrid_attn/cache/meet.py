"""The meet over cache groups: the deepest boundary that all of them share."""

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Literal

Family = Literal["history", "recent"]


@dataclasses.dataclass(frozen=True)
class Availability:
    """Which blocks of one group can be had.

    Block i covers tokens i·stride .. (i+1)·stride - 1 of a history group; of a recent
    group it is the state at the boundary (i+1)·stride.

    Attributes:
      stride: tokens between two boundaries of the group.
      blocks: numbers of the blocks.
    """

    stride: int
    blocks: frozenset[int]

    def __post_init__(self):
        if self.stride < 1 or any(block < 0 for block in self.blocks):
            raise ValueError(
                f"stride={self.stride}, blocks={sorted(self.blocks)}: expected a "
                "stride from 1 and block numbers from 0"
            )

    @classmethod
    def at(cls, stride: int, *boundaries: int) -> "Availability":
        """From the boundaries, in tokens, at which a block ends.

        Raises:
          ValueError: a boundary that is no positive multiple of the stride.
        """
        for boundary in boundaries:
            if boundary < 1 or boundary % stride:
                raise ValueError(
                    f"boundary {boundary}: expected a multiple of {stride}"
                )
        return cls(stride, frozenset(b // stride - 1 for b in boundaries))


def meet(available: Mapping[str, Availability], families: Mapping[str, Family]) -> int:
    """The deepest boundary, in tokens, at which every group can be cut.

    A history group needs its whole chain of blocks from 0 up to the boundary, a recent
    group only the block at the boundary. Boundary 0, the empty start, is always shared.

    Every group lowers the candidate to its own deepest boundary at or below it, until
    none does. Each of these is a monotone map, so the fixpoint is the greatest shared
    boundary; a single round is not enough (Full at 32, 64 and a recurrent group at 32,
    48 would give 48).

    Args:
      available: by group.
      families: the family of each group; the groups are the same.

    Raises:
      ValueError: no group, groups that are not the same, or an unknown family.
    """
    if not available or set(available) != set(families):
        raise ValueError(
            f"available has groups {sorted(available)}, families {sorted(families)}: "
            "expected the same, and at least one"
        )
    boundaries = [_boundaries(available[n], families[n], n) for n in available]
    candidate = min(own[-1] for own in boundaries)
    while True:
        lowered = candidate
        for own in boundaries:
            lowered = own[bisect.bisect_right(own, lowered) - 1]
        if lowered == candidate:
            return candidate
        candidate = lowered


def _boundaries(group: Availability, family: Family, name: str) -> list[int]:
    """The boundaries at which one group alone can be cut, in order."""
    if family == "recent":
        cut = sorted(group.blocks)
    elif family == "history":
        cut = []
        while len(cut) in group.blocks:
            cut.append(len(cut))
    else:
        raise ValueError(f"{name} is {family!r}: expected 'history' or 'recent'")
    return [0, *((block + 1) * group.stride for block in cut)]
