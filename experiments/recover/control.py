"""The control: reuse by equal prefix alone, with entries copied and nothing else."""

import jax.numpy as jnp
import numpy as np

import hybrid_attn as ha
from experiments.recover.config import Control
from experiments.recover.subject import Subject, going_on


def run_control(subject: Subject, settings: Control, seed: int) -> dict:
    """Restores prompts with their recent states, and with the entries alone.

    Returns:
      reuse_prompts; naive_reuse_wrong: prompts with a logit off by more than the
      tolerance, where recent states are empty; naive_reuse_error: the largest
      difference; ours_reuse_wrong: prompts with any other bit than the cold run.
    """
    size, rows = subject.block_tokens, settings.prompts
    tokens = subject.prompts(rows, 4 * size + size // 2, seed)
    count = tokens.shape[1]
    cache = ha.init_cache(subject.config, rows, count)
    logits, cache = ha.prefill(subject.model, cache, tokens)
    want = np.asarray(logits)
    with subject.open(f"memory://recover-control-{seed}/") as store:
        ha.transforms.offload(cache, store, tokens)
        held = ha.transforms.restore(store, subject.config, tokens, capacity=count)
    at = int(held.length[0])
    assert at == 4 * size, f"restored {at} tokens, expected {4 * size}"
    ours, _ = going_on(subject.model, held, tokens)
    naive, _ = going_on(subject.model, entries_alone(held), tokens)
    error = np.abs(naive[:, at:] - want[:, at:]).max(axis=(1, 2))
    return {
        "reuse_prompts": rows,
        "naive_reuse_wrong": int((error > settings.tolerance).sum()),
        "naive_reuse_error": float(error.max()),
        "ours_reuse_wrong": int((ours[:, at:] != want[:, at:]).any(axis=(1, 2)).sum()),
    }


def entries_alone(cache: ha.Cache) -> ha.Cache:
    """The cache with empty windows and frontiers, as reuse of entries leaves it."""

    def emptied(state):
        recent = {
            field: jnp.zeros_like(array)
            for field, array in vars(state).items()
            if array is not None and field not in state.growing
        }
        return state.replace(**recent)

    return cache.replace(
        layers=tuple(
            layer.__class__(
                {k: emptied(s) for k, s in layer.states.items()}, layer.kind
            )
            for layer in cache.layers
        )
    )
