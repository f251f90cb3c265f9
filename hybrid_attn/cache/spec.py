"""`CacheSpec`: the static, hashable identity of a cache."""

import dataclasses
import math

import jax.numpy as jnp

from hybrid_attn.config import LayerSpec, ModelConfig, cached_hash

VERSION = 1
# Short compressors would give tiny blocks, and each block is one compiled prefill
# call: below this many tokens the call overhead outweighs the work.
_MIN_BLOCK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class StoredDtypes:
    """Dtype names of what a cache stores, by role.

    No state keeps an accumulator yet: that role is part of the identity alone.
    """

    entries: str = "float32"
    window: str = "float32"
    index: str = "float32"
    frontier: str = "float32"
    accumulator: str = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if not jnp.issubdtype(jnp.dtype(name), jnp.floating):
                raise ValueError(
                    f"dtypes.{field.name}={name!r}: expected a floating dtype"
                )

    @classmethod
    def make(cls, dtypes) -> "StoredDtypes":
        """From None, a dtype for entries, window and index, a mapping, or itself."""
        if dtypes is None:
            return cls()
        if isinstance(dtypes, cls):
            return dtypes
        known = [field.name for field in dataclasses.fields(cls)]
        if isinstance(dtypes, dict):
            unknown = sorted(set(dtypes) - set(known))
            if unknown:
                raise ValueError(
                    f"dtypes has unknown roles {unknown}; expected some of {known}"
                )
            return cls(**{k: jnp.dtype(v).name for k, v in dtypes.items()})
        name = jnp.dtype(dtypes).name
        return cls(entries=name, window=name, index=name)


@cached_hash
@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about a cache; two caches with equal specs have equal trees.

    ``capacity``, ``block_tokens`` and ``undo`` are in tokens.
    """

    config_name: str
    config_identity: str
    capacity: int
    block_tokens: int
    undo: int
    dtypes: StoredDtypes
    layers: tuple[LayerSpec, ...]
    version: int = VERSION


def block_tokens(config: ModelConfig) -> int:
    """The boundary distance: a multiple of every layer's ratio, in tokens."""
    common = math.lcm(*(max(1, layer.ratio) for layer in config.layers))
    multiple = config.block_multiple or -(-_MIN_BLOCK_TOKENS // common)
    return common * multiple


def make_spec(config: ModelConfig, capacity: int, undo: int, dtypes) -> CacheSpec:
    """Builds the spec; ``capacity`` is rounded up to a multiple of the block.

    Raises:
      ValueError: capacity or undo out of range, or an unknown stored dtype.
    """
    if not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity={capacity!r}: expected a whole number from 1")
    if not isinstance(undo, int) or undo < 0:
        raise ValueError(f"undo={undo!r}: expected a whole number from 0")
    block = block_tokens(config)
    return CacheSpec(
        config_name=config.name,
        config_identity=config.identity,
        capacity=-(-capacity // block) * block,
        block_tokens=block,
        undo=undo,
        dtypes=StoredDtypes.make(dtypes),
        layers=config.layers,
    )
