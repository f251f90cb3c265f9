"""Small blocks of chains, and what is needed to damage them."""

import os
from pathlib import Path

import numpy as np

import hybrid_attn.store as stores
from hybrid_attn.store.blocks import parse_name

MODEL = "1f" * 32
LAYOUT = "0123456789abcdef"
ENTRIES, WINDOW = "csa4.entries", "swa.window"


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count)


def payload(group: str, digest: str, size: int = 100) -> bytes:
    """Bytes that follow from the key: a wrong block is seen to be wrong."""
    seed = int.from_bytes(f"{group}{digest}".encode()[-24:], "little")
    return np.random.default_rng(seed).bytes(size)


def make(
    ids, *, groups=(ENTRIES, WINDOW), size=100, model=MODEL, salt=None, **fields
) -> list[stores.Block]:
    """Blocks of every full block of 4 tokens, boundary by boundary."""
    settings = {"origin": "prefill", "alignment": 64, **fields}
    return [
        stores.Block(
            group, LAYOUT, b, b.index, b.length, payload(group, b, size), **settings
        )
        for b in stores.chain(model, LAYOUT, salt, ids, 4)
        for group in groups
    ]


def right(store: stores.Store, block: stores.Block) -> bool | None:
    """None for a miss, else whether the bytes are the block's."""
    found = store.fetch(block.group, block.layout, block.chain)
    return None if found is None else found.data.tobytes() == block.payload


def open_store(path, **options) -> stores.Store:
    return stores.open(str(path), model_id=MODEL, **options)


def files(root: Path, *, locks: bool = False) -> list[Path]:
    found = [Path(d) / name for d, _, names in os.walk(root) for name in names]
    return sorted(p for p in found if locks or p.parent.name != "locks")


def object_of(root: Path, block: stores.Block) -> Path:
    """The one object file of a block."""
    (found,) = [
        path
        for path in (root / "blocks" / block.group).rglob("*")
        if path.is_file() and path.name.startswith(block.chain)
    ]
    assert parse_name(str(path_in(root, found)))
    return found


def path_in(root: Path, path: Path) -> Path:
    return path.relative_to(root)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
