"""Packed records of key/values: int8, int4, fp8 and fp4 with block scales."""
