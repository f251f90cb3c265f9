"""Token chains: the identity of stored state is what was read, never its text."""

import hashlib
import struct

import numpy as np
from numpy.typing import ArrayLike

DIGEST_CHARACTERS = 32
_VERSION = b"hybrid_attn chain 1"


class Boundary(str):
    """A chain digest that remembers its block; compares and hashes as the string.

    Attributes:
      parent: digest of the previous boundary, "" for the first.
      tokens: digest of this block's own tokens, by another hash than the chain, so
        that a block behind an equal chain digest can still be refused.
      index: block number from 0.
      length: tokens up to the end of the block.
    """

    parent: str
    tokens: str
    index: int
    length: int

    def __new__(cls, digest: str, *, parent: str, tokens: str, index: int, length: int):
        self = super().__new__(cls, digest)
        self.parent = parent
        self.tokens = tokens
        self.index = index
        self.length = length
        return self

    def __getnewargs_ex__(self):
        fields = {k: getattr(self, k) for k in ("parent", "tokens", "index", "length")}
        return (str(self),), fields


def chain(
    model_id: str,
    layout: str,
    salt: str | bytes | None,
    tokens: ArrayLike,
    block_tokens: int,
) -> tuple[Boundary, ...]:
    """Digests of a token sequence at each full block boundary, first block first.

    Each digest covers the model, the layout, the salt, the block size and every token
    up to its boundary. Tokens behind the last full block have no boundary.

    Args:
      model_id: from `model_id`; other weights never share a digest.
      layout: fingerprint of what is stored.
      salt: separates tenants; None is another chain than an empty salt.
      tokens: ints [t], token ids.
      block_tokens: tokens a block.

    Returns:
      t // block_tokens strings of 32 hex characters.

    Raises:
      ValueError: tokens are not one-dimensional ids from 0, or no positive block size.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(
            f"tokens {ids.dtype}{list(ids.shape)}: expected one row of integer ids"
        )
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int64).max):
        raise ValueError("tokens: expected ids from 0")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens!r}: expected from 1")
    ids = ids.astype("<i8")
    state = _seed(model_id, layout, salt, block_tokens)
    own = hashlib.blake2b(state, digest_size=32).digest()
    boundaries: list[Boundary] = []
    parent = ""
    for index in range(ids.size // block_tokens):
        block = ids[index * block_tokens : (index + 1) * block_tokens].tobytes()
        # The full state runs on; only what is shown is cut to 128 bits.
        state = hashlib.sha256(state + block).digest()
        digest = state.hex()[:DIGEST_CHARACTERS]
        boundaries.append(
            Boundary(
                digest,
                parent=parent,
                tokens=hashlib.blake2b(block, key=own, digest_size=16).hexdigest(),
                index=index,
                length=(index + 1) * block_tokens,
            )
        )
        parent = digest
    return tuple(boundaries)


def _seed(model_id: str, layout: str, salt: str | bytes | None, block: int) -> bytes:
    hasher = hashlib.sha256(_VERSION)
    salt = salt.encode() if isinstance(salt, str) else salt
    parts = [model_id.encode(), layout.encode(), str(block).encode()]
    parts += [] if salt is None else [salt]
    # Lengths go in too: no two lists of parts then run into the same bytes.
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)) + part)
    return hasher.digest()
