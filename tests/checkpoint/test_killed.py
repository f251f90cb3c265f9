"""kill -9 at every write and at system calls: the old state or the new, both whole."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_attn import checkpoint
from tests.checkpoint import dying
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session, same

pytestmark = pytest.mark.slow
PROGRAM = [sys.executable, str(Path(dying.__file__))]
# What changes a disk, beside writing. Orbax works on many threads, so that the k-th
# call of a kind is not the same one in every run.
SYSTEM_CALLS = ("rename", "fsync", "fdatasync", "mkdir", "unlink", "unlinkat", "rmdir")
LIMIT = 80


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a checkpoint to go on with, its session, the session one token later)."""
    path, session = tmp_path_factory.mktemp("made") / "c", Session()
    session.read(30, 12)
    with session.checkpointer(path) as writer:
        session.observe(writer)
        session.read(1, 1)
        session.observe(writer)
    later = session.copy()
    later.read(1, 1)
    checkpoint.save(
        path.with_name("later"), later.caches, later.tokens, model_id=MODEL_ID
    )
    return path, session, later


def _check(root: Path, session, later, acknowledged: bool) -> bool:
    restored = checkpoint.restore(root, CONFIG, model_id=MODEL_ID)
    new = bool(restored.caches["main"].length[0] == later.cache.length[0])
    assert new or not acknowledged
    same(restored.caches["main"], (later if new else session).cache)
    assert restored.report.lost == 0
    with session.checkpointer(root) as writer:
        writer.restore(CONFIG)
        later.observe(writer)
    restored = checkpoint.restore(root, CONFIG, model_id=MODEL_ID)
    same(restored.caches["main"], later.cache)
    return new


@pytest.mark.parametrize("operation", ["record", "snapshot"])
def test_dying_at_each_write(made, tmp_path, operation):
    path, session, later = made
    root = tmp_path / "c"
    shutil.copytree(path, root)
    done = subprocess.run(
        [*PROGRAM, str(root), operation, str(path.with_name("later")), "every"],
        check=True,
        capture_output=True,
        text=True,
    )
    count = int(done.stdout.split()[-1])
    assert count > 8
    found = [
        _check(tmp_path / f"c.{k}", session, later, k == count)
        for k in range(count + 1)
    ]
    assert set(found) == {False, True}
    # Once it is there it stays there.
    assert found == sorted(found)


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("call", SYSTEM_CALLS)
def test_dying_at_each_system_call(made, tmp_path, call):
    path, session, later = made
    for k in range(1, LIMIT):
        root = tmp_path / "c"
        shutil.copytree(path, root)
        done = subprocess.run(
            [
                "strace",
                "-f",
                "-qq",
                "-o",
                os.devnull,
                "-e",
                f"trace={call}",
                "--seccomp-bpf",
                "-e",
                f"inject={call}:signal=KILL:when={k}",
                *PROGRAM,
                str(root),
                "snapshot",
                str(path.with_name("later")),
            ],
            capture_output=True,
            text=True,
            # Its writes are no part of the checkpoint.
            env={k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k},
        )
        ended = bool(re.search("done", done.stdout))
        _check(root, session, later, ended)
        shutil.rmtree(root)
        if ended:
            return
    raise AssertionError(f"more than {LIMIT} calls of {call}")
