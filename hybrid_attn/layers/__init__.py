"""Layers around the mixers: linear maps, norms, rotary embedding, feed-forward."""
