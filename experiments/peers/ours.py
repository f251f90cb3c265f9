"""Our side: prefill and decode times of `hybrid_attn` on the host's cores."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import hybrid_attn as ha
from experiments.peers.torch_side import SHORT


def count_parameters(model: ha.Model) -> dict[str, int]:
    """Parameters in all and of one token, with and without the vocabulary's two."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    total = sum(int(leaf.size) for leaf in leaves)
    config, moe = model.config, model.config.moe
    matrices = 1 if config.tie_embeddings else 2
    vocabulary = matrices * config.vocab_size * config.hidden_size
    layers, unit = len(config.layers), 3 * config.hidden_size
    active, width = total, config.feed_forward_size
    if moe is not None:
        active -= (moe.experts - moe.chosen) * unit * moe.width * layers
        width += moe.chosen * moe.width
    return {
        "parameters_total": total,
        "parameters_active": active,
        "parameters_total_without_embeddings": total - vocabulary,
        "parameters_active_without_embeddings": active - vocabulary,
        "feed_forward_active": unit * width * layers,
    }


def run_case(
    model: ha.Model,
    case: dict,
    say: Callable[[str], None],
    reference: dict[str, np.ndarray] | None = None,
) -> dict:
    """Times one context length.

    A prefill is timed from the empty cache's allocation to the last token's logits.
    Decoding is timed twice on that cache: through `ha.generate`, all of a call divided
    by its tokens, and token by token through `ha.compile_step`, each with the choice
    of the most likely token on the device, and each waited for.

    Args:
        model: the model.
        case: `name`, `context`, `prefill_repeats`, `decode_warmup`, `decode_steps`,
            `generate_tokens`, `generate_repeats`.
        say: receives progress lines.
        reference: `tokens` int[1, context] to read instead of random ones, and the
            `logits` float[1, v] that another implementation gave after them.

    Returns:
        Dict with the times in seconds and the derived figures.
    """
    name, context = case["name"], case["context"]
    steps = case["decode_warmup"] + case["decode_steps"]
    room = case["generate_tokens"]
    config = model.config
    generator = np.random.default_rng(2)
    tokens = jnp.asarray(generator.integers(0, config.vocab_size, (1, context)))
    if reference is not None:
        tokens = jnp.asarray(reference["tokens"].astype(np.int32))

    def prefill():
        cache = ha.init_cache(config, batch=1, capacity=context + max(steps, room))
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

    difference = None
    if reference is not None:
        difference = float(np.abs(np.asarray(logits) - reference["logits"]).max())
    choose = jax.jit(lambda x: jnp.argmax(x, -1)[:, None].astype(jnp.int32))
    token = choose(logits)
    decode_s = []
    say(f"{name}: generating {case['generate_repeats']} times {room} tokens")
    for repeat in range(case["generate_repeats"] + 1):
        start = time.perf_counter()
        made, _, _ = ha.generate(model, cache, token, room)
        jax.block_until_ready(made)
        if repeat:
            decode_s.append((time.perf_counter() - start) / room)
    run = ha.compile_step(model, donate=True, logits="last")
    step_s = []
    say(f"{name}: decoding {steps} tokens one by one")
    for step in range(steps):
        start = time.perf_counter()
        logits, cache = run(cache, token)
        token = choose(logits)
        jax.block_until_ready((token, cache))
        if step >= case["decode_warmup"]:
            step_s.append(time.perf_counter() - start)
    if not bool(jnp.isfinite(logits).all()) or np.asarray(cache.faults).any():
        raise RuntimeError(f"{name}: the model produced logits that are not finite")
    result = {
        "name": name,
        "context": context,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "prefill_tokens_per_s": context / statistics.median(prefill_s),
        "decode_ms_per_token": 1e3 * statistics.median(decode_s),
        "step_s": step_s,
        "step_ms_per_token": 1e3 * statistics.median(step_s),
        "logit_difference": difference,
        "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(cache)),
    }
    say(f"{name}: decode {result['decode_ms_per_token']:.2f} ms/token")
    return result


def _difference(model: ha.Model, reference: dict[str, np.ndarray]) -> float:
    """Largest difference of the last token's logits after one prefill."""
    tokens = reference["tokens"].astype(np.int32)
    cache = ha.init_cache(model.config, batch=1, capacity=tokens.shape[1])
    logits, _ = ha.prefill(model, cache, tokens, logits="last")
    return float(np.abs(np.asarray(logits) - reference["logits"]).max())


def measure(
    config: ha.ModelConfig,
    cases: Sequence[dict],
    say: Callable[[str], None],
    exported: Path | None = None,
) -> dict:
    """Measures every case in float32.

    Args:
        config: a model to fill with random weights.
        cases: see `run_case`.
        say: receives progress lines.
        exported: what `torch_side` wrote; the model is then its, not ``config``'s, and
            reads its tokens.

    Returns:
        Dict of the same form as the peer's answer.
    """
    references: dict[int, dict[str, np.ndarray]] = {}
    short = None
    if exported is None:
        model = ha.Model(config, rngs=nnx.Rngs(0))
    else:
        config, model = ha.weights.load(exported / "model")
        for case in cases:
            path = exported / f"reference-{case['context']}.safetensors"
            references[case["context"]] = load_file(path)
        short = load_file(exported / f"reference-{SHORT}.safetensors")
    counts = count_parameters(model)
    say(
        f"model: {counts['parameters_total'] / 1e6:.2f}M parameters,"
        f" {counts['parameters_active'] / 1e6:.2f}M active"
    )
    return {
        "cases": [
            run_case(model, case, say, references.get(case["context"]))
            for case in cases
        ],
        "parameters": counts,
        "short_logit_difference": None if short is None else _difference(model, short),
        "block_tokens": ha.init_cache(config, batch=1, capacity=1).spec.block_tokens,
        "device": jax.devices()[0].device_kind,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "hybrid_attn": ha.__version__,
        },
    }
