"""Attention operations: one folder each, with its reference and implementations.

This package knows nothing of ``hybrid_attn``.
"""
