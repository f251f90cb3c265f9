"""Where the files of a checkpoint lie, and which epoch may write them.

EPOCH                       run and newest epoch, under a CRC
snapshots/<sequence>-<epoch>/   manifest.json, tokens.bin, state/ (Orbax)
log/<sequence>-<epoch>.log  frames from that sequence number on
"""

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_attn.checkpoint.errors import DamagedError, FencedError
from hybrid_attn.checkpoint.files import Files, writing
from hybrid_attn.store.blocks import crc32c

_NAME = re.compile(r"(\d{12})-(\d{6})(\.log)?")


@dataclasses.dataclass(frozen=True, order=True)
class Name:
    """Name of a snapshot (the state after ``sequence``) or of a log (from it on)."""

    sequence: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.sequence:012d}-{self.epoch:06d}"


def snapshots(root: Path) -> dict[Name, Path]:
    """The snapshots that are there by name, oldest first; none is verified."""
    return _list(root / "snapshots", "")


def logs(root: Path) -> dict[Name, Path]:
    """The logs that are there by name, in order of their first sequence number."""
    return _list(root / "log", ".log")


def _list(directory: Path, suffix: str) -> dict[Name, Path]:
    if not directory.is_dir():
        return {}
    found = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and (match[3] or "") == suffix:
            found[Name(int(match[1]), int(match[2]))] = path
    return dict(sorted(found.items()))


def beginnings(root: Path) -> dict[int, int]:
    """By epoch, the sequence number from which on its writer went on."""
    first: dict[int, int] = {}
    for name in (*snapshots(root), *logs(root)):
        first[name.epoch] = min(first.get(name.epoch, name.sequence), name.sequence)
    return first


def voids(first: Mapping[int, int], name: Name) -> bool:
    """Whether a newer writer went on from before this snapshot."""
    return any(
        name.sequence >= sequence
        for epoch, sequence in first.items()
        if epoch > name.epoch
    )


def seal(value: Any) -> bytes:
    """JSON in one line behind its CRC32C."""
    text = json.dumps(value, sort_keys=True, allow_nan=False).encode()
    return f"{crc32c(text):08x} ".encode() + text + b"\n"


def unseal(path: Path) -> Any:
    """What `seal` wrote.

    Raises:
      DamagedError: it is missing or fails its CRC.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: {error}") from error
    text = data[9:-1]
    if data != f"{crc32c(text):08x} ".encode() + text + b"\n":
        raise DamagedError(f"{path}: {len(data)} bytes fail their CRC")
    return json.loads(text)


class Fence:
    """One writer's right to write: it lasts until another takes a newer epoch."""

    def __init__(self, root: Path, files: Files):
        """Takes the next epoch, which ends every older one.

        Raises:
          CheckpointWriteError: the directory cannot be written.
        """
        self.root, self.files = root, files
        with writing(root):
            for directory in (root, root / "snapshots", root / "log"):
                if not directory.is_dir():
                    if directory == root:
                        root.parent.mkdir(parents=True, exist_ok=True)
                    files.make_directory(directory)
                    files.sync_path(directory.parent)
            with files.lock(root):
                self.run, newest, _ = _newest(root)
                self._writer = secrets.token_hex(8)
                self._publish(newest + 1)

    def _publish(self, epoch: int) -> None:
        value = {"run": self.run, "epoch": epoch, "writer": self._writer}
        self.files.replace(self.root / "EPOCH", seal(value))
        self.epoch = epoch

    def check(self) -> None:
        """To be called with the lock held.

        Raises:
          FencedError: a newer writer opened the checkpoint.
        """
        run, newest, writer = _newest(self.root)
        if (run, writer) != (self.run, self._writer):
            raise FencedError(
                f"{self.root}: this writer has epoch {self.epoch}, the newest is "
                f"{newest}; another process opened the checkpoint since"
            )
        # Its own attempt at a newer one may have failed after it was visible.
        self.epoch = newest

    def renew(self) -> None:
        """A new epoch for the same writer; with the lock held, after `check`."""
        self._publish(self.epoch + 1)


def _newest(root: Path) -> tuple[int, int, str | None]:
    """(run, newest epoch, its writer) of a checkpoint; a new run where none is."""
    names = [*snapshots(root), *logs(root)]
    found = max((name.epoch for name in names), default=0)
    try:
        value = unseal(root / "EPOCH")
        return value["run"], max(found, value["epoch"]), value["writer"]
    except DamagedError:
        for path in reversed(snapshots(root).values()):
            try:
                return unseal(path / "manifest.json")["run"], found, None
            except DamagedError:
                continue
        return secrets.randbits(63), found, None
