"""What reports share: Markdown tables and figures that appear whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of text; the first column stands left, the others right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a PNG of 150 dots an inch; returns its path, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A killed program must not leave half a picture.
    part = path.with_name(f".{path.name}")
    figure.savefig(part, format="png", dpi=150)
    return part.replace(path)
