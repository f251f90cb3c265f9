"""Sliding-window attention with time decay."""
