"""Durable files: every write of a checkpoint goes through the few calls here."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybrid_attn.checkpoint.errors import CheckpointWriteError
from hybrid_attn.store.locks import FileLock


class Files:
    """The file system, one method a system call; tests wrap it to kill and to fail.

    Files are 0600 and directories 0700: what a cache holds is private to its owner.
    """

    def create(self, path: Path) -> int:
        """Descriptor of a new file, which must not be there yet."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def write(self, descriptor: int, data) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        path.mkdir(0o700, exist_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    # What follows is made of the above.

    def sync_path(self, path: Path) -> None:
        """Makes a file's bytes, or the names in a directory, durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def sync_tree(self, root: Path) -> None:
        for directory, _, names in os.walk(root, topdown=False):
            for name in names:
                path = Path(directory, name)
                path.chmod(0o600)
                self.sync_path(path)
            self.sync_path(Path(directory))

    def write_new(self, path: Path, data: bytes) -> None:
        """A new file that is durable on return; its name is not yet."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, data)
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def replace(self, path: Path, data: bytes) -> None:
        """Writes a file whole or not at all, durable on return."""
        temporary = path.with_name(f".{path.name}.tmp")
        self.unlink(temporary)
        self.write_new(temporary, data)
        self.rename(temporary, path)
        self.sync_path(path.parent)

    def lock(self, root: Path) -> contextlib.AbstractContextManager:
        """Excludes every other writer of the checkpoint while it is held."""
        return FileLock(str(root / "lock")).hold()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `CheckpointWriteError` that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(f"{path}: {error}") from error
