"""Models, prompts and stores that the measurements share."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.layout import CacheLayout, layout_of
from hybrid_attn.config import HyperConfig, ModelConfig, MoEConfig
from hybrid_attn.testing import small_config

_SMALL = {"small": "dense,swa,hca,csa", "tiny": "hca,csa"}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with random weights; ``identity`` is its `ha.model_id`."""

    config: ModelConfig
    model: ha.Model
    identity: str

    @functools.cached_property
    def layout(self) -> CacheLayout:
        """How its caches are cut into blocks."""
        return layout_of(
            jax.eval_shape(functools.partial(ha.init_cache, self.config, 1, 1))
        )

    @property
    def block_tokens(self) -> int:
        return self.layout.block_tokens

    def prompts(self, rows: int, count: int, seed: int) -> np.ndarray:
        """int32[rows, count] random token ids."""
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, self.config.vocab_size, (rows, count))
        return ids.astype(np.int32)

    def open(self, url: str, **kwargs) -> ha.store.Store:
        return ha.store.open(url, model_id=self.identity, **kwargs)


@functools.cache
def subject(name: str, seed: int = 0) -> Subject:
    """The model of a name; made once a process.

    "peers_v4_experts" has 12.8 million parameters, "small" a few thousand in a layer
    of each kind, "tiny" two layers of those.
    """
    if name in _SMALL:
        config = small_config(_SMALL[name])
    else:
        config = ha.presets.get("peers_v4").replace(
            feed_forward_size=128,
            moe=MoEConfig(experts=16, chosen=3, width=128, scale=1.5),
            hyper=HyperConfig(),
        )
    model = ha.Model(config, rngs=nnx.Rngs(seed))
    return Subject(config, model, ha.model_id(model))


def going_on(
    model: ha.Model,
    cache: ha.Cache,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, ha.Cache]:
    """Reads what a cache lacks of prompts, int[b, t]; every row at its own length.

    Args:
      lengths: int[b] of the prompts, t if None.

    Returns:
      (float32[b, t, v] logits, NaN where a row did not compute them; the cache).
    """
    begin = np.asarray(cache.length)
    end = np.full_like(begin, tokens.shape[1]) if lengths is None else lengths
    left = end - begin
    width = max(1, int(left.max()))
    column = np.minimum(begin[:, None] + np.arange(width), tokens.shape[1] - 1)
    rest = np.take_along_axis(tokens, column, axis=1)
    logits, cache = ha.prefill(model, cache, rest, left)
    got = np.asarray(logits)
    out = np.full((*tokens.shape, got.shape[-1]), np.nan, np.float32)
    for row, first in enumerate(begin):
        out[row, first : end[row]] = got[row, : left[row]]
    return out, cache


def seconds[T](call: Callable[[], T]) -> tuple[float, T]:
    """(seconds until every array that ``call()`` returns is there, what it returns)."""
    begin = time.perf_counter()
    result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - begin, result
