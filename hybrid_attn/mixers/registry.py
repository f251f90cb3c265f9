"""Kinds of mixers by name."""

import difflib

_MIXERS: dict[str, type] = {}


def register_mixer(kind: str, cls: type | None = None):
    """Makes a `Mixer` class usable in layer patterns under ``kind``.

    Use as ``register_mixer("mine", MyMixer)`` or as a class decorator
    ``@register_mixer("mine")``. Test it with
    ``hybrid_attn.testing.conformance("mine")``.

    Raises:
      ValueError: the name is not an identifier, or another class has it.
    """
    if not kind.isidentifier():
        raise ValueError(f"mixer kind {kind!r}: expected an identifier")

    def register(cls: type) -> type:
        if _MIXERS.get(kind, cls) is not cls:
            raise ValueError(
                f"mixer kind {kind!r} is already {_MIXERS[kind].__name__}, "
                f"got {cls.__name__}"
            )
        _MIXERS[kind] = cls
        return cls

    return register if cls is None else register(cls)


def kinds() -> tuple[str, ...]:
    """Registered kinds, in order of registration."""
    return tuple(_MIXERS)


def mixer_class(kind: str) -> type:
    """Looks a kind up.

    Raises:
      ValueError: unknown; names the nearest and all there are.
    """
    if kind not in _MIXERS:
        near = difflib.get_close_matches(kind, _MIXERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown mixer kind {kind!r}, expected one of {', '.join(_MIXERS)}{hint}"
        )
    return _MIXERS[kind]
