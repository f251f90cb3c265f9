"""Storage that ends before its k-th writing call, each object being a call."""

from collections.abc import Callable


class Ending:
    """Calls ``end`` before the writing call after ``left`` others, and at each later.

    ``end`` raises or does not return. Everything else is the objects' own.
    """

    def __init__(self, objects, end: Callable[[], None], left: int = 10**9):
        self._objects, self._end, self.left = objects, end, left

    def __getattr__(self, name):
        return getattr(self._objects, name)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            self._end()

    def write_many(self, values) -> None:
        for key, value in values.items():
            self._count()
            self._objects.write_many({key: value})

    def delete_many(self, keys) -> None:
        for key in keys:
            self._count()
            self._objects.delete_many([key])

    def commit(self, transaction, prefix) -> None:
        self._count()
        self._objects.commit(transaction, prefix)
