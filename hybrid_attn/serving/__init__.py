"""Serving: what stands above the model and moves caches about."""
