"""How decoding slows down with the context, up to contexts that nobody prefills here.

A cache of 256k tokens takes minutes to prefill on two cores. What a step costs does not
depend on the numbers in the cache, only on its counts: so the cache is one of random
numbers, normal and of unit scale as norms leave them, whose rows count as many tokens
as asked. Such a cache of the shortest context is timed beside one that was prefilled.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hybrid_attn as ha


@dataclasses.dataclass(frozen=True)
class Growth:
    """Contexts in tokens, ascending, or none; tokens of a call, and calls."""

    contexts: tuple[int, ...] = (4096, 262144)
    tokens: int = 128
    repeats: int = 5

    def __post_init__(self):
        ascending = list(self.contexts) == sorted(set(self.contexts))
        if (
            not ascending
            or len(self.contexts) == 1
            or min(self.contexts, default=1) < 1
        ):
            raise ValueError(
                f"contexts={self.contexts}: expected none, or two and more, ascending"
            )
        if min(self.tokens, self.repeats) < 1:
            raise ValueError(f"{self}: expected at least one token and one call")


def filled_cache(config: ha.ModelConfig, context: int, room: int) -> ha.Cache:
    """A cache of one row that counts ``context`` tokens, its numbers random.

    Args:
      config: of the model.
      context: tokens.
      room: tokens that can still be added.
    """
    cache = ha.init_cache(config, batch=1, capacity=context + room)
    generator = np.random.default_rng(3)

    def fill(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        numbers = generator.standard_normal(leaf.shape, dtype=np.float32)
        return jnp.asarray(numbers, leaf.dtype)

    count = jnp.full((1,), context, jnp.int32)
    return cache.replace(
        layers=jax.tree.map(fill, cache.layers), length=count, floor=count, sealed=count
    )


def measure(
    config: ha.ModelConfig, growth: Growth, say: Callable[[str], None]
) -> dict[str, float]:
    """Decoding times at every context, taken in turn.

    Returns:
      ``decode_ms_CONTEXT`` through `ha.generate` and ``step_ms_CONTEXT`` through
      `ha.compile_step`, medians of the calls, for each context in tokens; the ratio of
      the last to the first as ``decode_growth`` and ``step_growth``; and ``prefilled``,
      the time at the first context of a cache that was prefilled by that of the random
      one.

    Raises:
      RuntimeError: the model produced logits that are not finite, or a row faulted.
    """
    model = ha.Model(config, rngs=nnx.Rngs(0))
    first = growth.contexts[0]
    caches = {str(n): filled_cache(config, n, growth.tokens) for n in growth.contexts}
    say(f"prefilling {first} tokens")
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, first))
    empty = ha.init_cache(config, batch=1, capacity=first + growth.tokens)
    _, caches["prefilled"] = ha.prefill(model, empty, tokens, logits="last")
    token = jnp.zeros((1, 1), jnp.int32)
    run = ha.compile_step(model, donate=True, logits="last")

    def generate(cache: ha.Cache) -> float:
        begin = time.perf_counter()
        made, *_ = ha.generate(model, cache, token, growth.tokens)
        jax.block_until_ready(made)
        return (time.perf_counter() - begin) / growth.tokens

    def steps(cache: ha.Cache) -> float:
        cache = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
        taken, logits = [], jnp.zeros(())
        for _ in range(growth.tokens):
            begin = time.perf_counter()
            logits, cache = run(cache, token)
            jax.block_until_ready(logits)
            taken.append(time.perf_counter() - begin)
        if not bool(jnp.isfinite(logits).all()) or np.asarray(cache.faults).any():
            raise RuntimeError("the model produced logits that are not finite")
        return statistics.median(taken)

    found: dict[str, float] = {}
    for name, decode in (("decode", generate), ("step", steps)):
        times: dict[str, list[float]] = {key: [] for key in caches}
        for repeat in range(growth.repeats + 1):
            for key, cache in caches.items():
                taken = decode(cache)
                # The first call compiles.
                if repeat:
                    times[key].append(1e3 * taken)
            say(f"{name}: {repeat} of {growth.repeats} rounds")
        medians = {key: statistics.median(taken) for key, taken in times.items()}
        if name == "decode":
            found["prefilled"] = medians["prefilled"] / medians[str(first)]
        for n in growth.contexts:
            found[f"{name}_ms_{n}"] = medians[str(n)]
        found[f"{name}_growth"] = (
            medians[str(growth.contexts[-1])] / medians[str(first)]
        )
    return found
