"""hybrid_attn beside the eager PyTorch implementation of DeepSeek-V4."""
