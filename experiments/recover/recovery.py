"""Checkpoints of one process: what recording costs, and what recovering saves."""

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Crash
from experiments.recover.subject import Subject, seconds
from hybrid_attn import checkpoint

_CACHE = "rows"
_INCREMENT = 64  # tokens whose log is compared with a snapshot


def run_recovery(
    subject: Subject,
    directory: Path,
    settings: Crash,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """From opening a checkpoint to the first token, against reading the prompt again.

    Returns:
      recovery_tokens; recovery_seconds: `restore` of a verified snapshot and one step,
      the median of three, compiled functions warm; recompute_seconds: a prefill of the
      same tokens and the same step; recovery_speedup; recovery_logits_equal: bit for
      bit.
    """
    count = settings.long
    tokens = subject.prompts(1, count + 1, seed)
    run = ha.compile_step(subject.model, logits="last", donate=False)

    def cold(prompt: np.ndarray) -> ha.Cache:
        empty = ha.init_cache(subject.config, 1, count + 2 * subject.block_tokens)
        return ha.prefill(subject.model, empty, prompt, logits="none", donate=True)[1]

    def first(cache: ha.Cache):
        return run(cache, tokens[:, -1:])[0]

    jax.block_until_ready(first(cold(tokens[:, : subject.block_tokens])))  # compiles
    report(0.05, "compiled")
    taken, (cache, want) = seconds(
        lambda: (cache := cold(tokens[:, :-1]), first(cache))
    )
    report(0.7, "recomputed")
    try:
        checkpoint.save(
            directory,
            {_CACHE: cache},
            {_CACHE: tokens[:, :count]},
            model_id=subject.identity,
        )

        def recovered():
            held = checkpoint.restore(
                directory, subject.config, model_id=subject.identity
            )
            return first(held.caches[_CACHE])

        found = [seconds(recovered) for _ in range(4)][1:]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    middle = statistics.median(spent for spent, _ in found)
    return {
        "recovery_tokens": count,
        "recovery_seconds": middle,
        "recompute_seconds": taken,
        "recovery_speedup": taken / middle,
        "recovery_logits_equal": all(
            bool((np.asarray(got) == np.asarray(want)).all()) for _, got in found
        ),
    }


def run_catch_up(
    subject: Subject,
    directory: Path,
    settings: Crash,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """Recovering from a snapshot of almost nothing and a log of so many tokens.

    Each record of the log holds ``catch_up_step`` tokens.

    Returns:
      catchup_seconds_N, of `restore`, with N as 64, 1k, 16k; catchup_log_bytes_N.
    """
    step, result = settings.catch_up_step, {}
    run = ha.compile_step(subject.model, logits="none")
    longest = max(settings.catch_up)
    tokens = subject.prompts(1, longest + step, seed)
    for number, count in enumerate(settings.catch_up):
        name = f"{count // 1024}k" if count % 1024 == 0 else str(count)
        cache = ha.init_cache(subject.config, 1, longest + step)
        try:
            with checkpoint.Checkpointer(
                directory, model_id=subject.identity, log_tokens=step
            ) as keeper:
                at = 0
                while at < count + step:
                    _, cache = run(cache, tokens[:, at : at + step])
                    at += step
                    keeper.observe({_CACHE: cache}, {_CACHE: tokens[:, :at]})
            spent, held = seconds(
                lambda: (
                    checkpoint.restore(
                        directory, subject.config, model_id=subject.identity
                    ).caches
                )
            )
            assert int(held[_CACHE].length[0]) == count + step
            assert ha.diff(held[_CACHE], cache) is None
            result[f"catchup_seconds_{name}"] = spent
            result[f"catchup_log_bytes_{name}"] = keeper.statistics.log_bytes
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        report((number + 1) / len(settings.catch_up), f"log of {name} tokens")
    return result


def run_overhead(
    subject: Subject,
    directory: Path,
    settings: Crash,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """Recording at each interval: tokens at risk, cost of a step, bytes.

    The long cache holds random numbers in every state: bytes depend on nothing else.

    Returns:
      write_overhead_per_step: recording's share of a step's time with a record of
      every token; step_ms; for each interval N tokens_at_risk_log_N (a row) and
      write_overhead_log_N; tokens_at_risk_snapshot, write_overhead_snapshot: without a
      log, a snapshot in the background every ``snapshot_tokens``;
      incremental_bytes_ratio: bytes of the log for 64 tokens at ``log_context`` over
      those of a snapshot; incremental_bytes, snapshot_bytes.
    """
    run = ha.compile_step(subject.model, logits="last")
    prompts = subject.prompts(settings.rows, settings.context, seed)
    steps = settings.overhead_steps
    cache = ha.init_cache(
        subject.config, settings.rows, settings.context + steps + subject.block_tokens
    )
    _, begun = ha.prefill(subject.model, cache, prompts, logits="none", donate=True)
    result: dict[str, float] = {}
    plans: list[tuple[str, int | None, int | None]] = [
        (f"log_{n}", n, None) for n in settings.intervals
    ]
    plans.append(("snapshot", None, settings.snapshot_tokens))
    for number, (name, log_tokens, every) in enumerate(plans):
        try:
            with checkpoint.Checkpointer(
                directory,
                model_id=subject.identity,
                log_tokens=log_tokens,
                every_tokens=every,
            ) as keeper:
                step, record = _recorded(run, begun, prompts, steps, keeper)
                keeper.wait()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        result[f"tokens_at_risk_{name}"] = log_tokens or every or 0
        result[f"write_overhead_{name}"] = record / step
        result[f"record_ms_{name}"] = 1e3 * record
        result.setdefault("step_ms", 1e3 * step)
        report(0.7 * (number + 1) / len(plans), name)
    result["write_overhead_per_step"] = result[f"write_overhead_log_{1}"]
    return result | _bytes(subject, directory, settings, run, seed)


def _recorded(run, cache, prompts, steps: int, keeper) -> tuple[float, float]:
    """Seconds of a step (the median) and of recording it (the mean: not all do)."""
    cache = ha.transforms.fork(cache)
    held = np.concatenate([prompts, np.zeros((len(prompts), steps), np.int32)], axis=1)
    at = prompts.shape[1]
    keeper.observe({_CACHE: cache}, {_CACHE: held[:, :at]})
    stepped, recorded = [], []
    for number in range(steps):
        begin = time.perf_counter()
        logits, cache = run(cache, held[:, at : at + 1])
        logits.block_until_ready()
        middle = time.perf_counter()
        at += 1
        keeper.observe({_CACHE: cache}, {_CACHE: held[:, :at]})
        if number >= steps // 8:  # the first compile and warm up
            stepped.append(middle - begin)
            recorded.append(time.perf_counter() - middle)
    return statistics.median(stepped), statistics.fmean(recorded)


def _bytes(subject, directory, settings: Crash, run, seed: int) -> dict:
    count = settings.log_context
    empty = ha.init_cache(subject.config, 1, count + _INCREMENT)
    leaves, tree = jax.tree.flatten((empty.layers, empty.cuts))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    layers, cuts = jax.tree.unflatten(
        tree,
        [
            jax.random.normal(key, leaf.shape).astype(leaf.dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )
    # No two fields may share an array: steps donate them.
    counts = {
        name: jnp.full((1,), count, jnp.int32) for name in ("length", "floor", "cut")
    }
    cache = empty.replace(layers=layers, cuts=cuts, **counts)
    tokens = subject.prompts(1, count + _INCREMENT, seed)
    try:
        with checkpoint.Checkpointer(
            directory, model_id=subject.identity, log_tokens=1
        ) as keeper:
            keeper.observe({_CACHE: cache}, {_CACHE: tokens[:, :count]})
            for now in range(count, count + _INCREMENT):
                _, cache = run(cache, tokens[:, now : now + 1])
                keeper.observe({_CACHE: cache}, {_CACHE: tokens[:, : now + 1]})
            keeper.wait()
            written = keeper.statistics
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "incremental_bytes_ratio": written.log_bytes / written.snapshot_bytes,
        "incremental_bytes": written.log_bytes,
        "snapshot_bytes": written.snapshot_bytes,
        "incremental_context": count,
    }
