"""Snapshots through Orbax V1, each under a manifest with the CRC32C of every array."""

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from hybrid_attn.checkpoint.errors import DamagedError
from hybrid_attn.checkpoint.files import writing
from hybrid_attn.checkpoint.layout import Fence, Name, seal, snapshots, unseal
from hybrid_attn.store.blocks import crc32c

FORMAT = 1
_TEMPORARY = ".tmp-"


@dataclasses.dataclass(frozen=True)
class Saved:
    """One cache on the host, as a snapshot holds it.

    Attributes:
      description: JSON of `hybrid_attn.checkpoint.description.describe`.
      arrays: by name.
      tokens: int32[n] of each row.
    """

    description: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    tokens: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot whose manifest is sound and whose files are all there.

    Attributes:
      path: its directory.
      sequence: number of the last record whose state it holds.
      epoch: of its writer.
      number: counts the snapshots of a checkpoint.
      nbytes: of its files.
      manifest: JSON; "model_id", "caches" (descriptions), "info", ….
    """

    path: Path
    sequence: int
    epoch: int
    number: int
    nbytes: int
    manifest: Mapping[str, Any]

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Tokens of every row of every cache."""
        return {name: c["length"] for name, c in self.manifest["caches"].items()}


def write(
    fence: Fence,
    sequence: int,
    number: int,
    model_id: str,
    caches: Mapping[str, Saved],
    info: Any,
    verify: bool = True,
) -> Snapshot:
    """Writes a snapshot; it appears whole or not at all, and is durable on return.

    Args:
      verify: read it back before it counts.

    Raises:
      FencedError: a newer writer opened the checkpoint; nothing appeared.
      CheckpointWriteError: the storage refused; nothing appeared.
      DamagedError: it could not be read back as it was written.
    """
    files, root = fence.files, fence.root
    name = Name(sequence, fence.epoch)
    temporary = root / "snapshots" / f"{_TEMPORARY}{name}"
    with writing(temporary):
        files.remove_tree(temporary)
        files.make_directory(temporary)
        flat, described, ids = {}, {}, []
        for index, key in enumerate(sorted(caches)):
            saved = caches[key]
            crcs = {n: crc32c(_bytes(array)) for n, array in saved.arrays.items()}
            described[key] = {
                "description": saved.description,
                "crc32c": crcs,
                "tokens": [int(row.size) for row in saved.tokens],
                "length": saved.arrays["counts/length"].tolist(),
            }
            ids += saved.tokens
            # Orbax keeps no empty arrays.
            flat |= {
                _key(index, n): array for n, array in saved.arrays.items() if array.size
            }
        ocp.save(str(temporary / "state"), flat)
        tokens = np.concatenate([np.zeros(0, np.int32), *ids]).astype("<i4").tobytes()
        files.write_new(temporary / "tokens.bin", tokens)
        manifest = {
            "format": FORMAT,
            "run": fence.run,
            "epoch": name.epoch,
            "sequence": sequence,
            "number": number,
            "model_id": model_id,
            "caches": described,
            "tokens_crc32c": crc32c(tokens),
            "info": info,
            "files": _sizes(temporary),
        }
        files.write_new(temporary / "manifest.json", seal(manifest))
        files.sync_tree(temporary)
        if verify:
            load(_open(temporary, name))
        with files.lock(root):
            fence.check()
            files.rename(temporary, root / "snapshots" / str(name))
            files.sync_path(root / "snapshots")
    return _open(root / "snapshots" / str(name), name)


def latest(root: str | os.PathLike) -> Snapshot | None:
    """The newest complete snapshot of a checkpoint, or None.

    Complete means: a sound manifest, and every file there in its size. The arrays are
    verified when they are read, by `restore`.
    """
    found, _ = complete(Path(root))
    return found[-1] if found else None


def complete(root: Path) -> tuple[list[Snapshot], list[str]]:
    """(complete snapshots, oldest first; sentences about the others)."""
    found, refused = [], []
    for name, path in snapshots(root).items():
        try:
            found.append(_open(path, name))
        except DamagedError as error:
            refused.append(f"snapshot {name}: {error}")
    return found, refused


def _open(path: Path, name: Name) -> Snapshot:
    manifest = unseal(path / "manifest.json")
    if manifest["format"] != FORMAT:
        raise DamagedError(
            f"{path}: format {manifest['format']}, this version reads {FORMAT}"
        )
    own = Name(manifest["sequence"], manifest["epoch"])
    if own != name:
        raise DamagedError(f"{path}: its manifest is of snapshot {own}")
    sizes = _sizes(path)
    wanted = manifest["files"]
    for file in wanted:
        if sizes.get(file) != wanted[file]:
            raise DamagedError(
                f"{file} has {sizes.get(file, 'no')} bytes, expected {wanted[file]}"
            )
    return Snapshot(
        path,
        name.sequence,
        name.epoch,
        manifest["number"],
        sum(sizes.values()),
        manifest,
    )


def load(snapshot: Snapshot) -> dict[str, dict[str, np.ndarray]]:
    """Verified arrays on the host, writable, by cache and name.

    Raises:
      DamagedError: an array cannot be read or fails its CRC; names it.
    """
    caches = snapshot.manifest["caches"]
    shapes, out = {}, {}
    for index, key in enumerate(sorted(caches)):
        out[key] = {}
        for name, (shape, dtype) in caches[key]["description"]["arrays"].items():
            empty = np.zeros(shape, jnp.dtype(dtype))
            out[key][name] = empty
            if empty.size:
                shapes[_key(index, name)] = empty
    try:
        read: Any = ocp.load(str(snapshot.path / "state"), shapes)
    except Exception as error:
        # Whatever a damaged file makes of Orbax or of TensorStore: it is unreadable.
        text = str(error).splitlines()[0] if str(error) else ""
        raise DamagedError(
            f"{snapshot.path.name}: {type(error).__name__} {text}"
        ) from error
    for index, key in enumerate(sorted(caches)):
        for name, wanted in caches[key]["crc32c"].items():
            if out[key][name].size:
                out[key][name] = np.array(read[_key(index, name)])
            found = crc32c(_bytes(out[key][name]))
            if found != wanted:
                raise DamagedError(
                    f"cache {key!r}, {name}: CRC32C {found:08x}, expected {wanted:08x}"
                )
    return out


def load_tokens(snapshot: Snapshot) -> dict[str, list[np.ndarray]]:
    """Verified token ids int32[n] of every row, by cache.

    Raises:
      DamagedError: they fail their CRC.
    """
    path = snapshot.path / "tokens.bin"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path}: {error}") from error
    if crc32c(data) != snapshot.manifest["tokens_crc32c"]:
        raise DamagedError(f"{path}: {len(data)} bytes fail their CRC")
    ids, at, out = np.frombuffer(data, "<i4").astype(np.int32), 0, {}
    for key in sorted(snapshot.manifest["caches"]):
        out[key] = []
        for count in snapshot.manifest["caches"][key]["tokens"]:
            out[key].append(ids[at : at + count])
            at += count
    return out


def remove(fence: Fence, path: Path) -> None:
    """Removes a snapshot; a kill in between leaves no half of one."""
    temporary = path.with_name(f"{_TEMPORARY}old-{path.name}")
    fence.files.rename(path, temporary)
    fence.files.remove_tree(temporary)


def drop_temporary(fence: Fence) -> None:
    """Removes what killed writers left; with a newer epoch taken."""
    for path in (fence.root / "snapshots").iterdir():
        if path.name.startswith(_TEMPORARY):
            shutil.rmtree(path, ignore_errors=True)


def _sizes(path: Path) -> dict[str, int]:
    return {
        file.relative_to(path).as_posix(): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "manifest.json"
    }


def _key(index: int, name: str) -> str:
    """A flat key: Orbax makes paths of what it is given."""
    return f"{index}:{name.replace('/', ':')}"


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
