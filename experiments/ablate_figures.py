"""The three figures of `ablate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.ablate_results import (
    VariantResult,
    by_variant,
    contexts,
    decode_at,
    mean,
    recall_of,
    values,
)
from experiments.reporting import save_figure

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
_COLOURS = {
    "dense": "#222222",
    "swa": "#E69F00",
    "hca": "#009E73",
    "csa": "#0072B2",
    "hybrid": "#D55E00",
}
_MORE = ("#CC79A7", "#56B4E9", "#8C6D31", "#7B4173", "#637939")
_MARKERS = {"dense": "o", "swa": "s", "hca": "^", "csa": "D", "hybrid": "*"}
_GREY = "#666666"
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "savefig.dpi": 150,
}


def write_figures(
    results: Sequence[VariantResult], directory: Path, device: str
) -> list[Path]:
    """Draws what the results hold.

    Args:
      results: at least one.
      directory: made if missing.
      device: named under the times.

    Returns:
      The files: recall_by_distance.png, quality_vs_cache_bytes.png and, where decoding
      was measured, decode_vs_context.png.

    Raises:
      ValueError: no results.
    """
    if not results:
        raise ValueError("no results to draw: no variant is finished")
    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "recall_by_distance.png": _recall_by_distance,
        "quality_vs_cache_bytes.png": _quality_vs_cache_bytes,
    }
    if contexts(results, "decode_ms"):
        figures["decode_vs_context.png"] = _decode_vs_context
    written = []
    with matplotlib.rc_context(_STYLE):
        for name, draw in figures.items():
            figure = draw(results, device)
            written.append(save_figure(figure, directory / name))
    return written


def _recall_by_distance(results: Sequence[VariantResult], device: str) -> Figure:
    del device
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = figure.subplots()
    labels = []
    for index, (name, group) in enumerate(by_variant(results).items()):
        bins = [(b.low, b.high) for b in group[0].recall_by_distance]
        x = [(low * high) ** 0.5 for low, high in bins]
        rows = [
            [r.recall_by_distance[i].accuracy for r in group] for i in range(len(bins))
        ]
        y = [sum(row) / len(row) for row in rows]
        look = _look(name, index)
        axes.plot(x, y, **look, linewidth=2)
        if len(group) > 1:
            low, high = [min(row) for row in rows], [max(row) for row in rows]
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, lw=0)
        if x:
            labels.append((name, x[-1], y[-1], look["color"]))
    window, reach = results[0].window, results[0].reach
    # "Inside" ends between the last distance seen and the first one not seen.
    for at, text in ((window - 0.5, "window ends"), (reach + 0.5, "reach ends")):
        axes.axvline(at, color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            text,
            (at, 1.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9,
            color=_GREY,
        )
    chance = results[0].chance
    if chance is not None:
        axes.axhline(chance, color=_GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "guessing",
            (0.005, chance),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
            color=_GREY,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.03)
    _plain_ticks(axes, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    axes.set_xlabel("distance from the query back to its value, tokens")
    axes.set_ylabel("recall accuracy")
    axes.set_title("What each attention mode still recalls", pad=20)
    _end_labels(axes, labels)
    return figure


def _quality_vs_cache_bytes(results: Sequence[VariantResult], device: str) -> Figure:
    del device
    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    panels = (
        ("Recall beyond reach (higher is better)", recall_of("offset", "beyond_reach")),
        ("Bits per byte of text (lower is better)", lambda r: r.bits_per_byte),
    )
    groups = by_variant(results)
    for axes, (title, read) in zip(figure.subplots(1, 2), panels, strict=True):
        points = []
        for index, (name, group) in enumerate(groups.items()):
            x = mean(values(group, lambda r: r.cache_bytes_per_token)) or 0.0
            y = values(group, read)
            look = _look(name, index)
            size = 15 if look["marker"] == "*" else 10
            axes.plot([x], [mean(y)], **(look | {"markersize": size}), zorder=3)
            if len(y) > 1:
                axes.plot([x, x], [min(y), max(y)], color=look["color"], lw=1.5)
                axes.plot([x] * len(y), y, "_", color=look["color"], markersize=9)
            points.append((name, x, max(y), look["color"]))
        axes.set_xscale("log")
        low, high = min(p[1] for p in points), max(p[1] for p in points)
        axes.set_xlim(low / 2, high * 2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _bytes(n)))
        axes.xaxis.set_minor_locator(NullLocator())
        if read is panels[0][1]:
            axes.set_ylim(-0.03, 1.14)
            axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        else:
            axes.margins(y=0.2)
        axes.set_xlabel("cache bytes per token, at 64k tokens")
        axes.set_title(title)
        _point_labels(axes, points)
    return figure


def _decode_vs_context(results: Sequence[VariantResult], device: str) -> Figure:
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = figure.subplots()
    labels = []
    for index, (name, group) in enumerate(by_variant(results).items()):
        lengths = contexts(group, "decode_ms")
        rows = [values(group, decode_at(n)) for n in lengths]
        if not rows:
            continue
        y = [sum(row) / len(row) for row in rows]
        look = _look(name, index)
        axes.plot(lengths, y, **look, linewidth=2)
        if max(len(row) for row in rows) > 1:
            low, high = [min(row) for row in rows], [max(row) for row in rows]
            axes.fill_between(lengths, low, high, color=look["color"], alpha=0.15, lw=0)
        labels.append((name, lengths[-1], y[-1], look["color"]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes, contexts(results, "decode_ms"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(_minor))
    axes.tick_params(axis="y", which="minor", labelsize=9, labelcolor=_GREY)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("decode, ms per token")
    axes.set_title(f"Time of one decoded token ({device})")
    _end_labels(axes, labels)
    return figure


def _look(name: str, index: int) -> dict:
    return {
        "color": _COLOURS.get(name, _MORE[index % len(_MORE)]),
        "marker": _MARKERS.get(name, "P"),
        "markersize": 9 if name == "hybrid" else 5.5,
        "label": name,
    }


def _end_labels(axes: Axes, labels: list[tuple[str, float, float, str]]) -> None:
    """Names each line at its right end, pushed apart where the ends are close."""
    if not labels:
        return
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    # Positions in points exist only after the layout is made.
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    ends = [axes.transData.transform((x, y))[1] * scale for _, x, y, _ in labels]
    right = max(x for _, x, _, _ in labels)
    places = _apart(ends, 13.0)
    for (name, _, y, colour), end, place in zip(labels, ends, places, strict=True):
        axes.annotate(
            name,
            (right, y),
            xytext=(10, place - end),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )


def _point_labels(axes: Axes, points: list[tuple[str, float, float, str]]) -> None:
    """Names each point above it; names that would overlap are stacked."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    spots = [axes.transData.transform((x, y)) * scale for _, x, y, _ in points]
    for index, (name, x, y, colour) in enumerate(points):
        near = [
            i
            for i, spot in enumerate(spots)
            if abs(spot[0] - spots[index][0]) < 34
            and abs(spot[1] - spots[index][1]) < 30
        ]
        places = _apart([spots[i][1] for i in near], 14.0)
        axes.annotate(
            name,
            (x, y),
            xytext=(0, 9 + places[near.index(index)] - spots[index][1]),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=colour,
            fontweight="bold",
        )


def _apart(places: Sequence[float], least: float) -> list[float]:
    """Moves places as little as needed to stand `least` apart, order kept."""
    merged: list[tuple[list[int], float]] = []
    for first in sorted(range(len(places)), key=lambda i: places[i]):
        members, centre = [first], places[first]
        # Joins a group below while the two would overlap.
        while (
            merged
            and centre - merged[-1][1] < least * (len(members) + len(merged[-1][0])) / 2
        ):
            below, middle = merged.pop()
            total = len(below) + len(members)
            centre = (middle * len(below) + centre * len(members)) / total
            members = below + members
        merged.append((members, centre))
    result = [0.0] * len(places)
    for members, centre in merged:
        for rank, index in enumerate(members):
            result[index] = centre + (rank - (len(members) - 1) / 2) * least
    return result


def _plain_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    low, high = axes.get_xlim()
    shown = [n for n in ticks if low <= n <= high]
    axes.set_xticks(shown, [_count(n) for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _minor(number: float, _: int | None) -> str:
    return f"{number:g}" if f"{number:e}"[0] in "25" else ""


def _count(number: int) -> str:
    return (
        f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else f"{number}"
    )


def _bytes(number: float) -> str:
    return f"{number / 1000:g} kB" if number >= 1000 else f"{number:g} B"
