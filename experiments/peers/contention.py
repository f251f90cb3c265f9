"""How much of the machine other processes used while something was timed.

Both sides use every core and meet at barriers, so a busy neighbour slows them by
far more than its share: a figure without this number cannot be judged.
"""

import os
import resource
import time
from pathlib import Path

_STAT = Path("/proc/stat")


def _busy_seconds() -> float | None:
    """CPU seconds that all processes together have used since the start."""
    if not _STAT.exists():
        return None
    fields = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields[:8]]
    # Fields 3 and 4 are idle and waiting for disks; the last is stolen time, which
    # is time that the machine wanted and did not get: it counts as others' use.
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    own = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        own += usage.ru_utime + usage.ru_stime
    return own


class Contention:
    """Context manager; afterwards `share` is the others' part of all cores.

    `share` is in 0..1, or None where the system does not tell. Children count as
    this process only once they have ended.
    """

    share: float | None = None

    def __enter__(self) -> "Contention":
        self._start = time.perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *unused) -> None:
        start, busy, own = self._start
        now = _busy_seconds()
        if busy is None or now is None:
            return
        available = (time.perf_counter() - start) * (os.cpu_count() or 1)
        others = (now - busy) - (_own_seconds() - own)
        self.share = min(1.0, max(0.0, others / max(available, 1e-9)))
