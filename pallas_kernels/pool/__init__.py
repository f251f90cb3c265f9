"""Gated per-channel pooling of groups into entries."""
