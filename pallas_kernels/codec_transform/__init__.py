"""Orthonormal transforms before packing, and their inverses."""
