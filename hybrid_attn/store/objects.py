"""The objects under a store: a TensorStore KvStore, with errors and modes of ours."""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorstore as ts

from hybrid_attn.store.errors import NotAStoreError, StoreReadError, StoreWriteError
from hybrid_attn.store.locks import FileLock, Lock, thread_lock

# memory:// lives in a context; one for all gives stores that are opened again the
# same data, as every other url does.
_memory = ts.Context()
_LOCK_SUFFIX = ".__lock"


class ObjectIO(Protocol):
    """What a store needs of its storage; tests wrap it to inject faults."""

    url: str
    excludes_writers: bool  # locks reach every process that can write here

    def read_many(
        self, keys: Sequence[str], limit: int | None = None
    ) -> list[bytes | StoreReadError | None]: ...

    def write_many(self, values: Mapping[str, bytes]) -> None: ...

    def delete_many(self, keys: Sequence[str]) -> None: ...

    def list(self, prefix: str) -> list[str]: ...

    def database(self, prefix: str) -> ts.KvStore: ...

    def commit(self, transaction: ts.Transaction, prefix: str) -> None: ...

    def drop_stale_writes(self, prefix: str) -> int: ...

    def tighten(self, keys: Sequence[str]) -> None: ...

    def lock(self, name: str) -> Lock: ...


class Objects:
    """Keys and values under one url; keys are relative to it, "/"-separated.

    On ``file://`` every directory is 0700 and every file 0600, and a new directory's
    name is synced too, which TensorStore leaves to the file system.
    """

    def __init__(self, url: str):
        """Opens the storage at a KvStore url, or at a plain path.

        Raises:
          NotAStoreError: no storage can be opened at this url.
        """
        spec: Any = url
        if "://" not in url:
            spec = {"driver": "file", "path": os.path.abspath(url)}
        try:
            store = ts.KvStore.open(spec, context=_memory).result()
            if not store.path.endswith("/"):
                store.path += "/"
            self._driver = store.spec().to_json()["driver"]
        except Exception as error:
            raise NotAStoreError(
                f"{url}: expected a path or a url of TensorStore: {error}"
            ) from error
        self._store = store
        self._known: set[str] = set()
        self.root = store.path.rstrip("/") or "/" if self._driver == "file" else None
        self.url = store.url
        self.excludes_writers = self._driver in ("file", "memory")
        if self.root is not None:
            try:
                self._make_directory(self.root)
            except OSError as error:
                raise NotAStoreError(
                    f"{url}: expected a directory of our own: {error}"
                ) from error

    def read_many(
        self, keys: Sequence[str], limit: int | None = None
    ) -> list[bytes | StoreReadError | None]:
        """Values by key, None where there is none, an error where reading failed.

        At most the first ``limit`` bytes of each.
        """
        span = None if limit is None else slice(0, limit)
        futures = [self._store.read(key, byte_range=span) for key in keys]
        results = []
        for key, future in zip(keys, futures, strict=True):
            try:
                found = future.result()
            except Exception as error:
                if limit is not None and "OUT_OF_RANGE" in str(error):
                    results += self.read_many([key])  # shorter than the limit
                else:
                    results.append(StoreReadError(f"{self.url}{key}: {error}"))
            else:
                results.append(found.value if found.state == "value" else None)
        return results

    def write_many(self, values: Mapping[str, bytes]) -> None:
        """Writes whole values durably; each appears at once or not at all.

        Raises:
          StoreWriteError: names the first key that failed, once no write is under way.
        """
        failed: StoreWriteError | None = None
        futures = {}
        for key, value in values.items():
            try:
                if self.root is not None:
                    self._make_directory(os.path.dirname(f"{self.root}/{key}"))
                futures[key] = self._store.write(key, value)
            except (OSError, ValueError) as error:
                failed = failed or StoreWriteError(f"{self.url}{key}: {error}")
        for key, future in futures.items():
            try:
                future.result()
                if self.root is not None:
                    _tighten(f"{self.root}/{key}", 0o600)
            except Exception as error:
                failed = failed or StoreWriteError(f"{self.url}{key}: {error}")
        if failed is not None:
            raise failed

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes keys; one that is not there is no error.

        Raises:
          StoreWriteError: names the first key that could not be deleted.
        """
        failed: StoreWriteError | None = None
        futures = [self._store.write(key, None) for key in keys]
        for key, future in zip(keys, futures, strict=True):
            try:
                future.result()
            except Exception as error:
                failed = failed or StoreWriteError(f"{self.url}{key}: {error}")
        if failed is not None:
            raise failed

    def list(self, prefix: str) -> list[str]:
        """All keys that start with the prefix, sorted.

        Raises:
          StoreReadError: the storage could not be listed.
        """
        try:
            if prefix.endswith("/") and self.root is not None:
                # The file driver lists a whole tree and filters then.
                part = self._store.copy()
                part.path += prefix
                return sorted(prefix + key.decode() for key in part.list().result())
            found = self._store.list(ts.KvStore.KeyRange(prefix, _after(prefix)))
            return sorted(key.decode() for key in found.result())
        except Exception as error:
            raise StoreReadError(f"{self.url}{prefix}: {error}") from error

    def database(self, prefix: str) -> ts.KvStore:
        """The OCDBT database whose files lie under ``prefix``.

        Raises:
          StoreReadError: it could not be opened.
        """
        base = self._store.copy()
        base.path += prefix
        config = {"max_decoded_node_bytes": 1 << 14, "max_inline_value_bytes": 1 << 10}
        spec = {"driver": "ocdbt", "base": base.spec().to_json(), "config": config}
        try:
            if self.root is not None:
                self._make_directory(f"{self.root}/{prefix}d")
            return ts.KvStore.open(spec, context=_memory).result()
        except Exception as error:
            raise StoreReadError(f"{self.url}{prefix}: {error}") from error

    def commit(self, transaction: ts.Transaction, prefix: str) -> None:
        """Commits to the database under ``prefix``.

        Raises:
          StoreWriteError: the commit failed, or nobody knows how it ended.
        """
        try:
            transaction.commit_async().result()
        except Exception as error:
            raise StoreWriteError(f"{self.url}{prefix}: {error}") from error

    def drop_stale_writes(self, prefix: str) -> int:
        """Removes what killed writers left under ``prefix``; returns how many files.

        TensorStore writes to ``<key>.__lock`` and renames it, and does not truncate
        one that is there already: a later, shorter value would keep the tail of the
        dead one. Only for callers that exclude every writer under this prefix.
        """
        if self.root is None:
            return 0
        count = 0
        for directory, _, names in os.walk(f"{self.root}/{prefix}"):
            for name in names:
                if name.endswith(_LOCK_SUFFIX):
                    os.unlink(f"{directory}/{name}")
                    count += 1
        return count

    def tighten(self, keys: Sequence[str]) -> None:
        """Makes files private that TensorStore wrote on its own."""
        for key in keys if self.root is not None else ():
            _tighten(f"{self.root}/{key}", 0o600)

    def make_private(self) -> None:
        """Closes a directory to others that was there before the store."""
        if self.root is not None:
            _tighten(self.root, 0o700)

    def lock(self, name: str) -> Lock:
        """The store-wide lock of that name; on object stores, of this process only."""
        if self.root is None:
            return thread_lock(self.url, name)
        self._make_directory(f"{self.root}/locks")
        return FileLock(f"{self.root}/locks/{name}")

    def _make_directory(self, path: str) -> None:
        if path in self._known:
            return
        missing = []
        probe = path
        while not os.path.isdir(probe):
            missing.append(probe)
            probe = os.path.dirname(probe)
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                if os.path.isdir(directory):
                    continue  # another writer was first
                raise
            descriptor = os.open(os.path.dirname(directory), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._known.add(path)


def _tighten(path: str, mode: int) -> None:
    held = os.stat(path)
    if stat.S_IMODE(held.st_mode) & ~mode and held.st_uid == os.geteuid():
        os.chmod(path, mode)


def _after(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
