"""Locks shared between threads and, on a local file system, between processes.

A store has two: ``objects`` (shared by those who write objects and commit them,
exclusive for those who remove objects that no key names) and ``index`` (exclusive for a
commit and its seal). They are always taken in that order.
"""

import contextlib
import fcntl
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol


class Lock(Protocol):
    """A lock that many share or one holds; not reentrant."""

    def hold(self, *, shared: bool = False) -> contextlib.AbstractContextManager: ...


class FileLock:
    """flock on a file: the kernel frees it when its holder dies."""

    def __init__(self, path: str):
        self._path = path

    @contextlib.contextmanager
    def hold(self, *, shared: bool = False) -> Iterator[None]:
        # Each holder opens the file anew: flock then excludes threads as well.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class ThreadLock:
    """The same between the threads of one process."""

    def __init__(self):
        self._free = threading.Condition()
        self._sharers = 0
        self._held = False

    @contextlib.contextmanager
    def hold(self, *, shared: bool = False) -> Iterator[None]:
        with self._free:
            while self._held or (self._sharers and not shared):
                self._free.wait()
            if shared:
                self._sharers += 1
            else:
                self._held = True
        try:
            yield
        finally:
            with self._free:
                if shared:
                    self._sharers -= 1
                else:
                    self._held = False
                self._free.notify_all()


_threads: dict[tuple[str, str], ThreadLock] = defaultdict(ThreadLock)
_guard = threading.Lock()


def thread_lock(url: str, name: str) -> ThreadLock:
    """The one lock of that name for all stores of this process at that url."""
    with _guard:
        return _threads[url, name]
