"""Attention over a chosen list of entries per query."""
