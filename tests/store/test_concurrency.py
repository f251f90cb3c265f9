"""Many writers and readers, in threads and in processes."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hybrid_attn.store.locks import FileLock, ThreadLock
from tests.store import samples
from tests.store.samples import ENTRIES, LAYOUT, make, open_store, right

ROOT = Path(__file__).parents[2]


def spawn(program: str, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def together(count: int, work) -> None:
    """Runs work(number) in threads that start at once; raises what one raised."""
    start, failed = threading.Barrier(count), []

    def body(number):
        start.wait()
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=body, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("shared", [True, False])
def test_threads_that_write_the_same_keys(tmp_path, place, shared):
    """Through one store, or each through its own."""
    url = tmp_path if place == "file" else f"memory://{tmp_path.name}/"
    one = open_store(url)
    blocks = make(samples.tokens(40))

    def write(number):
        store = one if shared else open_store(url)
        for start in range(0, len(blocks), 5):
            store.publish(blocks[start : start + 5])
        assert all(right(store, block) for block in blocks)

    together(6, write)
    again = open_store(url)
    assert all(right(again, block) for block in blocks) and not again.events
    report = again.verify()
    assert report.sound and report.orphaned == () and report.checked == 20


WRITE = """
    import sys, time
    from tests.store.samples import *
    store = open_store(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    for seed in range(6):
        for block in make(tokens(16, seed)):
            store.publish([block])
    print(store.stats.published, store.stats.kept, len(store.events))
"""


def test_processes_that_write_the_same_keys(tmp_path):
    open_store(tmp_path).close()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITE), str(tmp_path)],
            env=dict(os.environ, PYTHONPATH=str(ROOT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout and writer.stdin
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    ends = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    # Each block was published by exactly one of them.
    assert sum(int(end[0]) for end in ends) == 48
    assert sum(int(end[1]) for end in ends) == 48
    assert [end[2] for end in ends] == ["0", "0"]
    store = open_store(tmp_path)
    for seed in range(6):
        assert all(right(store, block) for block in make(samples.tokens(16, seed)))
    assert store.verify().sound and not store.events


def test_a_reader_during_writes_replacements_and_evictions(tmp_path):
    """It gets the right bytes or a miss, and no sound block ever counts as failed."""
    blocks = make(samples.tokens(40))
    writer = open_store(tmp_path)
    writer.publish(blocks)
    reader = open_store(tmp_path)
    done = threading.Event()

    def work(number):
        if number == 0:
            try:
                for turn in range(30):
                    if turn % 3 == 2:
                        writer.gc(4000)
                    writer.publish(blocks, replace=turn % 2 == 0)
            finally:
                done.set()
            return
        while not done.is_set():
            for block in blocks:
                assert right(reader, block) is not False

    together(3, work)
    assert not reader.events and not reader.stats.failed
    reader.refresh()
    assert all(right(reader, block) for block in blocks)


@pytest.mark.parametrize("kind", ["file", "thread"])
def test_locks_are_shared_or_held_by_one(tmp_path, kind):
    lock = FileLock(str(tmp_path / "lock")) if kind == "file" else ThreadLock()
    inside, most, wrong = [], [], []

    def work(number):
        for _ in range(50):
            shared = number % 2 == 0
            with lock.hold(shared=shared):
                inside.append(shared)
                wrong.extend([1] * (not all(inside) and len(inside) > 1))
                most.append(len(inside))
                inside.remove(shared)

    together(4, work)
    assert not wrong and inside == []


def test_a_key_is_gone_between_looking_and_fetching(tmp_path):
    (block,) = make(samples.tokens(4), groups=[ENTRIES])
    first, second = open_store(tmp_path), open_store(tmp_path)
    first.publish([block])
    second.refresh()
    assert second.contains(ENTRIES, LAYOUT, block.chain)
    first.gc(0)
    assert second.fetch(ENTRIES, LAYOUT, block.chain) is None
    assert not second.events and not second.contains(ENTRIES, LAYOUT, block.chain)
