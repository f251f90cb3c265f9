"""Generation: prefill, then single-token steps in one compiled loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from hybrid_attn.cache.states import Cache
from hybrid_attn.model import Model
from hybrid_attn.samplers import Sampler, greedy
from hybrid_attn.step import bucket, flatten, prefill, pure_step, step, unflatten


def generate(
    model: Model,
    cache: Cache,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    lengths: ArrayLike | None = None,
    sampler: Sampler = greedy,
    key: Array | None = None,
    stop_ids: tuple[int, ...] = (),
    row_ids: ArrayLike | None = None,
) -> tuple[Array, Array, Cache]:
    """Continues every row.

    Args:
      tokens: int32[b, t], t >= 1, the prompt (or what follows the cache's tokens).
      max_new_tokens: how many to sample at most, from 1.
      lengths: int32[b] in 1..t; None for all.
      sampler: see `hybrid_attn.samplers`.
      key: random key; the key of a sample is fold_in(fold_in(key, row id), position),
        so that a batch's composition cannot change a sample. None is key 0.
      stop_ids: a row ends with the first of these it samples.
      row_ids: int32[b] for the keys; None is 0..b-1.

    Returns:
      (new tokens int32[b, max_new_tokens], 0 after a row's end; how many each row
      got, int32[b], its stop token included; the cache, which holds every token but
      each row's last sampled one).

    Raises:
      ValueError: as `step`, before any compute; also where the room does not suffice.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens!r}: expected a whole number from 1"
        )
    b, t = np.shape(tokens)
    held = np.asarray(cache.length)
    counts = np.full((b,), t) if lengths is None else np.asarray(lengths)
    if t < 1 or (counts < 1).any():
        raise ValueError("generate needs at least one prompt token in every row")
    need = held + counts + max_new_tokens - 1
    if (need > cache.spec.capacity).any():
        raise ValueError(
            f"row {int(need.argmax())} would hold {int(need.max())} tokens, beyond "
            f"the capacity of {cache.spec.capacity}; see transforms.grow"
        )
    bad = [s for s in stop_ids if not 0 <= s < model.config.vocab_size]
    if bad:
        raise ValueError(
            f"stop_ids {bad}: outside the vocabulary of {model.config.vocab_size}"
        )
    key = jax.random.key(0) if key is None else key
    rows = jnp.arange(b) if row_ids is None else jnp.asarray(row_ids)
    # One token each is a decoding step: going on from an earlier call's last sample
    # then gives the bits of one longer call.
    if t == 1:
        logits, cache = step(model, cache, tokens, lengths, logits="last")[:2]
    else:
        logits, cache = prefill(model, cache, tokens, lengths, logits="last")
    graph, leaves = flatten(model)
    out, counts, cache = _decode(
        graph,
        sampler,
        bucket(max_new_tokens),
        tuple(int(s) for s in stop_ids),
        leaves,
        cache,
        logits,
        key,
        rows,
        jnp.int32(max_new_tokens),
    )
    return out[:, :max_new_tokens], counts, cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5,))
def _decode(graph, sampler, room, stop_ids, leaves, cache, logits, key, rows, limit):
    """At most ``limit`` tokens; ``room``, at least that, is what is compiled for."""
    model = unflatten(graph, leaves)
    b = cache.batch
    stops = jnp.asarray(stop_ids or (-1,), jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    def sample(logits: Array, position: Array) -> Array:
        # The token about to be sampled stands at `position`.
        step_keys = jax.vmap(jax.random.fold_in)(keys, position)
        return jax.vmap(sampler)(logits, step_keys)

    def place(out, index, token, live):
        return out.at[:, index].set(jnp.where(live, token, 0))

    token = sample(logits, cache.length)
    live = jnp.ones((b,), bool)
    out = place(jnp.zeros((b, room), jnp.int32), 0, token, live)
    counts = jnp.ones((b,), jnp.int32)
    live = live & ~jnp.isin(token, stops)

    def going(carry) -> Array:
        index, _, live, *_ = carry
        return (index < limit) & jnp.any(live)

    def body(carry):
        index, token, live, out, counts, cache = carry
        logits, cache, _ = pure_step(
            model, cache, token[:, None], live.astype(jnp.int32), logits="last"
        )
        assert logits is not None  # "last" always gives some
        token = jnp.where(live, sample(logits, cache.length), token)
        out = place(out, index, token, live)
        counts = counts + live
        live = live & ~jnp.isin(token, stops)
        return index + 1, token, live, out, counts, cache

    carry = (jnp.int32(1), token, live, out, counts, cache)
    _, _, _, out, counts, cache = jax.lax.while_loop(going, body, carry)
    return out, counts, cache
