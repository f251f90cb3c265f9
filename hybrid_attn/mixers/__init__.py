"""The attention of one layer: kinds `dense`, `swa`, `hca`, `csa`, and your own."""

from hybrid_attn.mixers.base import Mixer
from hybrid_attn.mixers.compressed import FullHistoryMixer
from hybrid_attn.mixers.dense import DenseMixer
from hybrid_attn.mixers.registry import kinds, mixer_class, register_mixer
from hybrid_attn.mixers.sliding import SlidingMixer
from hybrid_attn.mixers.sparse import SparseMixer

__all__ = [
    "DenseMixer",
    "FullHistoryMixer",
    "Mixer",
    "SlidingMixer",
    "SparseMixer",
    "kinds",
    "mixer_class",
    "register_mixer",
]
