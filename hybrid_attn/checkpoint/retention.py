"""Which snapshots and logs are kept, and the removal of the others."""

from collections.abc import Sequence
from pathlib import Path

from hybrid_attn.checkpoint.files import writing
from hybrid_attn.checkpoint.layout import Fence, Name, beginnings, logs, voids
from hybrid_attn.checkpoint.snapshots import Snapshot, complete, remove


def superfluous(
    found: Sequence[Snapshot], keep: int | None, keep_every: int | None
) -> list[Snapshot]:
    """Snapshots (oldest first) that are neither new nor the k-th of their numbers."""
    if keep is None:
        return []
    return [
        snapshot
        for snapshot in found[: max(0, len(found) - keep)]
        if not keep_every or snapshot.number % keep_every
    ]


def last_sequences(names: Sequence[Name]) -> dict[Name, int | None]:
    """By log, the last sequence number it can hold that counts; None: open end."""
    out: dict[Name, int | None] = {}
    for name in names:
        after = [
            other.sequence - 1
            for other in names
            if (other.epoch == name.epoch and other.sequence > name.sequence)
            or other.epoch > name.epoch
        ]
        out[name] = min(after, default=None)
    return out


def retain(fence: Fence, keep: int | None, keep_every: int | None) -> list[Path]:
    """Removes what is superfluous; logs that every kept newest snapshot contains.

    A log goes only when the oldest of the ``keep`` newest snapshots does not need it,
    so that each of those can be brought to the end.

    Raises:
      FencedError: a newer writer opened the checkpoint.
    """
    if keep is None:
        return []
    removed = []
    with writing(fence.root), fence.files.lock(fence.root):
        fence.check()
        first = beginnings(fence.root)
        found = [
            snapshot
            for snapshot in complete(fence.root)[0]
            if not voids(first, Name(snapshot.sequence, snapshot.epoch))
        ]
        newest = found[-keep:]
        for snapshot in superfluous(found, keep, keep_every):
            remove(fence, snapshot.path)
            removed.append(snapshot.path)
        if len(newest) == keep:
            paths = logs(fence.root)
            last = last_sequences(list(paths))
            # Older epochs first: what a newer one voided must not come back.
            for name in sorted(paths, key=lambda n: (n.epoch, n.sequence)):
                end = last[name]
                if end is not None and end <= newest[0].sequence:
                    fence.files.unlink(paths[name])
                    removed.append(paths[name])
    return removed
