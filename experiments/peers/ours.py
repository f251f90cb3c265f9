"""Our side: prefill and decode times of `hybrid_attn` on the host's cores."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hybrid_attn as ha

# Tokens decoded between two waits for the device.
BURST = 8


def count_parameters(model: ha.Model) -> dict[str, int]:
    """Parameters in all and without the two vocabulary matrices; all are active."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    total = sum(int(leaf.size) for leaf in leaves)
    config = model.config
    matrices = 1 if config.tie_embeddings else 2
    vocabulary = matrices * config.vocab_size * config.hidden_size
    layers = len(config.layers)
    return {
        "parameters_total": total,
        "parameters_active": total,
        "parameters_total_without_embeddings": total - vocabulary,
        "parameters_active_without_embeddings": total - vocabulary,
        "feed_forward_active": 3
        * config.hidden_size
        * config.feed_forward_size
        * layers,
    }


def run_case(model: ha.Model, case: dict, say: Callable[[str], None]) -> dict:
    """Times one context length.

    A prefill is timed from the empty cache's allocation to the last token's logits.
    Decoding is timed in runs of `BURST` tokens, each with its step and the choice of
    the most likely token on the device, waited for at the end of the run: as a loop
    that generates text does, which needs no token on the host to go on. (PyTorch on a
    CPU has no such queue: each of its steps ends when it returns.)

    Args:
        model: the model.
        case: `name`, `context`, `prefill_repeats`, `decode_warmup`, `decode_steps`.
        say: receives progress lines.

    Returns:
        Dict with the times in seconds and the derived figures.
    """
    name, context = case["name"], case["context"]
    steps = case["decode_warmup"] + case["decode_steps"]
    steps = -(-steps // BURST) * BURST
    config = model.config
    generator = np.random.default_rng(2)
    tokens = jnp.asarray(generator.integers(0, config.vocab_size, (1, context)))

    def prefill():
        cache = ha.init_cache(config, batch=1, capacity=context + steps)
        logits, cache = ha.prefill(model, cache, tokens, logits="last", donate=True)
        return jax.block_until_ready((logits, cache))

    say(f"{name}: compiling the prefill")
    logits, cache = prefill()
    prefill_s = []
    for repeat in range(case["prefill_repeats"]):
        start = time.perf_counter()
        logits, cache = prefill()
        prefill_s.append(time.perf_counter() - start)
        say(
            f"{name}: prefill {repeat + 1}/{case['prefill_repeats']} of {context}"
            f" tokens: {prefill_s[-1]:.2f} s"
        )

    run = ha.compile_step(model, donate=True, logits="last")
    choose = jax.jit(lambda x: jnp.argmax(x, -1)[:, None].astype(jnp.int32))
    token = choose(logits)
    decode_s = []
    say(f"{name}: decoding {steps} tokens")
    for step in range(0, steps, BURST):
        start = time.perf_counter()
        for _ in range(BURST):
            logits, cache = run(cache, token)
            token = choose(logits)
        jax.block_until_ready((token, cache))
        if step >= case["decode_warmup"]:
            decode_s.append((time.perf_counter() - start) / BURST)
    if not bool(jnp.isfinite(logits).all()) or np.asarray(cache.faults).any():
        raise RuntimeError(f"{name}: the model produced logits that are not finite")
    result = {
        "name": name,
        "context": context,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "prefill_tokens_per_s": context / statistics.median(prefill_s),
        "decode_ms_per_token": 1e3 * statistics.median(decode_s),
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(cache)),
    }
    say(f"{name}: decode {result['decode_ms_per_token']:.2f} ms/token")
    return result


def measure(
    config: ha.ModelConfig, cases: Sequence[dict], say: Callable[[str], None]
) -> dict:
    """Measures every case with random weights in float32.

    Returns:
        Dict of the same form as the peer's answer.
    """
    model = ha.Model(config, rngs=nnx.Rngs(0))
    counts = count_parameters(model)
    say(
        f"model: {counts['parameters_total'] / 1e6:.2f}M parameters, all of them active"
    )
    return {
        "cases": [run_case(model, case, say) for case in cases],
        "parameters": counts,
        "block_tokens": ha.init_cache(config, batch=1, capacity=1).spec.block_tokens,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "hybrid_attn": ha.__version__,
        },
    }
