"""What a store raises; every message names the url, the key and what was expected."""


class StoreError(Exception):
    """Base of every error of a store."""


class NotAStoreError(StoreError):
    """The url holds something else, or a store of another format version."""


class StoreReadError(StoreError):
    """The storage under the store could not be read; says nothing about the data."""


class StoreWriteError(StoreError):
    """The storage refused a write (no space, no permission, …)."""


class StoreClosedError(StoreError):
    """The store was closed."""


class IndexDamagedError(StoreError):
    """The index is missing, unreadable or differs from its seal."""


class BlockError(StoreError):
    """An object is not the verified block that was asked for.

    Attributes:
      reason: "short", "magic", "version", "size", "crc", "header", "padding", or
        "mismatch" for a sound block of another key.
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason
