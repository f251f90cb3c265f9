"""Interleaved (z-order) codes of integer coordinates."""
