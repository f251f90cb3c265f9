"""Attention over all visible entries of a history."""
