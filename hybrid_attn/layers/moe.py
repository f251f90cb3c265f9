"""Mixture of experts: a shared expert, and routed ones that the router chooses.

DeepSeek-V4's form (arXiv 2606.19348). No expert has a capacity: nothing is
dropped, and what a token gets does not depend on the other tokens.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from hybrid_attn.config import MoEConfig
from hybrid_attn.layers.feed_forward import FeedForward, swiglu
from hybrid_attn.layers.linear import Linear, row_product
from hybrid_attn.layers.parameters import Fixed

# Added to the sum that normalises a token's weights, as in the reference.
_EPS = 1e-20
# Up to here pairs are unrolled; V4 chooses six experts for a token.
_FEW_PAIRS = 8
# Blocks of one round: their products run side by side. 768 pairs of 16 experts (size
# 256, width 128) take 1.8 ms on two cores in rounds of four blocks of 32 rows, 3.8 in
# single blocks, 2.8 all at once; a dense feed-forward of the same active width 1.8.
_ROUND = 4

_SCORES = {
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "sigmoid": jax.nn.sigmoid,
}


class Router(nnx.Module):
    """Chooses experts by the best biased scores, or by a table over token ids."""

    def __init__(
        self,
        size: int,
        vocab_size: int,
        moe: MoEConfig,
        *,
        hashed: bool,
        rngs: nnx.Rngs,
    ):
        self.moe = moe
        self.score = Linear(size, moe.experts, rngs=rngs)
        self.table = _balanced_table(vocab_size, moe, rngs) if hashed else None
        self.bias = None if hashed else Fixed(jnp.zeros((moe.experts,), jnp.float32))

    def __call__(self, x: Array, tokens: Array) -> tuple[Array, Array]:
        """Rows [r, d] and their ids int32[r] -> (experts int32[r, k], weights)."""
        scores = _SCORES[self.moe.score](self.score(x.astype(jnp.float32)))
        if self.table is not None:
            table = self.table[...]
            chosen = table[jnp.clip(tokens, 0, table.shape[0] - 1)]
        else:
            # The bias balances the choice and has no part in the weights.
            biased = scores if self.bias is None else scores + self.bias[...]
            chosen = jax.lax.top_k(jax.lax.stop_gradient(biased), self.moe.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _EPS)
        return chosen, weights * self.moe.scale


def _balanced_table(vocab_size: int, moe: MoEConfig, rngs: nnx.Rngs) -> Fixed:
    """int32[v, k]: different experts for each token id, all of them equally often."""
    first = jax.random.randint(rngs.params(), (vocab_size, 1), 0, moe.experts)
    slot = jnp.arange(moe.chosen) * (moe.experts // moe.chosen)
    return Fixed(((first + slot) % moe.experts).astype(jnp.int32))


class Experts(nnx.Module):
    """The routed experts: gate_up [e, d, 2w], down [e, w, d]."""

    def __init__(
        self,
        size: int,
        moe: MoEConfig,
        *,
        rngs: nnx.Rngs,
        dtype: str,
        limit: float | None,
        scale: float,
    ):
        def init(shape, fan_in, factor=1.0):
            normal = nnx.initializers.normal(factor * fan_in**-0.5)
            return nnx.Param(normal(rngs.params(), shape, jnp.float32))

        self.gate_up = init((moe.experts, size, 2 * moe.width), size)
        self.down = init((moe.experts, moe.width, size), moe.width, scale)
        self.dtype, self.limit = dtype, limit

    def __call__(
        self, x: Array, chosen: Array, weights: Array, *, static: bool
    ) -> Array:
        """Σ_k weights_k · expert_k(x), rows [r, d] -> float32[r, d].

        ``static`` takes the form that has a gradient.
        """
        k = chosen.shape[1]
        x = jnp.asarray(x, self.dtype)
        form = "grouped"
        if not static:
            form = _short_form(chosen.size, self.gate_up[...].shape[0])
        if form == "single":
            y = self._single(x, chosen)
        elif form == "gathered":
            y = self._gathered(x, chosen)
        else:
            y = self._grouped(x, chosen, static)
        # In the order of the choice, whatever order the experts ran in.
        y = y.astype(jnp.float32)
        return functools.reduce(
            jnp.add, [weights[:, i, None] * y[:, i] for i in range(k)]
        )

    def _single(self, x: Array, chosen: Array) -> Array:
        """[r, k, d]: one pair after another, each two products of one row."""
        gate_up = self.gate_up[...].astype(self.dtype)
        down = self.down[...].astype(self.dtype)

        def pair(row: Array, expert: Array) -> Array:
            hidden = row_product(row, gate_up, expert)
            return row_product(swiglu(hidden, self.limit), down, expert)

        rows, k = chosen.shape
        out = [pair(x[r], chosen[r, i]) for r in range(rows) for i in range(k)]
        return jnp.stack(out).reshape(rows, k, -1)

    def _gathered(self, x: Array, chosen: Array) -> Array:
        """[r, k, d]: each pair reads its own expert's weights."""
        gate_up = self.gate_up[...][chosen].astype(self.dtype)
        down = self.down[...][chosen].astype(self.dtype)
        hidden = jnp.einsum("rd,rkdw->rkw", x, gate_up)
        return jnp.einsum("rkw,rkwd->rkd", swiglu(hidden, self.limit), down)

    def _grouped(self, x: Array, chosen: Array, static: bool) -> Array:
        """[r, k, d]: pairs sorted by expert into blocks, each block one product."""
        rows, k = chosen.shape
        experts = self.gate_up[...].shape[0]
        size = _block_rows(rows * k, experts)
        blocks = -(-rows * k // size) + min(experts, rows * k)
        blocks = -(-blocks // _ROUND) * _ROUND
        slot, owner, used = _place(chosen.reshape(-1), experts, size, blocks)
        # Empty places of a block read row 0; nobody reads what comes of it.
        source = jnp.zeros((blocks * size,), jnp.int32)
        source = source.at[slot].set(jnp.arange(rows * k, dtype=jnp.int32) // k)
        source = source.reshape(blocks, size)
        gate_up, down = self.gate_up[...], self.down[...]

        def block(expert: Array, index: Array) -> Array:
            hidden = x[index] @ gate_up[expert].astype(self.dtype)
            return swiglu(hidden, self.limit) @ down[expert].astype(self.dtype)

        if static:
            out = jax.vmap(block)(owner, source)
        else:
            # Only the rounds in use run.
            owner = owner.reshape(-1, _ROUND)
            source = source.reshape(-1, _ROUND, size)

            def body(i: Array, out: Array) -> Array:
                return out.at[i].set(jax.vmap(block)(owner[i], source[i]))

            out = jnp.zeros((*source.shape, down.shape[-1]), x.dtype)
            out = jax.lax.fori_loop(0, -(-used // _ROUND), body, out)
        return out.reshape(blocks * size, -1)[slot].reshape(rows, k, -1)


def _short_form(pairs: int, experts: int) -> str:
    """How a step computes its (row, expert) pairs: single, gathered or grouped.

    A few pairs on CPU run one by one: at size 256, width 128, 16 experts, 3 pairs take
    66 µs on two cores, gathered 205 and in blocks 190. Many never gather there, where
    a block reads its weights in place and a gather copies them. Milliseconds at size
    512, width 256, 64 experts, 6 chosen, for 1, 4, 32, 128 and 512 rows: gathered 1.5,
    13, 134, -, -; blocks 0.8, 2.2, 7.7, 9.7, 25; the static form 1.1, 13, 64, 61, 96;
    `jax.lax.ragged_dot` 43, 45, 101, 297, -. Not measured on GPU: there each block is
    a round of a loop, a gather one product.
    """
    if jax.default_backend() == "cpu":
        return "single" if pairs <= _FEW_PAIRS else "grouped"
    return "gathered" if pairs <= experts else "grouped"


def _block_rows(pairs: int, experts: int) -> int:
    """Rows of a block: up to the mean load of an expert, 8 to 128, a power of two."""
    mean = max(1, pairs // experts)
    return min(128, max(8, 1 << (mean.bit_length() - 1)))


def _place(chosen: Array, experts: int, size: int, blocks: int):
    """Gives each pair a place in blocks of one expert each.

    Returns:
      (place int32[pairs], expert of each block int32[blocks], blocks in use int32[]).
    """
    pairs = chosen.shape[0]
    order = jnp.argsort(chosen, stable=True)
    count = jnp.zeros((experts,), jnp.int32).at[chosen].add(1)
    begin = jnp.cumsum(count) - count
    needed = -(-count // size)
    end_block = jnp.cumsum(needed)
    rank = (
        jnp.zeros((pairs,), jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32))
    )
    place = (end_block - needed)[chosen] * size + rank - begin[chosen]
    owner = jnp.searchsorted(end_block, jnp.arange(blocks), side="right")
    return place, jnp.minimum(owner, experts - 1).astype(jnp.int32), end_block[-1]


class MoE(nnx.Module):
    """Shared expert + routed experts."""

    def __init__(self, config, *, hashed: bool, rngs: nnx.Rngs):
        moe, size = config.moe, config.hidden_size
        self.router = Router(size, config.vocab_size, moe, hashed=hashed, rngs=rngs)
        dtype, limit = config.compute_dtype, config.swiglu_limit
        scale = config.residual_scale
        self.shared = FeedForward(
            size,
            config.feed_forward_size,
            rngs=rngs,
            dtype=dtype,
            limit=limit,
            scale=scale,
        )
        self.experts = Experts(
            size, moe, rngs=rngs, dtype=dtype, limit=limit, scale=scale
        )

    def __call__(self, x: Array, tokens: Array, *, static: bool) -> Array:
        """float[b, t, d] and int32[b, t] -> [b, t, d]."""
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(flat, tokens.reshape(-1))
        routed = self.experts(flat, chosen, weights, static=static)
        return self.shared(x) + routed.reshape(x.shape)
