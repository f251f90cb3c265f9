"""`model_id`: the identity of a model is its config and every byte of its weights."""

import hashlib
from typing import Any

import jax
import numpy as np


def model_id(model: Any) -> str:
    """sha256 (64 hex characters) over the config and all weights of a model.

    Weights are hashed one leaf at a time: path, shape, dtype and bytes. Retrained or
    converted weights give another identity, so that their caches never meet.

    Args:
      model: a pytree of arrays with a ``config`` that has an ``identity`` string.

    Raises:
      TypeError: no config identity, or a leaf that holds no values (an abstract
        model).
    """
    identity = getattr(getattr(model, "config", None), "identity", None)
    if not isinstance(identity, str):
        raise TypeError(
            f"model_id of {type(model).__name__}: expected a model with config.identity"
        )
    hasher = hashlib.sha256(b"hybrid_attn model 1\0")
    hasher.update(identity.encode() + b"\0")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"model_id: {name} is abstract; expected values")
        array = np.ascontiguousarray(np.asarray(leaf))
        hasher.update(f"{name}|{leaf.dtype}|{list(leaf.shape)}\0".encode())
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
