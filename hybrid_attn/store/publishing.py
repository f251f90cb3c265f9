"""How blocks become visible: objects first, the index last, all or none."""

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence

from hybrid_attn.store.blocks import Block, encode, object_name, split_object
from hybrid_attn.store.catalog import Catalog, Changes, next_generation
from hybrid_attn.store.errors import StoreError
from hybrid_attn.store.index import Entry, make_key


@dataclasses.dataclass(frozen=True)
class SealedBlock:
    """A block with its generation and CRC, ready to be written.

    Attributes:
      key: of the index.
      name: of the object.
      entry: what the index will say.
      data: the whole object.
    """

    key: str
    name: str
    entry: Entry
    data: bytes


def seal(catalog: Catalog, block: Block, model_id: str) -> SealedBlock:
    """Gives a block its generation and makes the object's bytes."""
    key = make_key(model_id, block.group, block.layout, block.chain)
    held = catalog.entries.get(key)
    generation = next_generation(held.generation if held else None)
    data = encode(block, generation, model_id)
    entry = Entry(
        generation, block.index, block.length, len(data), str(block.parent or "")
    )
    return SealedBlock(
        key, object_name(block.group, block.chain, generation), entry, data
    )


def publish(
    catalog: Catalog, batches: Iterable[Sequence[SealedBlock]], replace: bool
) -> dict[str, Entry]:
    """Writes batches of objects and commits them all in one transaction.

    The caller holds the objects lock, shared.

    Args:
      catalog: of the store.
      batches: made one after the other, so that only one is in memory.
      replace: takes the place of what is there.

    Returns:
      What was committed by key; keys that another writer had first are not in it.

    Raises:
      StoreWriteError: nothing became visible.
    """
    new: dict[str, Entry] = {}
    names: dict[str, str] = {}
    old: dict[str, Entry] = {}

    def choose(present: dict[str, Entry]) -> Changes:
        put = {k: v for k, v in new.items() if replace or k not in present}
        old.clear()
        old.update({k: present[k] for k in put if k in present})
        return put, frozenset()

    try:
        for batch in batches:
            new.update({sealed.key: sealed.entry for sealed in batch})
            names.update({sealed.key: sealed.name for sealed in batch})
            catalog.io.write_many({sealed.name: sealed.data for sealed in batch})
        catalog.commit(choose)
    except BaseException:
        catalog.withdraw({key: entry.generation for key, entry in new.items()})
        _discard(catalog, names.values())
        raise
    present = catalog.entries
    won = {key: entry for key, entry in new.items() if present.get(key) == entry}
    _discard(catalog, [name for key, name in names.items() if key not in won])
    _discard(
        catalog,
        [
            object_name(*split_object(names[key]), entry.generation)
            for key, entry in old.items()
            if key in won and entry != won[key]
        ],
    )
    return won


def _discard(catalog: Catalog, names: Iterable[str]) -> None:
    """Deletes objects that no key names; one that stays is an orphan for gc."""
    with contextlib.suppress(StoreError):
        catalog.io.delete_many(list(names))
