"""Spreading of bits by masks: the arithmetic that XLA and the kernels share."""

from jax import Array


def spread_steps(dimensions: int, bits: int) -> list[tuple[int, int]]:
    """(shift, mask) steps that move bit i of a number to bit i · dimensions.

    Bits move in halving groups: those at or above each power of two first.
    """
    width = 1
    while width < bits:
        width *= 2
    steps = []
    while width > 1:
        width //= 2
        steps.append((width * (dimensions - 1), _mask(dimensions, bits, width)))
    return steps


def _mask(dimensions: int, bits: int, width: int) -> int:
    """Where bits lie once groups of ``width`` stand ``dimensions`` times as far."""
    mask = 0
    for bit in range(bits):
        group, inside = divmod(bit, width)
        mask |= 1 << group * width * dimensions + inside
    return mask


def spread(x: Array, dimensions: int, bits: int) -> Array:
    """uint32: bit i of ``x`` at bit i · dimensions; higher bits are dropped."""
    x = x & ((1 << bits) - 1)
    for shift, mask in spread_steps(dimensions, bits):
        x = (x | x << shift) & mask
    return x


def gather(code: Array, dimensions: int, bits: int) -> Array:
    """uint32: the inverse of `spread`; other bits are dropped."""
    steps = spread_steps(dimensions, bits)
    masks = [(1 << bits) - 1, *(mask for _, mask in steps)]
    code = code & masks[-1]
    for (shift, _), mask in zip(reversed(steps), reversed(masks[:-1]), strict=True):
        code = (code | code >> shift) & mask
    return code
