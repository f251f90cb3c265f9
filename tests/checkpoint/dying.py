"""A program that goes on with a checkpoint and dies by SIGKILL; tests look after it.

python dying.py ROOT OPERATION          does it, and says "ready" and "done"
python dying.py ROOT OPERATION every    for k = 0, 1, …: copies ROOT to ROOT.k and
                                        dies there before the k-th writing call, in a
                                        process of its own; prints how many there are
"""

import os
import shutil
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_attn.checkpoint import restore
from hybrid_attn.checkpoint.files import Files
from tests.checkpoint.samples import CONFIG, MODEL_ID, Session

CALLS = ("create", "write", "sync", "rename", "truncate", "unlink", "make_directory")


class Dying(Files):
    """The process dies before its k-th writing call."""

    def __init__(self, after: int):
        self.left = after


def _dies(name):
    def call(self, *args):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(Files, name)(self, *args)

    return call


for _name in CALLS:
    setattr(Dying, _name, _dies(_name))


def work(path: Path, operation: str, later: Path, files: Files | None = None) -> None:
    """Restores, and records the state one token later, which was saved elsewhere."""
    session = Session()
    session.continue_from(restore(later, CONFIG, model_id=MODEL_ID))
    with session.checkpointer(path, files=files, keep=1) as writer:
        writer.restore(CONFIG)
        print("ready", flush=True)
        session.observe(writer)
        if operation == "snapshot":
            writer.snapshot(session.caches, session.tokens)
        print("done", flush=True)


def main() -> None:
    path, operation, later = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if sys.argv[4:] != ["every"]:
        work(path, operation, later)
        return
    # No array is made before this: each child starts a JAX of its own.
    for k in range(1000):
        copy = path.with_name(f"{path.name}.{k}")
        shutil.copytree(path, copy)
        child = os.fork()
        if not child:
            work(copy, operation, later, Dying(k))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            print(k, flush=True)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("it never ended")


if __name__ == "__main__":
    main()
