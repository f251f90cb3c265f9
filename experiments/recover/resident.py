"""Flips in memory: sealed blocks on the host and on the device, and their scrubber."""

import ctypes
import random
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Resident
from experiments.recover.subject import Subject
from hybrid_attn.store.scrub import Scrubber, Sealed


def run_resident(
    subject: Subject, settings: Resident, seed: int, report: Callable[[float], None]
) -> dict:
    """Flips bits in resident copies until the scrubber has been through; and its cost.

    Returns:
      resident_flips_injected, resident_flips_detected, in host and in device copies;
      resident_false_findings; resident_blocks, resident_bytes: what was watched;
      scrub_overhead: scrubbing's share of a decoding step's time at ``sample`` blocks a
      step; scrub_step_ratio: median step with scrubbing over median step without, in
      turn; scrub_round_steps: steps until every block was checked once.
    """
    payloads, cache, tokens = _held(subject, settings, seed)
    result: dict[str, float] = dict.fromkeys(
        (
            "resident_flips_injected",
            "resident_flips_detected",
            "resident_false_findings",
        ),
        0,
    )
    copies = {
        "host": lambda parts: {str(i): part.copy() for i, part in enumerate(parts)},
        "device": lambda parts: {
            str(i): jnp.array(part, copy=True) for i, part in enumerate(parts)
        },
    }
    for number, (where, copy) in enumerate(copies.items()):
        blocks = {name: copy(parts) for name, parts in payloads.items()}
        count = (settings.flips + 1 - number) // 2
        counts = _flip_all(blocks, count, settings.sample, seed)
        for key, value in counts.items():
            result[f"resident_{key}"] += value
            result[f"resident_{key}_{where}"] = value
        report(0.25 * (number + 1))
    watched = [
        Sealed.of(name, copies["device"](parts)) for name, parts in payloads.items()
    ]
    result |= {
        "resident_blocks": len(watched),
        "resident_bytes": sum(block.nbytes for block in watched),
        "scrub_round_steps": -(-len(watched) // settings.sample),
    }
    return result | _overhead(subject, settings, watched, cache, tokens, seed)


def _held(subject: Subject, settings: Resident, seed: int):
    """Arrays of every block of a prompt by name, its cache, and the prompt."""
    tokens = subject.prompts(1, settings.context, seed)
    capacity = settings.context + settings.steps + subject.block_tokens
    cache = ha.init_cache(subject.config, 1, capacity)
    _, cache = ha.prefill(subject.model, cache, tokens, logits="none", donate=True)
    payloads = {}
    with subject.open(f"memory://recover-resident-{seed}/") as store:
        ha.transforms.offload(cache, store, tokens)
        layout = subject.layout
        chain = store.chain(layout.fingerprint, tokens[0], subject.block_tokens)
        for group in layout.groups:
            for digest in chain:
                found = store.fetch(group.name, group.fingerprint, digest)
                if found is not None:
                    name = f"{group.name}/{digest.index}"
                    payloads[name] = group.unpack(found.data)
    return payloads, cache, tokens


def _flip_all(blocks: dict, count: int, sample: int, seed: int) -> dict[str, int]:
    """Flips in as many blocks as there are at a time; the scrubber then goes round."""
    chance = random.Random(seed)
    scrubber = Scrubber(seed=seed)
    for name, arrays in blocks.items():
        scrubber.add(Sealed.of(name, arrays))
    detected = false = left = 0
    injected = 0
    while injected < count:
        left = min(len(blocks), count - injected)
        wanted = set()
        undo = []
        for name in chance.sample(sorted(blocks), left):
            arrays = blocks[name]
            sizes = [array.nbytes for array in arrays.values()]
            array = chance.choices(list(arrays), sizes)[0]
            bit = chance.randrange(8 * arrays[array].nbytes)
            undo.append((name, array, bit, _flip(arrays, array, bit)))
            wanted.add((name, array))
        found = []
        # Every block is checked at the latest after two rounds.
        for _ in range(2 * -(-len(blocks) // sample)):
            found += scrubber.scrub(sample)
        seen = {(finding.block, finding.array) for finding in found}
        injected += left
        detected += len(seen & wanted)
        false += len(seen - wanted)
        for name, array, bit, seal in undo:
            _flip(blocks[name], array, bit)
            scrubber.add(Sealed(name, blocks[name], seal))
    return {
        "flips_injected": injected,
        "flips_detected": detected,
        "false_findings": false,
    }


def _flip(arrays: dict, name: str, bit: int) -> dict[str, int]:
    """Flips a bit of one array in its memory; returns the CRCs that all had before."""
    seal = dict(Sealed.of("", arrays).crcs)
    array = arrays[name]
    if isinstance(array, np.ndarray):
        array.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    elif array.devices() == {jax.devices("cpu")[0]}:
        # No API writes to a device array: this is the memory that it lies in.
        byte = ctypes.c_uint8.from_address(array.unsafe_buffer_pointer() + bit // 8)
        byte.value ^= 1 << bit % 8
    else:
        # Where the host cannot reach: an array with the flipped bit in its place.
        changed = np.array(array)
        changed.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        arrays[name] = jax.device_put(changed, next(iter(array.devices())))
    return seal


def _overhead(subject, settings: Resident, watched, cache, tokens, seed) -> dict:
    scrubber = Scrubber(seed=seed)
    for block in watched:
        scrubber.add(block)
    run = ha.compile_step(subject.model, logits="last")
    token = tokens[:, -1:]
    times: dict[bool, list[float]] = {True: [], False: []}
    spent = []
    for number in range(settings.steps):
        scrubbing = bool(number % 2)
        begin = time.perf_counter()
        logits, cache = run(cache, token)
        logits.block_until_ready()
        middle = time.perf_counter()
        if scrubbing:
            scrubber.scrub(settings.sample)
        end = time.perf_counter()
        if number >= settings.steps // 10:  # the first steps compile and warm up
            times[scrubbing].append(end - begin)
            spent += [end - middle] if scrubbing else []
    step = statistics.median(times[False])
    return {
        "scrub_overhead": statistics.median(spent) / step,
        "scrub_step_ratio": statistics.median(times[True]) / step,
        "scrub_us_per_step": 1e6 * statistics.median(spent),
        "scrub_step_ms": 1e3 * step,
    }
