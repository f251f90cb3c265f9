"""Checkpoints of other projects: Hugging Face directories in safetensors."""

from hybrid_attn.weights.files import WeightsError
from hybrid_attn.weights.loading import load, save

__all__ = ["WeightsError", "load", "save"]
