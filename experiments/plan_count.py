"""Parameters, FLOPs and cache bytes of a model from abstract shapes: exact, no arrays.

A multiplication and an addition are two FLOPs. FLOPs are those of matrix products:
weights, index scores, attention; norms, rotations, softmax, pooling and the mixing of
residual streams are not counted.
"""

import dataclasses
import functools
from collections import defaultdict

import jax
from flax import nnx

import hybrid_attn as ha
from hybrid_attn.cache.ledger import cache_bytes
from hybrid_attn.config import LayerSpec

FLOP_PARTS = ("projections", "experts", "indexer", "attention", "head")

DENSE_HEADS, DENSE_DIM = 8, 128
"""Key/value heads of the dense model, and their channels."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters by what a plan does with them.

    Attributes:
      embedding, head: the table that tokens look up, and the unembedding (0 if tied).
      experts: routed experts, all of them.
      by_head: query and output projections, which divide by attention head.
      other: all else.
      active: what is multiplied for one token: all but the experts that are not
        chosen and but the table.
    """

    embedding: int
    head: int
    experts: int
    by_head: int
    other: int
    active: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.experts + self.by_head + self.other


@dataclasses.dataclass(frozen=True)
class CacheLine:
    """Bytes of one array kind over all layers, for one row.

    Attributes:
      per_token: it holds entries, and grows with the context.
      bytes: of one row at the capacity.
    """

    state: str
    kind: str
    field: str
    dtype: str
    per_token: bool
    bytes: int


@functools.lru_cache(maxsize=64)
def _leaves(config: ha.ModelConfig) -> tuple[tuple[tuple[str, ...], tuple], ...]:
    """(path, shape) of every parameter."""
    model = nnx.eval_shape(lambda: ha.Model(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return tuple(
        (tuple(str(key.key) for key in path), leaf.shape) for path, leaf in leaves
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def weights(config: ha.ModelConfig) -> Weights:
    """Counts the parameters, fixed ones included, as `sizes.count_parameters` does."""
    counts: dict[str, int] = defaultdict(int)
    for path, shape in _leaves(config):
        counts[_weight_part(path)] += _size(shape)
    total = sum(counts.values())
    chosen = counts["experts"]
    if config.moe is not None:
        chosen = chosen * config.moe.chosen // config.moe.experts
    # Of a tied table every row is multiplied by the head.
    looked_up = 0 if config.tie_embeddings else counts["embedding"]
    return Weights(
        embedding=counts["embedding"],
        head=counts["head"],
        experts=counts["experts"],
        by_head=counts["by_head"],
        other=counts["other"],
        active=total - counts["experts"] + chosen - looked_up,
    )


def _weight_part(path: tuple[str, ...]) -> str:
    if path[0] == "embedding":
        return "embedding"
    if path[0] == "unembed":
        return "head"
    if "experts" in path:
        return "experts"
    if path[2:3] == ("mixer",) and path[3] in ("query_up", "output_down", "output_up"):
        return "by_head"
    return "other"


def flops(config: ha.ModelConfig, context: int) -> dict[str, int]:
    """FLOPs of decoding the token after ``context - 1`` others, by part.

    Returns:
      projections (of attention, compressors, indexers and residual streams), experts
      (routed, shared, or a plain feed-forward, with the router), indexer (scores of
      all visible entries), attention (window and entries that are read), head.
    """
    parts: dict[str, int] = {part: 0 for part in FLOP_PARTS}
    for path, shape in _leaves(config):
        size = _size(shape)
        if "experts" in path:
            assert config.moe is not None
            parts["experts"] += 2 * size * config.moe.chosen // config.moe.experts
        elif path[-1] != "weight" or len(shape) < 2:
            continue  # a norm, a bias, a table: nothing that multiplies a matrix
        elif path[0] == "unembed":
            parts["head"] += 2 * size
        else:
            part = "experts" if "feed_forward" in path else "projections"
            parts[part] += 2 * size
    if config.tie_embeddings:
        parts["head"] += 2 * config.vocab_size * config.hidden_size
    for layer in config.layers:
        indexer, attention = _read_flops(config, layer, context)
        parts["indexer"] += indexer
        parts["attention"] += attention
    return parts


def _read_flops(config: ha.ModelConfig, layer: LayerSpec, context: int):
    """(index scores, attention) of one layer's query at position context - 1."""
    entries = context // layer.ratio if layer.ratio else 0
    indexer = 0
    read = entries
    if layer.top_k:
        # A product with each head's query, and one with the heads' weights.
        indexer = 2 * entries * config.index_heads * (config.index_dim + 1)
        read = min(layer.top_k, entries)
    keys = min(layer.window, context) + read
    return indexer, 2 * keys * layer.heads * 2 * layer.head_dim


def cache_lines(config: ha.ModelConfig, context: int) -> list[CacheLine]:
    """Bytes of one row's cache by state, layer kind and dtype, from its arrays.

    Entries, windows and index keys in bfloat16, raw rows of compressors in float32.
    """
    cache = jax.eval_shape(lambda: ha.init_cache(config, 1, context, dtypes="bfloat16"))
    lines: dict[tuple, int] = defaultdict(int)
    for layer in cache.layers:
        for state in layer.states.values():
            for field, array in vars(state).items():
                if array is not None:
                    key = (
                        type(state).__name__,
                        layer.kind,
                        field,
                        array.dtype.name,
                        field in state.growing,
                    )
                    lines[key] += array.size * array.dtype.itemsize
    for layer, cut in zip(cache.layers, cache.cuts, strict=True):
        for name, array in cut.items():
            # The recent states once more, as they stood at the last boundary.
            key = ("cuts", layer.kind, name, array.dtype.name, False)
            lines[key] += array.size * array.dtype.itemsize
    counted = sum(lines.values())
    ledger = cache_bytes(cache)
    assert counted + ledger.by_state["counts"] == ledger.total
    return [CacheLine(*key, bytes=size) for key, size in lines.items()]


def capacity(config: ha.ModelConfig, context: int) -> int:
    """Tokens that the cache of `cache_lines` is made for: whole blocks."""
    cache = jax.eval_shape(lambda: ha.init_cache(config, 1, context))
    return cache.spec.capacity


def record_bytes_per_token(config: ha.ModelConfig) -> float:
    """Bytes that entries and index keys take a token in records of fp8 and fp4.

    A record of an entry is fp8 outside the rotated channels, those in bfloat16, a
    one-byte scale for each 64 fp8 channels, padded to 8 bytes; that of an index key
    is fp4 and a one-byte scale for each 32 channels.
    """
    total = 0.0
    for layer in config.layers:
        if not layer.ratio:
            continue
        plain = layer.head_dim - layer.rope.dims
        record = plain + 2 * layer.rope.dims + -(-plain // 64)
        vectors = layer.features // layer.head_dim
        size = vectors * (-(-record // 8) * 8)
        if layer.top_k:
            size += config.index_dim // 2 + -(-config.index_dim // 32)
        total += size / layer.ratio
    return total


def dense_twin(config: ha.ModelConfig) -> ha.ModelConfig:
    """Grouped-query attention with 8 key/value heads of 128 in every layer.

    Layers, hidden size, vocabulary, feed-forward and residual streams are the model's;
    as many query heads of 128 as make up the hidden size, a multiple of 8; full query
    and output projections.
    """
    groups = max(1, -(-config.hidden_size // (DENSE_DIM * DENSE_HEADS)))
    return config.replace(
        name=f"{config.name}_dense",
        pattern=f"dense*{len(config.layers)}",
        heads=groups * DENSE_HEADS,
        head_dim=DENSE_DIM,
        kv_heads=DENSE_HEADS,
        dense_kv_heads=DENSE_HEADS,
        rope_dims=min(config.rope_dims, DENSE_DIM),
        query_rank=None,
        output_rank=None,
        output_groups=1,
        decay="none",
    )


def draft_parameters(config: ha.ModelConfig, layers: int) -> int:
    """Parameters of window-only layers with this model's feed-forward, as those are
    that the published models draft with; what joins them to the model is left out.
    """
    moe = config.moe and dataclasses.replace(config.moe, hash_layers=())
    one, two = (
        weights(config.replace(pattern=pattern, moe=moe)).total
        for pattern in ("swa", "swa*2")
    )
    return layers * (two - one)


def device_bytes(
    config: ha.ModelConfig,
    lines: list[CacheLine],
    *,
    devices: int,
    rows: int,
    sharding: str,
    weight_bits: int,
    expert_bits: int,
) -> tuple[float, float, float]:
    """What the fullest device holds under a sharding (`plan_config.SHARDINGS`).

    Returns:
      Bytes of (weights, the cache of all its rows, the cache of one row).
    """
    w = weights(config)

    def share(parts: int) -> float:
        return -(-parts // devices) / parts

    experts = 0.0
    if config.moe is not None and sharding == "replicated":
        experts = float(w.experts)
    elif config.moe is not None:
        experts = w.experts * share(config.moe.experts)
    tables, by_head = float(w.embedding + w.head), float(w.by_head)
    row = float(sum(line.bytes for line in lines))
    own_rows = -(-rows // devices)
    if sharding == "experts_heads":
        tables *= share(config.vocab_size)
        by_head *= share(config.heads)
        own_rows = rows
        divided = ("CompressedKV", "SlidingWindow")
        row = sum(
            line.bytes
            * (share(_kv_heads(config, line.kind)) if line.state in divided else 1)
            for line in lines
        )
    held = (tables + by_head + w.other) * weight_bits / 8 + experts * expert_bits / 8
    return held, own_rows * row, row


def _kv_heads(config: ha.ModelConfig, kind: str) -> int:
    return next(layer.kv_heads for layer in config.layers if layer.kind == kind)
