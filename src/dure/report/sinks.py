"""Destinations of a run's history besides its folder, written while the run goes on.

| sink          | needs         |
|---------------|---------------|
| `JsonLines`   | nothing       |
| `TensorBoard` | `tensorboard` |

A row is a mapping such as `{"seconds": 1.5, "step": 20, "updates": 40, "samples": 640, "loss": 0.4, "accuracy": 0.9,
"bytes": 8192}`. A row of reinforcement learning has a mean return, and figures of actors and replays. A value may be
None.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dure.core.packages import import_extra
from dure.report.files import AppendedFile, to_json


class Sink(Protocol):
    """Writes rows. After `write` has returned, a kill of this process does not lose the row.

    Both methods raise OSError if the disk has no room for all rows so far; a later `write` tries again.
    """

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends one line for each row to `path`, after its last complete line, and flushes it."""

    def __init__(self, path: str | Path) -> None:
        self._file = AppendedFile(Path(path))
        _drop_torn_line(Path(path))

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.append(to_json(row).encode("utf-8") + b"\n")

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class TensorBoard:
    """Writes TensorBoard events to `folder`: each number of a row under its name, by step.

    The time of an event is the `seconds` of the run (virtual or real), so that the axis "relative" of TensorBoard shows
    the time of the report. Values that are no numbers are left out.
    """

    def __init__(self, folder: str | Path) -> None:
        import_extra("tensorboard", f"TensorBoard, asked for in {folder},")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._records = Event, Summary, RecordWriter
        Path(folder).mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in Path(folder).iterdir())  # a run that is resumed has events already
        self._file = AppendedFile(Path(folder) / f"events.out.tfevents.{number:010d}.{os.getpid()}")
        self._begun = False

    def write(self, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name not in ("step", "seconds") and isinstance(value, (int, float))
        ]
        if not self._begun:
            self._begun = True
            self._append(self._event(wall_time=row["seconds"], file_version="brain.Event:2"))
        self._append(self._event(wall_time=row["seconds"], step=row["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        record = io.BytesIO()  # `torch.utils.tensorboard` writes from a thread, where a full disk ends the thread
        self._records(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
