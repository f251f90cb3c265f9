"""A storage whose reads are slow, under a store's own protocol of storage."""

import time
from collections.abc import Callable
from typing import Any, cast

from hybrid_attn.store.objects import ObjectIO, Objects


class _SlowReads:
    def __init__(self, objects: Objects, seconds: float):
        self._objects, self._seconds = objects, seconds

    def read_many(self, keys, limit=None):
        time.sleep(self._seconds)
        return self._objects.read_many(keys, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


def slow_reads(seconds: float) -> Callable[[Objects], ObjectIO]:
    """For `hybrid_attn.store.open`'s ``wrap``: every read takes ``seconds`` more."""
    return lambda objects: cast(ObjectIO, _SlowReads(objects, seconds))
