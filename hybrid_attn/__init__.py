"""Layer-wise hybrid attention over a five-state cache, as one pure step."""

from hybrid_attn import checkpoint, presets, samplers, store, transforms, weights
from hybrid_attn.cache.ledger import Ledger, cache_bytes
from hybrid_attn.cache.states import Cache, Fault
from hybrid_attn.config import ModelConfig
from hybrid_attn.diff import Difference, diff
from hybrid_attn.generate import generate
from hybrid_attn.initial import init_cache
from hybrid_attn.mixers import Mixer, register_mixer
from hybrid_attn.model import Model, forward
from hybrid_attn.step import compile_step, prefill, step
from hybrid_attn.store.identity import model_id

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Difference",
    "Fault",
    "Ledger",
    "Mixer",
    "Model",
    "ModelConfig",
    "cache_bytes",
    "checkpoint",
    "compile_step",
    "diff",
    "forward",
    "generate",
    "init_cache",
    "model_id",
    "prefill",
    "presets",
    "register_mixer",
    "samplers",
    "step",
    "store",
    "transforms",
    "weights",
]
