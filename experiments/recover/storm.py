"""Decoding while blocks are rebuilt: what a step and a reader notice of it."""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Storm
from experiments.recover.slow import slow_reads
from experiments.recover.storm_worker import rebuild_all
from experiments.recover.subject import Subject
from hybrid_attn.store import Block
from hybrid_attn.store.blocks import object_name
from hybrid_attn.store.rebuild import BlockKey, Rebuilder

_ROOT = Path(__file__).resolve().parents[2]
_FEWEST_STEPS = 32


class Scene:
    """A store with a second copy, sequences that decode, and a reader."""

    def __init__(self, subject: Subject, directory: Path, settings: Storm, seed: int):
        self.subject, self.settings = subject, settings
        shutil.rmtree(directory, ignore_errors=True)
        self.directory = directory
        self.tokens = subject.prompts(settings.rows, settings.context, seed)
        cache = ha.init_cache(
            subject.config, settings.rows, settings.context + settings.room
        )
        _, self.cache = ha.prefill(
            subject.model, cache, self.tokens, logits="none", donate=True
        )
        self.store = subject.open(f"file://{directory}/store")
        with subject.open(self.copy_url) as copy:
            for target in (self.store, copy):
                ha.transforms.offload(self.cache, target, self.tokens)
        layout = subject.layout
        self.keys = [
            BlockKey(group.name, group.fingerprint, digest)
            for ids in self.tokens
            for digest in self.store.chain(
                layout.fingerprint, ids, subject.block_tokens
            )
            for group in layout.family("history")
        ]
        random.Random(seed).shuffle(self.keys)
        if len(self.keys) < settings.rebuilds:
            raise ValueError(
                f"storm.rebuilds={settings.rebuilds}: the prompts have "
                f"{len(self.keys)} blocks; give more rows or a longer context"
            )
        self.keys = self.keys[: settings.rebuilds]
        self.payloads = {key: self._fetch(key) for key in self.keys}
        self.run = ha.compile_step(subject.model, logits="last")

    @property
    def copy_url(self) -> str:
        return f"file://{self.directory}/copy"

    def slow_copy(self) -> ha.store.Store:
        slow = slow_reads(self.settings.slow_ms / 1e3)
        return self.subject.open(self.copy_url, wrap=slow)

    def _fetch(self, key: BlockKey) -> np.ndarray | None:
        found = self.store.fetch(key.group, key.layout, key.chain)
        return None if found is None else found.data

    def decode(self, going: Callable[[int], bool]) -> dict[str, list[float]]:
        """Steps while ``going(steps so far)``; a read of a block every few of them.

        Returns:
          seconds of each "steps" and of each of the "reads"; "bad" has an item for
          each read that gave nothing or other bytes.
        """
        cache = ha.transforms.fork(self.cache)
        token = self.tokens[:, -1:]
        steps, reads, bad = [], [], []
        room = self.settings.room
        while going(len(steps)):
            if len(steps) % room == room - 1:
                cache = ha.transforms.fork(self.cache)
            begin = time.perf_counter()
            logits, cache = self.run(cache, token)
            logits.block_until_ready()
            steps.append(time.perf_counter() - begin)
            if len(steps) % self.settings.read_every == 0:
                key = self.keys[len(reads) % len(self.keys)]
                begin = time.perf_counter()
                data = self._fetch(key)
                reads.append(time.perf_counter() - begin)
                wanted = self.payloads[key]
                if data is None or wanted is None or not np.array_equal(data, wanted):
                    bad.append(float(len(steps)))
        return {"steps": steps, "reads": reads, "bad": bad}


# Set before anything is loaded: the threads that libraries make at once inherit it. Of
# SCHED_IDLE a thread runs where a core is idle, and gives way at once.
_LEAST_PRIORITY = """
import os, runpy
os.nice(19)
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
runpy.run_module("experiments.recover.storm_worker", run_name="__main__")
"""


class WorkerProcess:
    """A `storm_worker` process; ``start`` begins a window of a storm, ``done`` asks."""

    def __init__(self, scene: Scene):
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LEAST_PRIORITY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        request = {
            "store": scene.store.url,
            "copy": scene.copy_url,
            "model_id": scene.subject.identity,
            "slow_seconds": scene.settings.slow_ms / 1e3,
            "fetchers": scene.settings.fetchers,
            "keys": [(k.group, k.layout, str(k.chain)) for k in scene.keys],
        }
        self._send(json.dumps(request))
        if self._receive() != "ready":
            raise RuntimeError("the process that rebuilds blocks did not start")

    def start(self, per_second: float, first: int, count: int) -> None:
        self._send(json.dumps([per_second, first, count]))
        self.result: dict[str, float] = {}
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _wait(self) -> None:
        self.result = json.loads(self._receive())

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class WorkerThreads:
    """The same in threads of this process."""

    def __init__(self, scene: Scene):
        self._scene = scene
        self._copy = scene.slow_copy()

    def start(self, per_second: float, first: int, count: int) -> None:
        self.result: dict[str, float] = {}
        window = (per_second, first, count)
        self._thread = threading.Thread(target=self._rebuild, args=window)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        self._copy.close()

    def _rebuild(self, per_second: float, first: int, count: int) -> None:
        scene = self._scene
        self.result = rebuild_all(
            scene.store,
            self._copy,
            scene.keys[first : first + count],
            scene.settings.fetchers,
            per_second=per_second,
        )


def run_storm(
    subject: Subject,
    directory: Path,
    settings: Storm,
    seed: int,
    report: Callable[[float, str], None],
) -> dict:
    """Storms beside decoding, the pipeline against serial, and a block without copy.

    Returns:
      rebuild_stall_ratio: p99 of a decoding step during storms over p99 idle, the
      rebuilder being a process of least priority that is given ``per_second`` blocks;
      rebuild_stall_ratio_burst: all at once; rebuild_stall_ratio_threads: with its
      threads in the decoding process (the keys below end likewise);
      reader_stall_ms_max: the longest
      read of a block during storms, reader_idle_ms_max outside of them;
      storm_rebuilt, storm_bad_reads (none or other bytes), storm_steps, storm_seconds;
      rebuild_pipeline_gain: seconds of serial rebuilding over those of the pipeline;
      recomputed_without_copy: blocks damaged in both copies that came back with the
      same bits.
    """
    try:
        scene = Scene(subject, directory, settings, seed)
        scene.decode(lambda n: n < 16)  # compiles
        report(0.2, "prompts are read")
        rate = settings.per_second
        worker = WorkerProcess(scene)
        result = _storms(scene, worker, rate, "", report)
        result |= _storms(scene, worker, 0.0, "_burst", report)
        worker.close()
        worker = WorkerThreads(scene)
        result |= _storms(scene, worker, rate, "_threads", report)
        worker.close()
        report(0.8, "serial and pipeline")
        result |= _gain(scene) | _without_copy(scene)
        scene.store.close()
        return result
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _storms(scene: Scene, worker, per_second, suffix: str, report) -> dict:
    storm: dict[str, list[float]] = {"steps": [], "reads": [], "bad": []}
    idle: dict[str, list[float]] = {"steps": [], "reads": [], "bad": []}
    rebuilt = spent = 0.0
    keys, size = len(scene.keys), scene.settings.window or len(scene.keys)
    windows = range(0, keys, size)
    # A machine's own noise comes and goes: each window of a storm has its idle one.
    for number in range(scene.settings.storms):
        for first in windows:
            worker.start(per_second, first, size)
            some = scene.decode(lambda n: not worker.done() or n < _FEWEST_STEPS)
            rebuilt += worker.result["ok"]
            spent += worker.result["seconds"]
            count = len(some["steps"])
            rest = scene.decode(lambda n, count=count: n < count)
            for key in storm:
                storm[key] += some[key]
                idle[key] += rest[key]
        report(0.25 + 0.2 * (number / scene.settings.storms), "storms" + suffix)
    p99 = [float(np.percentile(x["steps"], 99)) for x in (storm, idle)]
    median = [statistics.median(x["steps"]) for x in (storm, idle)]
    found = {
        "rebuild_stall_ratio": p99[0] / p99[1],
        "storm_median_ratio": median[0] / median[1],
        "storm_step_ms_p99": 1e3 * p99[0],
        "idle_step_ms_p99": 1e3 * p99[1],
        "idle_step_ms": 1e3 * median[1],
        "reader_stall_ms_max": 1e3 * max(storm["reads"]),
        "reader_idle_ms_max": 1e3 * max(idle["reads"]),
        "storm_rebuilt": int(rebuilt),
        "storm_bad_reads": len(storm["bad"]) + len(idle["bad"]),
        "storm_steps": len(storm["steps"]),
        "storm_seconds": spent,
    }
    return {f"{key}{suffix}": value for key, value in found.items()}


def _gain(scene: Scene) -> dict:
    spent = {True: 0.0, False: 0.0}
    with scene.slow_copy() as copy:
        for serial in (True, False, False, True):
            done = rebuild_all(
                scene.store, copy, scene.keys, scene.settings.fetchers, serial=serial
            )
            spent[serial] += done["seconds"]
    return {
        "rebuild_pipeline_gain": spent[True] / spent[False],
        "rebuild_serial_ms": 1e3 * spent[True] / 2 / len(scene.keys),
        "rebuild_pipeline_ms": 1e3 * spent[False] / 2 / len(scene.keys),
    }


def _without_copy(scene: Scene) -> dict:
    """Damages one block in both copies; a watching rebuilder makes it from tokens."""
    key, store, subject = scene.keys[0], scene.store, scene.subject
    ended = threading.Event()
    store.subscribe(
        lambda event: ended.set() if event.kind.startswith("rebuil") else None
    )

    def recompute(wanted: BlockKey) -> Block | None:
        for ids in scene.tokens:
            chain = store.chain(subject.layout.fingerprint, ids, subject.block_tokens)
            if wanted.chain in chain:
                return computed(subject, wanted, ids, scene.cache)
        return None

    with subject.open(scene.copy_url) as copy:
        for url in (store.url, copy.url):
            _damage(Path(url.removeprefix("file://")), key)
        with Rebuilder(store, replicas=[copy], recompute=recompute) as rebuilder:
            rebuilder.watch()
            missed = scene._fetch(key) is None
            ended.wait(60)
    found = store.fetch(key.group, key.layout, key.chain)
    held = scene.payloads[key]
    sources = [e.detail for e in store.events if e.kind == "rebuilt"]
    came = missed and sources[-1:] == ["from recompute"]
    if found is None or held is None or not np.array_equal(found.data, held):
        came = False
    return {"recomputed_without_copy": int(came)}


def computed(
    subject: Subject, key: BlockKey, tokens: np.ndarray, like: ha.Cache
) -> Block:
    """A block made from its tokens, int[t], by a cold prefill up to its boundary.

    The prefill has the shape of ``like``: another could give other low bits.
    """
    layout, size = subject.layout, subject.block_tokens
    with subject.open(f"memory://recover-scratch-{key.group}-{key.chain}/") as scratch:
        chain = scratch.chain(layout.fingerprint, tokens, size)
        digest = next(own for own in chain if own == key.chain)
        prompt = np.repeat(tokens[None, : digest.length], like.batch, axis=0)
        lengths = np.zeros((like.batch,), np.int32)
        lengths[0] = digest.length
        cache = ha.init_cache(subject.config, like.batch, like.spec.capacity)
        _, cache = ha.prefill(
            subject.model, cache, prompt, lengths, logits="none", donate=True
        )
        ha.transforms.offload(cache, scratch, prompt)
        made = scratch.fetch(key.group, key.layout, digest)
        assert made is not None
        scratch.forget(chain[:1])
    return Block(
        group=key.group,
        layout=key.layout,
        chain=digest,
        index=digest.index,
        length=digest.length,
        payload=made.data,
        origin="rebuild",
    )


def _damage(root: Path, key: BlockKey) -> None:
    """Flips a bit in every generation of a block that lies there."""
    start = object_name(key.group, key.chain, 0).rpartition("-")[0]
    for path in root.glob(f"{start}-*"):
        with open(path, "r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last[0] ^ 1]))
