"""The process that rebuilds blocks beside one that decodes: least priority, no GIL.

Reads one line of JSON (urls, keys, settings) from standard input, answers "ready", and
then for each further line, [blocks a second (0: all at once), first key, how many],
rebuilds those and answers with counts as JSON.
"""

import json
import sys
import time
from collections.abc import Sequence

import hybrid_attn as ha
from experiments.recover.slow import slow_reads
from hybrid_attn.store.rebuild import BlockKey, Rebuilder


def rebuild_all(
    store: ha.store.Store,
    copy: ha.store.Store,
    keys: Sequence[BlockKey],
    fetchers: int,
    *,
    serial: bool = False,
    per_second: float = 0.0,
) -> dict[str, float]:
    """Rebuilds blocks through the pipeline, or one after the other.

    ``per_second`` of them are submitted, 0 for all at once.

    Returns:
      ok: how many; seconds.
    """
    begin = time.perf_counter()
    workers = {"fetch": 1 if serial else fetchers}
    with Rebuilder(store, replicas=[copy], workers=workers) as rebuilder:
        if serial:
            results = [rebuilder.submit(k, replace=True).result() for k in keys]
        else:
            futures = []
            for number, key in enumerate(keys):
                if per_second:
                    due = begin + number / per_second
                    time.sleep(max(0.0, due - time.perf_counter()))
                futures.append(rebuilder.submit(key, replace=True))
            results = [future.result() for future in futures]
    seconds = time.perf_counter() - begin
    return {"ok": sum(result.ok for result in results), "seconds": seconds}


def main() -> None:
    """Serves a `storm.WorkerProcess` until standard input ends."""
    request = json.loads(sys.stdin.readline())
    keys = [BlockKey(*key) for key in request["keys"]]
    identity = request["model_id"]
    slow = slow_reads(request["slow_seconds"])
    with (
        ha.store.open(request["store"], model_id=identity) as store,
        ha.store.open(request["copy"], model_id=identity, wrap=slow) as copy,
    ):
        print("ready", flush=True)
        for line in sys.stdin:
            per_second, first, count = json.loads(line)
            done = rebuild_all(
                store,
                copy,
                keys[first : first + count],
                request["fetchers"],
                per_second=per_second,
            )
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
