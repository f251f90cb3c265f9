"""Layer stacks written as patterns.

Grammar: ``stack = item {"," item}``, ``item = (kind [":" ratio] | "(" stack ")")
["*" count]``. ``"hca*2,swa*3,csa"`` is six layers; ``"swa*2,(csa,hca)*20,csa"`` is
the stack of V4-Flash; ``"csa:8"`` overrides the compression ratio of one layer.
"""

import re

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|\d+|[(),*:])")


def parse_pattern(pattern: str) -> tuple[tuple[str, int | None], ...]:
    """Expands a pattern into one ``(kind, ratio override or None)`` per layer.

    Raises:
      ValueError: the text is not a pattern; names the place and what was expected.
    """
    tokens: list[tuple[str, int]] = []
    position = 0
    text = pattern.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(
                f"layer pattern {pattern!r}: unexpected {text[position]!r} at "
                f"character {position}; expected a kind, a number or one of '(),*:'"
            )
        tokens.append((match.group(1), match.start(1)))
        position = match.end()
    reader = _Reader(pattern, tokens)
    layers = reader.stack()
    if reader.index != len(tokens):
        raise reader.error("',' or the end")
    return tuple(layers)


class _Reader:
    def __init__(self, pattern: str, tokens: list[tuple[str, int]]):
        self.pattern, self.tokens, self.index = pattern, tokens, 0

    def error(self, expected: str) -> ValueError:
        if self.index < len(self.tokens):
            token, at = self.tokens[self.index]
            got = f"{token!r} at character {at}"
        else:
            got = "the end"
        return ValueError(
            f"layer pattern {self.pattern!r}: got {got}, expected {expected}"
        )

    def peek(self) -> str:
        return self.tokens[self.index][0] if self.index < len(self.tokens) else ""

    def number(self, what: str) -> int:
        if not self.peek().isdigit() or int(self.peek()) < 1:
            raise self.error(f"{what} (a whole number from 1)")
        self.index += 1
        return int(self.tokens[self.index - 1][0])

    def stack(self) -> list[tuple[str, int | None]]:
        layers = self.item()
        while self.peek() == ",":
            self.index += 1
            layers += self.item()
        return layers

    def item(self) -> list[tuple[str, int | None]]:
        if self.peek() == "(":
            self.index += 1
            layers = self.stack()
            if self.peek() != ")":
                raise self.error("')'")
            self.index += 1
        elif self.peek() and (self.peek()[0].isalpha() or self.peek()[0] == "_"):
            kind = self.peek()
            self.index += 1
            ratio = None
            if self.peek() == ":":
                self.index += 1
                ratio = self.number("a compression ratio")
            layers = [(kind, ratio)]
        else:
            raise self.error("a layer kind or '('")
        if self.peek() == "*":
            self.index += 1
            layers = layers * self.number("a repeat count")
        return layers
