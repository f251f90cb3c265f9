"""Counted pins of chain digests."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator


class Pins:
    """How often each digest is pinned; safe for threads."""

    def __init__(self):
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()

    def add(self, chains: Iterable[str]) -> list[str]:
        """Pins each digest once more, and returns them."""
        held = [str(digest) for digest in chains]
        with self._guard:
            self._counts.update(held)
        return held

    def remove(self, chains: Iterable[str]) -> None:
        """Takes one pin off each digest.

        Raises:
          ValueError: one of them is not pinned; then none is unpinned.
        """
        counts = Counter(str(digest) for digest in chains)
        with self._guard:
            missing = [d for d, n in counts.items() if self._counts.get(d, 0) < n]
            if missing:
                raise ValueError(f"unpin of {missing}: expected pinned chains")
            self._counts = self._counts - counts

    @contextlib.contextmanager
    def hold(self, held: list[str]) -> Iterator[None]:
        """Takes pins off at the end that `add` made."""
        try:
            yield
        finally:
            self.remove(held)

    def pinned(self) -> set[str]:
        """All digests with a pin."""
        with self._guard:
            return set(self._counts)
