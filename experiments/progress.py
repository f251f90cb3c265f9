"""Progress over known stages, and tables, in a terminal or a log."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

_LOG_WIDTH = 110


class Progress:
    """One bar over all stages, with the time left.

    In a terminal a live bar; elsewhere a plain line every `interval` seconds. Use as a
    context manager:

        with Progress({"dense": 120.0, "swa": 90.0}) as progress:
            progress.start("dense")
            progress.update(step / steps, f"loss {loss:.2f}")
            progress.finish()
            progress.skip("swa")  # done by an earlier process
    """

    def __init__(
        self,
        stages: Mapping[str, float],
        *,
        interval: float = 15.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the plan.

        Args:
          stages: expected seconds of each stage, above 0, in the order they run.
          interval: seconds between two lines where there is no terminal.
          console: where to write; standard output if None.
          clock: seconds.

        Raises:
          ValueError: no stages, or an expectation that is not above 0.
        """
        if not stages or min(stages.values()) <= 0:
            raise ValueError(f"stages need seconds above 0 each, got {dict(stages)}")
        self._weights = dict(stages)
        self._interval = interval
        self._console = console or make_console()
        self._clock = clock
        self._done: dict[str, bool] = {}  # name -> it ran in this process
        self._current: str | None = None
        self._fraction = 0.0
        self._note = ""
        self._begin = self._printed = self._drawn = clock()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        self._begin = self._printed = self._clock()
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:3.0f}% [cyan]{task.fields[left]}"),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task(
                "starting", total=sum(self._weights.values()), left=self._left_text()
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def done(self) -> float:
        """Share of all expected work that is done, 0..1."""
        finished = sum(self._weights[name] for name in self._done)
        return (finished + self._running()) / sum(self._weights.values())

    @property
    def seconds_left(self) -> float:
        """Expected seconds to the end, by the pace of this process so far."""
        total = sum(self._weights.values())
        here = sum(self._weights[name] for name, ran in self._done.items() if ran)
        here += self._running()
        # The plan itself counts as a twentieth of the evidence, so that the first
        # compilation does not promise hours.
        trust = total / 20
        pace = (self._clock() - self._begin + trust) / (here + trust)
        return max(0.0, pace * (1 - self.done) * total)

    def start(self, stage: str) -> None:
        """Begins a stage; the one before it must be finished.

        Raises:
          ValueError: a stage that is not planned, done already, or too early.
        """
        if stage not in self._weights or stage in self._done:
            raise ValueError(f"stage {stage!r} is not among {self._open()}")
        if self._current is not None:
            raise ValueError(f"stage {self._current!r} is not finished")
        self._current, self._fraction, self._note = stage, 0.0, ""
        self._show(force=self._bar is not None)

    def update(self, fraction: float, note: str = "") -> None:
        """Sets how much of the current stage is done, 0..1, and a word about it."""
        self._fraction = min(max(fraction, 0.0), 1.0)
        self._note = note or self._note
        self._show()

    def finish(self) -> None:
        """Ends the current stage.

        Raises:
          ValueError: no stage runs.
        """
        if self._current is None:
            raise ValueError("no stage was started")
        self._done[self._current] = True
        self._note, self._fraction = "done", 0.0
        name, self._current = self._current, None
        self._show(name, force=True)

    def skip(self, stage: str) -> None:
        """Counts a stage as done that an earlier process finished.

        Raises:
          ValueError: a stage that is not planned, or done already.
        """
        if stage not in self._weights or stage in self._done:
            raise ValueError(f"stage {stage!r} is not among {self._open()}")
        self._done[stage] = False
        self._note = "done before"
        self._show(stage, force=True)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def _running(self) -> float:
        return self._fraction * self._weights[self._current] if self._current else 0.0

    def _open(self) -> list[str]:
        return [name for name in self._weights if name not in self._done]

    def _left_text(self) -> str:
        seconds = round(self.seconds_left)
        return f"{seconds // 60}:{seconds % 60:02d} left"

    def _show(self, stage: str | None = None, force: bool = False) -> None:
        name, now = stage or self._current or "", self._clock()
        if self._bar is not None:
            if force or now - self._drawn >= 0.1:
                self._drawn = now
                self._bar.update(
                    self._task,
                    completed=self.done * sum(self._weights.values()),
                    description=f"[bold]{name}[/] {self._note}",
                    left=self._left_text(),
                )
        elif force or now - self._printed >= self._interval:
            self._printed = now
            self.say(
                f"{100 * self.done:3.0f}%  {self._left_text()}  {name}  "
                f"{self._note}".rstrip()
            )


def make_console() -> Console:
    """Standard output; wide enough for a table where there is no terminal to ask."""
    return Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    console: Console | None = None,
) -> None:
    """Prints a table; the first column holds names, the others numbers.

    Raises:
      ValueError: a row with another number of cells than there are columns.
    """
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"row {list(row)} does not fit the columns {list(columns)}"
            )
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    (console or make_console()).print(table)
