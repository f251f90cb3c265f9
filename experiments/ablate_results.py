"""What `ablate` measures of one variant with one seed, and the keys made from it."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BASELINE = "dense"
LAYOUTS = ("offset", "aligned")
BUCKETS = ("in_window", "beyond_window", "beyond_reach")
CONTEXT_64K = 65536

_KIND = "ablate.variant"


@dataclasses.dataclass(frozen=True)
class DistanceBin:
    """Recall over a range of distances.

    Attributes:
      low: smallest distance, in tokens.
      high: largest distance, in tokens, inclusive.
      accuracy: 0..1.
      queries: number of queries that it is a mean over.
    """

    low: int
    high: int
    accuracy: float
    queries: int


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """One variant trained with one seed.

    Costs may be measured with one seed alone: they are empty then for the others.

    Attributes:
      name: the variant, such as "hybrid".
      seed: of weights and data.
      parameters: trained numbers of the model.
      recall: layout -> bucket -> accuracy, 0..1, on rows that were not trained on.
      recall_by_distance: on the layout "offset", bins in rising order.
      bits_per_byte: on held-out text.
      cache_bytes_per_token: allocated bytes by capacity, at a capacity of 64k tokens.
      prefill_tokens_per_s: context length -> tokens a second.
      decode_ms: context length -> milliseconds a token, batch of one.
      window: W of the window variants, in tokens; a mark in the figures.
      reach: tokens that a stack of window layers can see; a mark in the figures.
      chance: recall of guessing, 0..1, if known.
      stack: the layers in words, such as "hca,swa,csa".
      seconds: wall time of training and measuring.
      curves: metric -> [(step, value), ...].
    """

    name: str
    seed: int
    parameters: int
    recall: Mapping[str, Mapping[str, float]]
    recall_by_distance: Sequence[DistanceBin]
    bits_per_byte: float
    cache_bytes_per_token: float
    prefill_tokens_per_s: Mapping[int, float]
    decode_ms: Mapping[int, float]
    window: int
    reach: int
    chance: float | None = None
    stack: str = ""
    seconds: float | None = None
    curves: Mapping[str, Sequence[tuple[int, float]]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Raises: ValueError if a layout or bucket is missing or unknown."""
        for layout in LAYOUTS:
            got = sorted(self.recall.get(layout, {}))
            if got != sorted(BUCKETS):
                raise ValueError(
                    f"{self.name}, seed {self.seed}: recall on the layout {layout!r} "
                    f"has the buckets {got}, expected {sorted(BUCKETS)}"
                )

    def to_json(self) -> dict[str, Any]:
        """A result for `Workdir.mark_done`."""
        return {"kind": _KIND} | dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "VariantResult":
        """The inverse of `to_json`, also after JSON made every key a string."""
        fields = {key: value for key, value in record.items() if key != "kind"}
        for key in ("prefill_tokens_per_s", "decode_ms"):
            fields[key] = {int(n): value for n, value in fields[key].items()}
        fields["recall_by_distance"] = tuple(
            DistanceBin(**item) for item in fields["recall_by_distance"]
        )
        fields["curves"] = {
            name: tuple((step, value) for step, value in points)
            for name, points in fields["curves"].items()
        }
        return cls(**fields)


def distance_bins(
    distance: np.ndarray, correct: np.ndarray, edges: Sequence[int] = ()
) -> tuple[DistanceBin, ...]:
    """Recall by distance.

    Args:
      distance: int[...], as in `Batch.distance`; 0 is no query.
      correct: bool[...], the answer was right.
      edges: lowest distance of each bin, rising; doublings from 1 on if empty. To see
        a window and its reach, make window and reach + 1 edges.

    Returns:
      The bins that have a query.
    """
    distance, correct = np.ravel(distance), np.ravel(correct)
    longest = int(distance.max(initial=0))
    lows = list(edges) or [2**n for n in range(longest.bit_length())] or [1]
    bins = []
    for low, end in zip(lows, [*lows[1:], max(longest, lows[-1]) + 1], strict=True):
        inside = (distance >= low) & (distance < end)
        if inside.any():
            accuracy = float(correct[inside].mean())
            bins.append(DistanceBin(low, end - 1, accuracy, int(inside.sum())))
    return tuple(bins)


def load_results(workdir: Path) -> list[VariantResult]:
    """The results among a run's finished stages, by variant, then by seed.

    Variants stand in the order in which config.json names them under
    "variants" (a list or a mapping), others after them.
    """
    found = []
    for path in sorted((workdir / "stages").glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))["result"]
        if record.get("kind") == _KIND:
            found.append(VariantResult.from_json(record))
    config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
    order = [str(name) for name in config["config"].get("variants", ())]
    place = {name: index for index, name in enumerate(order)}
    found.sort(key=lambda r: (place.get(r.name, len(place)), r.name, r.seed))
    return found


def by_variant(results: Iterable[VariantResult]) -> dict[str, list[VariantResult]]:
    """Groups results by variant; the order of the variants is kept."""
    groups: dict[str, list[VariantResult]] = {}
    for result in results:
        groups.setdefault(result.name, []).append(result)
    return groups


def values(
    group: Iterable[VariantResult], read: Callable[[VariantResult], float | None]
) -> list[float]:
    """One number a seed, without the seeds that did not measure it."""
    return [number for r in group if (number := read(r)) is not None]


def mean(numbers: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.fmean(numbers) if numbers else None


def recall_of(layout: str, bucket: str) -> Callable[[VariantResult], float]:
    """Reader of a recall, for `values`."""
    return lambda result: result.recall[layout][bucket]


def decode_at(context: int) -> Callable[[VariantResult], float | None]:
    """Reader of decode milliseconds a token, for `values`."""
    return lambda result: result.decode_ms.get(context)


def prefill_at(context: int) -> Callable[[VariantResult], float | None]:
    """Reader of prefill tokens a second, for `values`."""
    return lambda result: result.prefill_tokens_per_s.get(context)


def contexts(results: Iterable[VariantResult], field: str) -> list[int]:
    """Every context length at which a cost was measured, rising."""
    return sorted({n for result in results for n in getattr(result, field)})


def summary_keys(results: Sequence[VariantResult]) -> dict[str, Any]:
    """Flat keys for summary.json; V is a variant, numbers are means over its seeds.

    V.recall_in_window, V.recall_beyond_window, V.recall_beyond_reach   0..1, offset
    V.aligned.recall_...            the same on the textbook layout
    V.bits_per_byte                 held-out text
    V.cache_bytes_per_token         at a capacity of 64k tokens
    V.decode_ms_64k                 ms a token at 64k tokens, if measured
    V.prefill_tokens_per_s          at V.prefill_length, the longest that every
                                    variant measured
    V.parameters, V.seeds           count; list of seeds
    V.<key>_seeds                   list in the order of V.seeds, for recall on
                                    the offset layout and bits per byte
    V.<key>_to_dense                ratio of means, for bits_per_byte,
                                    cache_bytes_per_token, decode_ms_64k and
                                    prefill_tokens_per_s, if dense was measured
    """
    groups = by_variant(results)
    shared = [set(contexts(g, "prefill_tokens_per_s")) for g in groups.values()]
    common = set.intersection(*shared) if shared else set()
    keys: dict[str, Any] = {}
    for name, group in groups.items():
        per_seed = {
            f"recall_{bucket}": values(group, recall_of("offset", bucket))
            for bucket in BUCKETS
        }
        per_seed["bits_per_byte"] = values(group, lambda r: r.bits_per_byte)
        for key, numbers in per_seed.items():
            keys[f"{name}.{key}"] = mean(numbers)
        for bucket in BUCKETS:
            numbers = values(group, recall_of("aligned", bucket))
            keys[f"{name}.aligned.recall_{bucket}"] = mean(numbers)
        bytes_ = values(group, lambda r: r.cache_bytes_per_token)
        keys[f"{name}.cache_bytes_per_token"] = mean(bytes_)
        decode = values(group, decode_at(CONTEXT_64K))
        if decode:
            keys[f"{name}.decode_ms_64k"] = mean(decode)
        if common:
            length = max(common)
            keys[f"{name}.prefill_tokens_per_s"] = mean(
                values(group, prefill_at(length))
            )
            keys[f"{name}.prefill_length"] = length
        keys[f"{name}.parameters"] = group[0].parameters
        keys[f"{name}.seeds"] = [r.seed for r in group]
        for key, numbers in per_seed.items():
            keys[f"{name}.{key}_seeds"] = numbers
    for name in groups if BASELINE in groups else ():
        for key in (
            "bits_per_byte",
            "cache_bytes_per_token",
            "decode_ms_64k",
            "prefill_tokens_per_s",
        ):
            own, base = keys.get(f"{name}.{key}"), keys.get(f"{BASELINE}.{key}")
            if own is not None and base:
                keys[f"{name}.{key}_to_dense"] = own / base
    return keys
