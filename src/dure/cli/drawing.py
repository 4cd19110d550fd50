"""Draws the timetable of a pipeline: as text for the terminal, and in color as an SVG file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.regular_file import check_output
from dure.errors import UsageError
from dure.partition.drawing import Picture, svg, text
from dure.partition.mesh import Mesh
from dure.partition.pipeline import Pipeline
from dure.report.files import replacing
from dure.run.strategy import make

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table


@dataclass(frozen=True)
class Drawn:
    """A picture that is written to `path`."""

    picture: Picture
    path: Path

    @property
    def row(self) -> dict[str, Any]:
        """The figures of the picture, for JSON."""
        table = self.picture.timetable
        return {
            "partition": self.picture.title,
            "picture": str(self.path),
            "ticks": table.makespan,
            "bubble": table.bubble,
            "workers": [
                {
                    "stages": self.picture.stages_of(rank),
                    "idle": table.idle(rank) / table.makespan,
                    "most_sets": table.most_sets(rank),
                    "most_versions": self.picture.weights[rank].most_versions,
                    "staleness": self.picture.staleness(rank),
                }
                for rank in range(len(table.workers))
            ],
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(text(self.picture, options.max_width), no_wrap=True)


def draw(name: str, files: Sequence[Path]) -> Drawn:
    """Draw the partition `name` into the file of `files`, NAME.svg if there is none; of a mesh, its pipeline.

    Raises `UsageError` for a name that is no pipeline, and for a file that cannot be written.
    """
    if not name:
        raise UsageError("--draw needs a method or a partition before it, as in dure methods ssp --draw FILE.svg.")
    made = make(name, "partition")
    pipeline = made.pipeline if isinstance(made, Mesh) else made
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"{name} makes no stages, and a drawing shows stages: draw pipedream, for example.")
    path = file_of(name, files)
    drawn = Drawn(Picture.of(pipeline, name), path)
    with replacing(path) as file:
        file.write(svg(drawn.picture))
    return drawn


def file_of(name: str, files: Sequence[Path]) -> Path:
    """The file of `files`, or NAME.svg. Raises `UsageError` for several files, and for one that cannot be written."""
    if len(files) > 1:
        raise UsageError(f"--draw writes one file, and {len(files)} are named: {', '.join(map(str, files))}.")
    path = files[0] if files else Path(f"{re.split('[: ]', name)[0]}.svg")
    check_output(path)
    return path


def shown(drawn: Drawn) -> list[RenderableType]:
    """The timetable as text, and the figures of each worker as a table."""
    from rich.text import Text

    counted = f"{drawn.picture.counted}es"
    on = f", and {counted} count on over the mini-batches" if drawn.picture.pipeline.micro_batches > 1 else ""
    caption = f"Stages and {counted} count from 1{on}; a dot is idle."
    return [
        Text(f"{drawn.picture.title}: {drawn.picture.bubble}", style="bold"),
        drawn,
        Text(caption),
        _figures(drawn.row),
        Text(f"In color: {drawn.path}"),
    ]


def _figures(row: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("worker", "stages", "idle", "in flight", "versions", "staleness"):
        shown.add_column(heading, justify="right")
    for rank, each in enumerate(row["workers"]):
        figures = (str(each[name]) for name in ("most_sets", "most_versions", "staleness"))
        shown.add_row(str(rank), ", ".join(map(str, each["stages"])), f"{each['idle']:.0%}", *figures)
    return shown
