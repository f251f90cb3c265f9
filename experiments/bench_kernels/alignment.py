"""What the alignment of packed records gains: random reads of the 584-byte records."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_attn.cache.alignment import CANDIDATES, AccessCounters, choose, padded
from pallas_kernels.abi import aligned
from pallas_kernels.kv_quant.api import pack, unpack
from pallas_kernels.kv_quant.formats import record_layout
from pallas_kernels.timing import interleaved

# What one access to memory moves: a CPU's cache line; four sectors of a GPU.
FETCH = {"cpu": 64, "gpu": 128}


def measure_alignment(
    records: int, chosen: int, seconds: float, seed: int, platform: str
) -> dict[str, Any]:
    """Reads of chosen records, as attention over a sparse choice makes them.

    The same records lie unpadded (584 bytes) and padded to multiples of 64, 128 and
    256 bytes; each call gathers ``chosen`` of them in random order and unpacks them.
    Every call reads others, so that they come from memory and not from a cache.
    The tuned alignment is what `hybrid_attn.cache.alignment.choose` makes of the reads.
    The unpadded records are timed twice: what differs then is noise.

    Returns:
      ``tuned``, ``padding_bytes`` (of a record), ``gain`` (unpadded time / tuned time),
      ``gain_over_64`` and so on; ``noise``, of two times of equal bytes the larger by
      the smaller: of both unpadded ones, and of 64 and 128 bytes, which both give 640;
      ``null``, no gain beyond the noise over the unpadded records; the same for the
      gather alone (``gather_gain`` ...), ``us_ALIGNMENT``, ``gather_us_ALIGNMENT``.
    """
    generator = np.random.default_rng(seed)
    lists = generator.permutation(records // chosen * chosen).reshape(-1, chosen)
    layout = record_layout("fp8", 512, rotary=64, leading=("n",))
    size = layout.sizes[-1]
    assert size is not None
    rows = generator.standard_normal((min(records, 1024), 512), dtype=np.float32)
    packed = np.asarray(jax.jit(lambda x: pack(x, format="fp8", rotary=64))(rows))
    packed = packed[np.arange(records) % len(packed)]
    counters = AccessCounters()
    for each in lists:
        counters = counters.update(each)
    tuned = choose(counters, size, fetch_bytes=FETCH[platform]).alignment

    calls, arrays, layouts = {}, {}, {}
    positions = [jnp.asarray(each, jnp.int32) for each in lists]
    for alignment in (1, *CANDIDATES):
        wide = np.zeros((records, padded(size, alignment)), np.uint8)
        wide[:, :size] = packed
        arrays[alignment] = jnp.asarray(wide)
        layouts[alignment] = aligned(layout, alignment)
        layouts[alignment].check(arrays[alignment], "records")

    def gather(table, position):
        return table.at[position].get(mode="promise_in_bounds")

    def call(alignment: int, read: bool):
        function = jax.jit(
            lambda table, position: (
                unpack(gather(table, position), layouts[alignment], dtype=jnp.bfloat16)
                if read
                else gather(table, position)
            )
        )
        turn = itertools.cycle(positions)
        return lambda: function(arrays[alignment], next(turn))

    for read, prefix in ((True, ""), (False, "gather_")):
        for alignment in (1, *CANDIDATES):
            calls[f"{prefix}us_{alignment}"] = call(alignment, read)
        calls[f"{prefix}us_1_again"] = call(1, read)
    times = interleaved(calls, seconds=seconds, least=5)
    found: dict[str, Any] = {name: 1e6 * t.least for name, t in times.items()}
    for prefix in ("", "gather_"):
        plain = found[f"{prefix}us_1"]
        again = found.pop(f"{prefix}us_1_again")
        best = found[f"{prefix}us_{tuned}"]
        noise = max(plain, again) / min(plain, again)
        if padded(size, 64) == padded(size, 128):
            pair = found[f"{prefix}us_64"], found[f"{prefix}us_128"]
            noise = max(noise, max(pair) / min(pair))
        found[f"{prefix}noise"] = noise
        found[f"{prefix}gain"] = min(plain, again) / best
        for alignment in CANDIDATES:
            found[f"{prefix}gain_over_{alignment}"] = (
                found[f"{prefix}us_{alignment}"] / best
            )
    return {
        "tuned": tuned,
        "padding_bytes": padded(size, tuned) - size,
        **{f"padding_bytes_{a}": padded(size, a) - size for a in CANDIDATES},
        "null": found["gain"] <= found["noise"],
        "records": records,
        "chosen": chosen,
        **found,
    }
