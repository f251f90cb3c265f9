"""kill -9 at every I/O point: afterwards the old version or the new, both verified."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store import dying, samples
from tests.store.samples import open_store, right

PROGRAM = [sys.executable, str(Path(dying.__file__))]
# What changes the state of a disk, and the locks around it. (Opening is followed by
# locking, writing by syncing: killing at either of them sees the other's traces.)
CALLS = (
    "rename",
    "fsync",
    "write",
    "pwrite64",
    "writev",
    "unlink",
    "unlinkat",
    "mkdir",
    "fchmodat",
    "chmod",
    "fcntl",
    "flock",
)


def check_after(root: Path, operation: str, done: bool) -> str:
    """Opens what is left, and returns which version it is."""
    old, new = dying.old_blocks(), dying.new_blocks()
    if operation == "replace":
        new = samples.make(samples.tokens(8), origin="rebuild")
    store = open_store(root)
    report = store.verify()
    assert report.sound, report
    held = {b: right(store, b) for b in (*old, *new)}
    assert False not in held.values()
    if operation == "publish":
        assert all(held[b] for b in old)
        # All or none of one call.
        assert len({held[b] for b in new}) == 1
        version = "new" if held[new[0]] else "old"
    elif operation == "replace":
        found = [store.fetch(b.group, b.layout, b.chain) for b in old]
        assert all(found)
        origins = {payload.header.origin for payload in found if payload is not None}
        assert len(origins) == 1
        version = "new" if origins == {"rebuild"} else "old"
    elif operation == "rebuild_index":
        assert all(held[b] for b in old)
        version = "new" if done else "old"
    else:
        doomed = old if operation == "gc" else old[2:]
        assert all(held[b] for b in old if b not in doomed)
        assert len({held[b] for b in doomed}) == 1 or not done
        version = "new" if not any(held[b] for b in doomed) else "old"
    assert version == "new" or not done, "lost what was acknowledged"
    store.close()
    # The same again goes through, whatever lay around.
    dying.operate(root, operation)
    again = open_store(root)
    assert again.verify().sound
    if operation == "publish":
        assert all(right(again, b) for b in (*old, *new))
    assert again.gc(10**9).bytes_after == again.stats.bytes_on_disk
    assert not list(root.rglob("*.__lock"))
    return version


@pytest.mark.parametrize("operation", dying.OPERATIONS)
def test_dying_before_each_write(tmp_path, operation):
    root = tmp_path / "store"
    dying.prepare(root)
    done = subprocess.run(
        [*PROGRAM, str(root), operation, "every"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    writes = int(done.stdout)
    least = {"publish": 8, "replace": 10, "gc": 6, "forget": 4, "rebuild_index": 3}
    assert writes >= least[operation]
    versions = []
    for count in range(writes + 1):
        copy = tmp_path / f"store-{count}"
        finished = (tmp_path / f"store-{count}.done").exists()
        assert finished == (count == writes)
        versions.append(check_after(copy, operation, finished))
    # Old versions first, new ones from some write on.
    assert versions == sorted(versions, reverse=True)
    assert versions[0] == "old" and versions[-1] == "new"


def kill_at(root: Path, operation: str, call: str, when: int) -> bool | None:
    """Runs the program, killed at the when-th call; whether it was done by then.

    None where it never came to that many calls.
    """
    done = subprocess.run(
        [
            *("strace", "-f", "-qq", "-e", f"trace={call}", "-e", "signal=none"),
            *("-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={when}"),
            *PROGRAM,
            *(str(root), operation),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 0:
        return None
    assert done.returncode in (-9, 137), (done.returncode, done.stderr)
    return "done" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("operation", dying.OPERATIONS)
def test_dying_at_each_system_call(tmp_path, operation):
    """strace counts calls thread by thread: k ends the first thread that gets there."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed (apt-get install strace)")
    root = tmp_path / "store"
    dying.prepare(root)
    probe = subprocess.run(
        ["strace", "-o", "/dev/null", "-e", "trace=rename", "true"],
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    points, versions = 0, set()
    for call in CALLS:
        for when in range(1, 60):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(root, copy)
            finished = kill_at(copy, operation, call, when)
            if finished is None:
                break
            points += 1
            versions.add(check_after(copy, operation, finished))
        else:
            raise AssertionError(f"{call}: never done")
    print(f"{operation}: {points} points, {versions}")
    assert points >= 10 and "old" in versions
    assert re.fullmatch("old|new", "|".join(versions)[:3])
