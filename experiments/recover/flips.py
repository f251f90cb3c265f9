"""Random single-bit flips in every byte of a store's files that a reader can reach.

A round flips one bit for each of many prompts, whose blocks are their own, and in some
rounds one of the index and one of the small files. Then a reader does what every user
does: it opens the store (or goes on with one that is open), restores, reads the rest
of the prompts and gets logits. All is in real files; nothing is patched.
"""

import dataclasses
import functools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Flips
from experiments.recover.subject import Subject, going_on
from hybrid_attn.store.blocks import parse_name, read_header
from hybrid_attn.store.rebuild import BlockKey, Rebuilder

# Not read by a reader: empty lock files, and objects that were put aside before.
_UNREACHABLE = ("locks", "quarantine")
_KEEP_ALL = 1 << 50
# Units that are hit once a round at most, beside the rows of the prompts.
_INDEX, _SMALL = -2, -1


@dataclasses.dataclass(frozen=True)
class Flip:
    """One flipped bit: of which file, and what that byte was part of.

    ``row`` is the prompt whose block it is, below 0 for other files.
    """

    name: str
    place: str
    row: int


@functools.cache
def _cold(subject: Subject, rows: int, count: int, seed: int):
    """(prompts, logits of a cold run, the cache at every boundary)."""
    tokens = subject.prompts(rows, count, seed)
    cache = ha.init_cache(subject.config, rows, count)
    size, caches, logits = subject.block_tokens, [], []
    for start in range(0, count, size):
        piece = tokens[:, start : start + size]
        out, cache = ha.prefill(subject.model, cache, piece)
        logits.append(np.asarray(out))
        caches.append(cache)
    # The last cache has no boundary of its own: the prompts end within a block.
    return tokens, np.concatenate(logits, axis=1), caches[:-1]


class Campaign:
    """A store, its second copy, and what a cold run gives."""

    def __init__(self, subject: Subject, directory: Path, settings: Flips, seed: int):
        self.subject, self.directory = subject, directory
        self.chance = random.Random(seed)
        size = subject.block_tokens
        self.capacity = (settings.blocks + 1) * size
        # The rest after the last boundary is what every reader computes.
        count = settings.blocks * size + size // 4
        self.tokens, self.want, caches = _cold(subject, settings.rows, count, 0)
        shutil.rmtree(directory, ignore_errors=True)
        self.replica = subject.open(f"file://{directory}/copy")
        with subject.open(self.url) as store:
            for cache in caches:
                for target in (store, self.replica):
                    ha.transforms.offload(cache, target, self.tokens)
            store.gc(_KEEP_ALL)
            self.objects = store.stats.blocks
        layout = subject.layout
        self.recent = {group.name for group in layout.family("recent")}
        self.rows = {
            str(digest): (row, digest.index)
            for row, ids in enumerate(self.tokens)
            for digest in self.replica.chain(layout.fingerprint, ids, size)
        }
        self.layouts = {group.name: group.fingerprint for group in layout.groups}
        self.counts: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"file://{self.directory}/store"

    def files(self) -> dict[str, int]:
        """Bytes of every file that a reader can reach, by name."""
        root = self.directory / "store"
        return {
            str(path.relative_to(root)): path.stat().st_size
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.relative_to(root).parts[0] not in _UNREACHABLE
        }

    def run(self, count: int, least: float, report: Callable[[float], None]) -> dict:
        """Makes ``count`` flips; returns the counts."""
        sizes: Counter[int] = Counter()
        for name, size in self.files().items():
            sizes[min(self._unit(name), 0)] += size
        total = sum(sizes.values())
        shares = {
            unit: max(least / 2, sizes[unit] / total) for unit in (_INDEX, _SMALL)
        }
        others = {
            unit: min(count // 3, max(1, round(count * share)))
            for unit, share in shares.items()
        }
        every = list(range(len(self.tokens)))
        rounds: list[list[int]] = []
        left = count - sum(others.values())
        while left > 0 or len(rounds) < max(others.values()):
            rounds.append(self.chance.sample(every, min(max(left, 0), len(every))))
            left -= len(rounds[-1])
        for unit, number in others.items():
            for units in self.chance.sample(rounds, number):
                units.append(unit)
        for number, units in enumerate(rounds):
            self._round(units, number)
            report((number + 1) / len(rounds))
        self.replica.close()
        return dict(self.counts)

    def _unit(self, name: str) -> int:
        parsed = parse_name(name)
        if parsed is not None:
            return self.rows[parsed[1]][0]
        return _INDEX if name.startswith("index/") else _SMALL

    def _round(self, units: list[int], number: int) -> None:
        store = None
        if min(units, default=0) >= 0 and number % 2:
            store = self.subject.open(self.url)  # a reader that was there before
            store.refresh()
        flips = self._flip(units)
        store = store or self.subject.open(self.url)
        config, model = self.subject.config, self.subject.model
        lengths = self._lengths(flips)
        cache = ha.transforms.restore(
            store, config, self.tokens, lengths, capacity=self.capacity
        )
        logits, after = going_on(model, cache, self.tokens, lengths)
        computed = ~np.isnan(logits)
        wrong = ((logits != self.want) & computed).any(axis=(1, 2))
        wrong |= ~computed[np.arange(len(wrong)), lengths - 1].all(axis=1)
        found = self._found(store, flips)
        self._rebuild(store, flips, after, number)
        scrubbed = store.verify()
        late = {*scrubbed.damaged, *scrubbed.missing, *scrubbed.foreign}
        # Whatever only the scrub saw is gone by now too.
        report = store.verify() if late else scrubbed
        whole = report.sound and store.stats.blocks == self.objects
        self.counts["wrong_logits"] += int(wrong.sum())
        for flip in flips:
            by_scrub = flip not in found and self._named(flip, late)
            self.counts["flips_injected"] += 1
            self.counts[f"flips_in_{flip.place}"] += 1
            self.counts["flips_detected"] += flip in found or by_scrub
            self.counts["flips_detected_by_scrub_only"] += by_scrub
            self.counts["rebuilt"] += whole or self._sound(store, flip)
        store.gc(_KEEP_ALL)  # empties the quarantine
        store.close()

    def _lengths(self, flips: list[Flip]) -> np.ndarray:
        """int[rows]: prompts that need each flipped block, and others of any length.

        Entries are read below any later boundary, recent states at their own alone.
        """
        size = self.subject.block_tokens
        last = (self.capacity // size) - 1
        boundary = [self.chance.randint(1, last) for _ in self.tokens]
        for flip in flips:
            parsed = parse_name(flip.name)
            if parsed is not None:
                first = self.rows[parsed[1]][1] + 1
                recent = parsed[0] in self.recent
                boundary[flip.row] = (
                    first if recent else self.chance.randint(first, last)
                )
        tail = [self.chance.randint(1, size // 4) for _ in self.tokens]
        return np.array(boundary, np.int32) * size + np.array(tail, np.int32)

    def _flip(self, units: list[int]) -> list[Flip]:
        """One bit of each row's blocks, or of other files, evenly by bytes."""
        by_unit: dict[int, list[tuple[str, int]]] = {}
        for name, size in self.files().items():
            by_unit.setdefault(self._unit(name), []).append((name, size))
        flips = []
        for unit in units:
            names, sizes = zip(*by_unit[unit], strict=True)
            name = self.chance.choices(names, sizes)[0]
            path = self.directory / "store" / name
            data = path.read_bytes()
            at, bit = self.chance.randrange(len(data)), self.chance.randrange(8)
            flips.append(Flip(name, _place(name, data, at), unit))
            # The same inode: also a file that a reader holds open changes.
            with open(path, "r+b") as stream:
                stream.seek(at)
                stream.write(bytes([data[at] ^ 1 << bit]))
                stream.flush()
                os.fsync(stream.fileno())
        return flips

    def _found(self, store: ha.store.Store, flips: list[Flip]) -> set[Flip]:
        """The flips that an event of the store tells of."""
        kinds = {event.kind for event in store.events}
        told = "\n".join(
            f"{event.key} {event.detail}"
            for event in store.events
            if event.kind in ("failed", "quarantined")
        )
        found = set()
        for flip in flips:
            if flip.place in ("index", "seal"):
                seen = "index_rebuilt" in kinds
            elif flip.place == "marker":
                seen = "marker_rewritten" in kinds
            elif flip.place == "usage":
                seen = any(event.key == flip.name for event in store.events)
            else:
                seen = flip.name in told
            if seen:
                found.add(flip)
        return found

    def _named(self, flip: Flip, late: set[str]) -> bool:
        if flip.place in ("index", "seal"):
            return "index/" in late
        return flip.name in late

    def _rebuild(self, store, flips: list[Flip], after: ha.Cache, number: int) -> None:
        """Makes lost blocks anew, in turn from the second copy or from tokens."""
        lost = [key for flip in flips if (key := self._key(flip)) is not None]
        lost = [
            key for key in lost if not store.contains(key.group, key.layout, key.chain)
        ]
        if not lost:
            return
        if number // 2 % 2:
            ha.transforms.offload(after, store, self.tokens)
            self.counts["rebuilt_by_recompute"] += len(lost)
            return
        with Rebuilder(store, replicas=[self.replica]) as rebuilder:
            results = [future.result() for future in map(rebuilder.submit, lost)]
        self.counts["rebuilt_from_copy"] += sum(result.ok for result in results)

    def _key(self, flip: Flip) -> BlockKey | None:
        parsed = parse_name(flip.name)
        if parsed is None:
            return None
        return BlockKey(parsed[0], self.layouts[parsed[0]], parsed[1])

    def _sound(self, store, flip: Flip) -> bool:
        """Whether what one flip hit is whole again, where not all of the store is."""
        key = self._key(flip)
        if key is None:
            return False
        return store.fetch(key.group, key.layout, key.chain) is not None


def _place(name: str, data: bytes, at: int) -> str:
    """What a byte of a file is part of."""
    if parse_name(name) is None:
        if name == "index/seal":
            return "seal"
        return {"STORE": "marker", "usage": "usage"}.get(name, "index")
    header, start, _ = read_header(name, data)
    if at < start:
        return "header"
    return "payload" if at < start + header.payload_bytes else "padding"


def run_piece(
    subject: Subject,
    directory: Path,
    settings: Flips,
    count: int,
    seed: int,
    report: Callable[[float], None],
) -> dict[str, int]:
    """Makes ``count`` flips in a new store under a directory, which is removed then.

    Returns:
      flips_injected; flips_in_PLACE of header, payload, padding, index, seal, marker
      and usage; flips_detected (by the reader's events, or by `Store.verify` for those
      that it did not read: flips_detected_by_scrub_only); wrong_logits: rows with a
      logit other than the cold run's, or none; rebuilt: flips after which the store is
      verified as a whole again; rebuilt_from_copy, rebuilt_by_recompute: blocks.
    """
    try:
        campaign = Campaign(subject, directory, settings, seed)
        return campaign.run(count, settings.index_share, report)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
