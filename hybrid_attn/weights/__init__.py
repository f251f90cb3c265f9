"""Checkpoints of other projects: Hugging Face directories and GGUF files."""

from hybrid_attn.weights.conversion import convert
from hybrid_attn.weights.files import WeightsError
from hybrid_attn.weights.loading import load, save
from hybrid_attn.weights.tokenizer import load_tokenizer

__all__ = ["WeightsError", "convert", "load", "load_tokenizer", "save"]
