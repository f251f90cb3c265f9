"""What a checkpoint raises beside `ValueError` for wrong arguments."""


class CheckpointError(Exception):
    """Base of every error of a checkpoint."""


class CheckpointWriteError(CheckpointError):
    """The storage refused a write; nothing of it counts as written."""


class FencedError(CheckpointError):
    """A newer writer opened the same checkpoint; this one may write no more."""


class DamagedError(CheckpointError):
    """A file is not what was written: missing, cut short, changed or foreign."""


class NothingToRestoreError(CheckpointError):
    """No state can be restored, and no tokens that could be read again are known."""
