"""`open`: finds or makes the store at a url."""

from collections.abc import Callable, Sequence

from hybrid_attn.store.blocks import crc32c
from hybrid_attn.store.errors import NotAStoreError, StoreReadError
from hybrid_attn.store.objects import ObjectIO, Objects
from hybrid_attn.store.store import MARKER, MARKER_CONTENT, TOP_LEVEL, Store


def open(
    url: str,
    *,
    model_id: str,
    salt: str | bytes | None = None,
    replicas: Sequence[Store] = (),
    wrap: Callable[[Objects], ObjectIO] | None = None,
) -> Store:
    """Opens the store at a url, or makes one where nothing is.

    Args:
      url: a path, or a url of TensorStore's key-value stores: ``file://``,
        ``memory://`` (one for the process), ``gs://``, ``s3://``. On the last two,
        which have no locks, let one process write at a time.
      model_id: from `hybrid_attn.model_id`.
      salt: a tenant's secret; chains of other salts never meet.
      replicas: stores that are asked for blocks which this one lost.
      wrap: puts a layer between the store and its storage, for tests.

    Raises:
      NotAStoreError: the url holds something else, or another format version.
      StoreError: the storage failed.
    """
    objects = Objects(url)
    io = objects if wrap is None else wrap(objects)
    rewritten = _claim(io)
    store = Store(io, model_id=model_id, salt=salt, replicas=replicas)
    if rewritten:
        store.report("marker_rewritten", MARKER, rewritten)
    objects.make_private()
    return store


def _claim(io: ObjectIO) -> str:
    """Makes sure that a store lies here; says what a damaged marker was."""
    (held,) = io.read_many([MARKER])
    if held == MARKER_CONTENT:
        return ""
    if isinstance(held, StoreReadError):
        raise NotAStoreError(str(held)) from held
    if held is not None:
        body, newline, crc = held.rstrip(b"\n").rpartition(b"\n")
        if crc == b"crc32c %08x" % crc32c(body + newline):
            raise NotAStoreError(f"{io.url}: {body!r}, expected {MARKER_CONTENT!r}")
    foreign = [key for key in io.list("") if key.split("/")[0] not in TOP_LEVEL]
    if foreign:
        raise NotAStoreError(
            f"{io.url}: holds {foreign[0]!r} and no {MARKER}; expected a store or an "
            "empty place"
        )
    io.write_many({MARKER: MARKER_CONTENT})
    return "" if held is None else f"was {held!r}"
