"""Draws a synchronization method over time: as text for the terminal, and in color as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.cli.drawing import file_of
from dure.errors import UsageError
from dure.report.files import replacing
from dure.report.time_drawing import COMPUTE, TimePicture, svg, text
from dure.run.method_picture import picture_of
from dure.run.strategy import Strategy, by_axis

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


@dataclass(frozen=True)
class TimeDrawing:
    """A picture of a method over time, and the file that it is written to."""

    picture: TimePicture
    path: Path

    @property
    def row(self) -> dict[str, Any]:
        """The computations of the picture, for JSON: of each worker the step, the version read, start and end."""
        return {
            "method": self.picture.title,
            "picture": str(self.path),
            "time": "virtual",
            "seconds": self.picture.seconds,
            "workers": {
                name: [
                    {"step": cell.step, "version": cell.version, "start": cell.start, "end": cell.end}
                    for cell in cells
                    if cell.kind == COMPUTE
                ]
                for name, cells in self.picture.rows.items()
            },
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(text(self.picture, options.max_width), no_wrap=True)


def is_method(name: str) -> bool:
    """Whether `name` is the text of a strategy with a method, not of a partition alone. Raises `StrategyError`."""
    return bool(name) and "sync" in by_axis(name)


def draw_method(name: str, files: Sequence[Path]) -> TimeDrawing:
    """Draw the method of the strategy `name` into the file of `files`, NAME.svg if there is none.

    Raises `UsageError` for a strategy that does not run, and for a file that cannot be written.
    """
    partition = by_axis(name).get("partition")
    if partition is not None:
        raise UsageError(
            f"a method is drawn without a partition, and {partition} is one: leave it out, or draw it alone, as in "
            f"dure methods {partition} --draw."
        )
    path = file_of(name, files)
    drawing = TimeDrawing(picture_of(Strategy.parse(name), name), path)
    with replacing(path) as file:
        file.write(svg(drawing.picture))
    return drawing


def shown_method(drawing: TimeDrawing) -> list[RenderableType]:
    """The rows of all nodes as text, and how to read them."""
    from rich.text import Text

    read = "=: computes; 3/5 is step 3, after version 5 of the servers' weights; x: a computation in vain. "
    return [
        Text(f"{drawing.picture.title}: {drawing.picture.about}", style="bold"),
        drawing,
        Text(f"{read}~: {drawing.picture.communication}. A dot: waits."),
        Text(f"In color: {drawing.path}"),
    ]
