"""Offload and restore of a long prefix: what verification costs, what a hit saves."""

import contextlib
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Throughput
from experiments.recover.subject import Subject, seconds
from hybrid_attn.store.blocks import unchecked_for_measurement


def run_throughput(
    subject: Subject,
    directory: Path,
    settings: Throughput,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """A cold prefill against restore and the rest; CRC32C on and off in turn.

    Returns:
      ttft_tokens; ttft_cold_seconds, ttft_restored_seconds (restore, and prefill of
      what is left, to the last token's logits; the median) and their ratio
      ttft_speedup, with ttft_speedup_worst; ttft_logits_equal: bit for bit;
      verify_overhead: seconds of offload + restore with CRC32C over those without,
      less 1: the median over pairs in turn; the four medians in seconds; offload_bytes.
    """
    config, model, count = subject.config, subject.model, settings.tokens
    tokens = subject.prompts(1, count + 1, seed)
    capacity = count + 2 * subject.block_tokens

    def cold(prompt: np.ndarray):
        empty = ha.init_cache(config, 1, capacity)
        return ha.prefill(model, empty, prompt, logits="last", donate=True)

    jax.block_until_ready(cold(tokens[:, : subject.block_tokens + 1]))  # compiles
    taken, (want, cache) = seconds(lambda: cold(tokens))
    report(0.4, "cold prefill")

    def restored(store):
        return ha.transforms.restore(store, config, tokens, capacity=capacity)

    hits, equal = [], True
    times: dict[tuple[bool, str], list[float]] = {}
    written = 0
    for number in range(settings.repeats + 1):
        for checked in (True, False) if number % 2 else (False, True):
            path = directory / f"{number}-{checked}"
            manager = contextlib.nullcontext() if checked else _unchecked()
            with manager, subject.open(f"file://{path}") as store:
                put, done = seconds(
                    lambda s=store: ha.transforms.offload(cache, s, tokens)
                )
                get, held = seconds(lambda s=store: restored(s))
                if number:  # the first pair warms up
                    times.setdefault((checked, "offload"), []).append(put)
                    times.setdefault((checked, "restore"), []).append(get)
                if checked:
                    written = done.bytes
                    at = int(held.length[0])

                    def first(s=store):
                        held = restored(s)
                        rest = tokens[:, int(held.length[0]) :]
                        return ha.prefill(model, held, rest, logits="last", donate=True)

                    hit, (got, _) = seconds(first)
                    hits += [hit] if number else []
                    equal &= bool((np.asarray(got) == np.asarray(want)).all())
                    assert at == count // subject.block_tokens * subject.block_tokens
            shutil.rmtree(path)
        report(0.4 + 0.6 * (number + 1) / (settings.repeats + 1), "offload, restore")
    ratios = [
        sum(pair[:2]) / sum(pair[2:]) - 1
        for pair in zip(
            times[True, "offload"],
            times[True, "restore"],
            times[False, "offload"],
            times[False, "restore"],
            strict=True,
        )
    ]
    middle = {key: statistics.median(values) for key, values in times.items()}
    return {
        "ttft_tokens": count,
        "ttft_cold_seconds": taken,
        "ttft_restored_seconds": statistics.median(hits),
        "ttft_speedup": taken / statistics.median(hits),
        "ttft_speedup_worst": taken / max(hits),
        "ttft_logits_equal": equal,
        "verify_overhead": statistics.median(ratios),
        "verify_overhead_worst": max(ratios),
        "offload_seconds": middle[True, "offload"],
        "restore_seconds": middle[True, "restore"],
        "offload_seconds_unchecked": middle[False, "offload"],
        "restore_seconds_unchecked": middle[False, "restore"],
        "offload_bytes": written,
    }


def _unchecked():
    return unchecked_for_measurement()
