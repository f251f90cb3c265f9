"""The model configuration: frozen, hashable, and the only source of geometry."""

import dataclasses
import functools
import hashlib
import json
from typing import Literal

from hybrid_attn.pattern import parse_pattern

Decay = Literal["none", "fixed", "learned"]


def cached_hash(cls):
    """Class decorator: a frozen dataclass hashes its fields once, not at every call.

    Configurations are static arguments of compiled functions; hashing a nested one
    anew took longer than decoding a token.
    """
    compute = cls.__hash__

    def __hash__(self):
        value = self.__dict__.get("_hash")
        if value is None:
            value = compute(self)
            object.__setattr__(self, "_hash", value)
        return value

    cls.__hash__ = __hash__
    return cls


@dataclasses.dataclass(frozen=True)
class Rope:
    """Partial interleaved rotary embedding on the trailing ``dims`` channels.

    ``yarn_factor`` above 1 stretches the low frequencies as YaRN does
    (arXiv 2309.00071), without its attention factor.
    """

    dims: int
    theta: float = 1e4
    yarn_factor: float = 1.0
    original_positions: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Routed experts of every feed-forward, beside a shared one.

    Attributes:
      experts, chosen, width: how many there are, how many a token gets, their width
        (that of the shared expert is `ModelConfig.feed_forward_size`).
      scale: factor on the normalised weights.
      score: what makes a router's products positive.
      hash_layers: layers that choose by a fixed table over token ids.
    """

    experts: int
    chosen: int
    width: int
    scale: float = 1.0
    score: Literal["sqrtsoftplus", "sigmoid"] = "sqrtsoftplus"
    hash_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class HyperConfig:
    """Hyper-connections: parallel residual streams, mixed around each sublayer.

    ``iterations`` of Sinkhorn make a mixture doubly stochastic; ``eps`` is added to
    what they divide by.
    """

    streams: int = 4
    iterations: int = 20
    eps: float = 1e-6


@cached_hash
@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """The resolved geometry of one layer, part of the cache's identity.

    ``window`` 0 means no window; ``ratio`` 0 means no history, 1 one entry a token;
    ``top_k`` 0 means that every visible entry is read.
    """

    kind: str
    window: int
    ratio: int
    overlap: bool
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    shared_kv: bool
    rope: Rope
    decay: Decay

    @property
    def features(self) -> int:
        """Channels of one stored token or entry: keys, and values unless shared."""
        return self.kv_heads * self.head_dim * (1 if self.shared_kv else 2)


@cached_hash
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A layer-wise hybrid model.

    The attention of each layer follows ``pattern`` (see ``hybrid_attn.pattern``).
    Everything else is shared by all layers of a kind, so that variants differ in
    what they are meant to differ in. Lengths are in tokens, ``decay_rate`` in nats
    a token.
    """

    name: str = "custom"
    vocab_size: int = 256
    hidden_size: int = 64
    pattern: str = "hca,swa,csa"
    feed_forward_size: int = 256
    # Gates are clamped to at most the limit, their factors to within it.
    swiglu_limit: float | None = None
    moe: MoEConfig | None = None
    hyper: HyperConfig | None = None
    # Heads. `dense` has its own grouped key/value heads and separate values.
    heads: int = 4
    head_dim: int = 16
    kv_heads: int = 1
    shared_kv: bool = True
    dense_kv_heads: int = 2
    query_rank: int | None = None
    output_groups: int = 1
    output_rank: int | None = None
    query_norm: bool = True
    key_norm: bool = True
    sink: bool = True
    # A constant key and value in place of the first token, behind every window.
    sink_key: bool = False
    token_shift: bool = False
    # Window.
    window: int = 128
    decay: Decay = "none"
    decay_rate: float = 0.1
    decay_kinds: tuple[str, ...] = ("swa",)
    # Compression.
    csa_ratio: int = 4
    csa_overlap: bool = True
    hca_ratio: int = 128
    hca_overlap: bool = False
    slot_bias: float = 0.0
    # In units of log(ratio) nats on its logits: at 1 an entry counts as its tokens.
    entry_bias: float = 0.0
    # False: an entry is read from where its first token has left the window, and the
    # window begins after it, so that every token is read once.
    entries_in_window: bool = True
    # Indexer.
    top_k: int = 64
    index_heads: int = 4
    index_dim: int = 32
    index_norm: bool = True
    index_weights: bool = True
    # Rotary embedding; `index_rope_dims` None means the same as `rope_dims`.
    rope_dims: int = 8
    index_rope_dims: int | None = None
    rope_theta: float = 1e4
    compressed_rope_theta: float | None = None
    yarn_factor: float = 1.0
    yarn_original_positions: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    # Factor on the logits of tied embeddings; None is hidden_size^-1/2.
    tied_scale: float | None = None
    block_multiple: int | None = None
    compute_dtype: str = "float32"

    def __post_init__(self):
        _check_config(self)

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The resolved layers, one `LayerSpec` each."""
        return tuple(
            _layer_spec(self, kind, ratio)
            for kind, ratio in parse_pattern(self.pattern)
        )

    @property
    def residual_scale(self) -> float:
        """Initial factor of what is added to the residual stream, as in GPT-2."""
        return (2 * len(self.layers)) ** -0.5

    @functools.cached_property
    def identity(self) -> str:
        """Hash of every field but the name; caches carry it."""
        fields = dataclasses.asdict(self)
        fields.pop("name")
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)


def _layer_spec(config: ModelConfig, kind: str, ratio: int | None) -> LayerSpec:
    compressed = kind in ("hca", "csa") or ratio is not None
    theta = config.rope_theta
    if compressed and config.compressed_rope_theta is not None:
        theta = config.compressed_rope_theta
    default_ratio = {"csa": config.csa_ratio, "hca": config.hca_ratio, "dense": 1}
    dense = kind == "dense"
    return LayerSpec(
        kind=kind,
        window=0 if dense else config.window,
        ratio=ratio if ratio is not None else default_ratio.get(kind, 0),
        overlap={"csa": config.csa_overlap, "hca": config.hca_overlap}.get(kind, False),
        top_k=config.top_k if kind == "csa" else 0,
        heads=config.heads,
        kv_heads=config.dense_kv_heads if dense else config.kv_heads,
        head_dim=config.head_dim,
        shared_kv=config.shared_kv and not dense,
        rope=Rope(
            dims=config.rope_dims,
            theta=theta,
            yarn_factor=config.yarn_factor if compressed else 1.0,
            original_positions=config.yarn_original_positions,
            beta_fast=config.yarn_beta_fast,
            beta_slow=config.yarn_beta_slow,
        ),
        decay=config.decay if kind in config.decay_kinds else "none",
    )


def _check_config(config: ModelConfig) -> None:
    positive = (
        "vocab_size hidden_size feed_forward_size heads head_dim kv_heads window "
        "dense_kv_heads csa_ratio hca_ratio top_k index_heads index_dim output_groups"
    )
    for field in positive.split():
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{field}={value!r}: expected a whole number from 1")
    for field in ("kv_heads", "dense_kv_heads", "output_groups"):
        if config.heads % getattr(config, field):
            raise ValueError(
                f"heads={config.heads} is not a multiple of "
                f"{field}={getattr(config, field)}"
            )
    index_rope = config.index_rope_dims
    for field, value, limit in (
        ("rope_dims", config.rope_dims, config.head_dim),
        (
            "index_rope_dims",
            config.rope_dims if index_rope is None else index_rope,
            config.index_dim,
        ),
    ):
        if value and limit % 2:
            raise ValueError(f"{field}={value} turns pairs: expected an even {limit=}")
        if value % 2 or not 0 <= value <= limit:
            raise ValueError(f"{field}={value}: expected an even number in 0..{limit}")
    if config.decay not in ("none", "fixed", "learned"):
        raise ValueError(
            f"decay={config.decay!r}: expected 'none', 'fixed' or 'learned'"
        )
    if "dense" in config.decay_kinds:
        raise ValueError(
            f"decay_kinds={config.decay_kinds}: 'dense' has no window to decay over"
        )
    if config.sink_key and config.shared_kv:
        raise ValueError("sink_key needs values of their own: shared_kv=False")
    if config.output_groups > 1 and config.output_rank is None:
        raise ValueError("output_groups above 1 needs output_rank")
    if config.swiglu_limit is not None and not config.swiglu_limit > 0:
        raise ValueError(f"swiglu_limit={config.swiglu_limit}: expected above 0")
    parsed = parse_pattern(config.pattern)
    layers = len(parsed)
    if not config.entries_in_window:
        default = {"csa": config.csa_ratio, "hca": config.hca_ratio}
        for kind, ratio in parsed:
            if kind in default and (ratio or default[kind]) > config.window:
                raise ValueError(
                    f"{kind}:{ratio or default[kind]} with entries_in_window=False: "
                    f"expected groups of at most window={config.window}"
                )
    if config.moe is not None:
        _check_moe(config.moe, layers)
    hyper = config.hyper
    if hyper is not None and (hyper.streams < 1 or hyper.iterations < 1):
        raise ValueError(
            f"hyper.streams={hyper.streams}, hyper.iterations={hyper.iterations}: "
            "expected whole numbers from 1"
        )


def _check_moe(moe: MoEConfig, layers: int) -> None:
    if moe.experts < 1 or moe.width < 1 or not 1 <= moe.chosen <= moe.experts:
        raise ValueError(
            f"moe.experts={moe.experts}, moe.width={moe.width}, "
            f"moe.chosen={moe.chosen}: expected whole numbers from 1, and no more "
            "chosen than there are"
        )
    if moe.score not in ("sqrtsoftplus", "sigmoid"):
        raise ValueError(
            f"moe.score={moe.score!r}: expected 'sqrtsoftplus' or 'sigmoid'"
        )
    wrong = [layer for layer in moe.hash_layers if not 0 <= layer < layers]
    if wrong:
        raise ValueError(f"moe.hash_layers names {wrong}: expected 0..{layers - 1}")
