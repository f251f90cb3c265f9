"""A program that works on a store and is killed; the tests look at what is left.

    python dying.py ROOT OPERATION            does it, says "ready" and "done"
    python dying.py ROOT OPERATION every      copies ROOT, and dies before each write in
                                              turn; prints how many writes there were

It imports the store without the rest of the library, to start in a moment.
"""

import functools
import os
import shutil
import signal
import sys
import types
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    package = types.ModuleType("hybrid_attn")
    package.__path__ = [str(root / "hybrid_attn")]
    sys.modules["hybrid_attn"] = package
    sys.path.insert(0, str(root))

from tests.store import samples
from tests.store.storage import Ending

OPERATIONS = ("publish", "replace", "gc", "forget", "rebuild_index")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def old_blocks():
    """What a store holds before the operation."""
    return samples.make(samples.tokens(8))


def new_blocks():
    """What "publish" adds: more than TensorStore writes at once would reorder."""
    return samples.make(samples.tokens(12, 1), size=5000)


def prepare(root) -> None:
    with samples.open_store(root) as store:
        store.publish(old_blocks())


def operate(root, operation: str, ready=None, **options) -> None:
    store = samples.open_store(root, **options)
    if ready is not None:
        ready()
    if operation == "publish":
        store.publish(new_blocks())
    elif operation == "replace":
        store.publish(
            [b for b in samples.make(samples.tokens(8), origin="rebuild")], replace=True
        )
    elif operation == "gc":
        store.gc(0)
    elif operation == "forget":
        store.forget([old_blocks()[2].chain])
    else:
        store.rebuild_index()


def every(root: Path, operation: str) -> int:
    """Dies before each write in turn, each time in a child with a copy of the store."""
    for count in range(1000):
        copy = root.with_name(f"{root.name}-{count}")
        shutil.copytree(root, copy)
        child = os.fork()
        if child == 0:
            wrap = functools.partial(Ending, end=die, left=count)
            operate(copy, operation, wrap=wrap)
            (copy.with_name(f"{copy.name}.done")).touch()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return count
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"child {count} ended with {status}")
    raise RuntimeError("never done")


if __name__ == "__main__":
    if sys.argv[3:] == ["every"]:
        print(every(Path(sys.argv[1]), sys.argv[2]))
    else:
        operate(sys.argv[1], sys.argv[2])
        os.write(1, b"done\n")
        os._exit(0)
