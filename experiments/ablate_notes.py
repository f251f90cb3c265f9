"""What a reader of an ablation must know, and whether its claims hold."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablate_config import AblateConfig
from experiments.ablate_results import BASELINE, VariantResult, by_variant


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement that a run can refute: `text` holds both numbers."""

    key: str
    text: str
    holds: bool


def claims(keys: Mapping[str, Any]) -> list[Claim]:
    """The claims about the hybrid that the summary's numbers confirm or refute."""
    found = []

    def add(key: str, text: str, needed: Sequence[str], test) -> None:
        if all(isinstance(keys.get(name), int | float) for name in needed):
            got = [keys[name] for name in needed]
            numbers = " and ".join(
                f"{name} {value:.3f}" for name, value in zip(needed, got, strict=True)
            )
            found.append(Claim(key, f"{text}: {numbers}", bool(test(*got))))

    beyond = "recall_beyond_reach"
    add(
        "swa_inside",
        "the window variant recalls at least 0.8 inside its window",
        ["swa.recall_in_window"],
        lambda swa: swa >= 0.8,
    )
    add(
        "hybrid_like_dense",
        # Two models that learned nothing are equal too: that is no result.
        "beyond reach the hybrid recalls within 0.1 of dense, and dense above 0.5",
        [f"hybrid.{beyond}", f"dense.{beyond}"],
        lambda hybrid, dense: hybrid >= dense - 0.1 and dense > 0.5,
    )
    add(
        "hybrid_above_swa",
        "beyond reach the hybrid recalls at least 0.5 more than swa",
        [f"hybrid.{beyond}", f"swa.{beyond}"],
        lambda hybrid, swa: hybrid >= swa + 0.5,
    )
    add(
        "hybrid_text",
        "the hybrid needs at most 1.02 × dense in bits per byte",
        ["hybrid.bits_per_byte_to_dense"],
        lambda ratio: ratio <= 1.02,
    )
    add(
        "hybrid_cache",
        "the hybrid's cache has at most 0.25 × dense's bytes",
        ["hybrid.cache_bytes_per_token_to_dense"],
        lambda ratio: ratio <= 0.25,
    )
    return found


def claim_line(claim: Claim) -> str:
    """One line for the terminal and the report."""
    return f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}"


def notes(
    config: AblateConfig,
    results: Sequence[VariantResult],
    keys: Mapping[str, Any],
    *,
    text_bytes: int,
) -> list[str]:
    """Lines for the head of the report; the claims first, null results included."""
    train, task = config.text.train, config.recall.task
    seen = train.steps * train.batch * train.length
    lines = [claim_line(claim) for claim in claims(keys)]
    lines += _text_order(results)
    lines.append(
        f"Text: {train.steps} steps of {train.batch} × {train.length} bytes "
        f"({seen / 1e6:.1f} MB of {_source(config)}). Training this short rewards "
        "local statistics; the bits per byte say how fast a mode learns those, not "
        f"what long training would give. Evaluated on {text_bytes:,} held-out bytes, "
        f"in windows of {train.length} that each start without context."
    )
    lines.append(
        f"Recall: {task.pairs} pairs in rows of {task.length} tokens, "
        f"{config.recall.train.steps} steps of {config.recall.train.batch} rows. "
        f"Guessing among the values of a row scores {1 / task.pairs:.3f}."
    )
    if config.token_shift:
        lines.append(
            "Every variant has the token shift on keys (key input x_t + mu·x_(t-1), "
            "mu learned). It does half of an induction head's work: the key of a value "
            "already knows the token before it. Without it these tasks are learned "
            "far more slowly; the numbers say nothing about models that lack it."
        )
    lines.append(
        "The layout `aligned` puts the pairs on the grid of the compressed groups: a "
        "model trained on it is flattered in its compressed layers. The models here "
        "were trained on `offset` rows alone, so that `aligned` shows how they carry "
        "over to rows of another form; judge by `offset`."
    )
    lines.append(
        f"A window of {config.window} tokens sees distances up to {config.window - 1}"
        + (", one more through the token shift" if config.token_shift else "")
        + f"; the deepest variant has {config.layers} layers and so carries "
        f"information over at most {config.reach} tokens by windows alone. All "
        "variants are scored by that one reach."
    )
    lines.append(
        "Decode time is the median step of a batch of one on a *synthetic fill*: "
        "cache arrays of random normal numbers with the counts set to the context, "
        "since a real fill of 64k tokens takes too long here. The work of a step "
        "goes with the counts, not with the values. Measured once, on the text model "
        "of seed 0; prefill is real text."
    )
    lines.append(
        "Times on a CPU are only good as ratios within this one run; with other work "
        "on the machine not even that."
    )
    counts = [r.parameters for r in results]
    lines.append(
        f"Parameters are equal within {100 * (max(counts) / min(counts) - 1):.1f} %: "
        "a mixer that needs fewer gets a wider feed-forward. Time and arithmetic are "
        "not equalised."
    )
    return lines


def _text_order(results: Sequence[VariantResult]) -> list[str]:
    """Whether the order in bits per byte means something."""
    groups = by_variant(results)
    if len(groups) < 2:
        return []
    means = {
        name: statistics.fmean(r.bits_per_byte for r in group)
        for name, group in groups.items()
    }
    order = " < ".join(sorted(means, key=means.__getitem__))
    if min(len(group) for group in groups.values()) < 2:
        return [
            f"Order of the bits per byte: {order}. One seed: there is no measure of "
            "chance in it, so that small differences mean nothing."
        ]
    deviation = max(
        statistics.stdev(r.bits_per_byte for r in group) for group in groups.values()
    )
    base = means.get(BASELINE, min(means.values()))
    within = [
        name
        for name, value in means.items()
        if name != BASELINE and abs(value - base) <= 2 * deviation
    ]
    tail = (
        f"not told from {BASELINE} by these seeds (two deviations, "
        f"{2 * deviation:.3f}): {', '.join(within)}."
        if within
        else f"every difference to {BASELINE} exceeds two deviations of the seeds "
        f"({2 * deviation:.3f})."
    )
    return [f"Order of the bits per byte: {order}; {tail}"]


def _source(config: AblateConfig) -> str:
    what = config.text_data.describe()
    if config.data.path is None:
        return f"the standard library of Python {what['python']}"
    return str(what["source"])
