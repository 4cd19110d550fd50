"""Where a run's history may go while it runs, besides its own folder.

| sink          | needs         |
|---------------|---------------|
| `JsonLines`   | nothing       |
| `TensorBoard` | `tensorboard` |

A row is a mapping such as `{"seconds": 1.5, "step": 20, "updates": 40, "samples": 640, "loss": 0.4, "accuracy": 0.9,
"bytes": 8192}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dure.errors import UsageError
from dure.report.files import to_json


class Sink(Protocol):
    """Takes rows as they come. After `write` returned, a kill of this process does not lose the row."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One row per line, flushed line by line. Appends to `path` after its last whole line."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("ab")  # noqa: SIM115  (open for as long as the run)
        _drop_torn_line(Path(path))

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(to_json(row).encode("utf-8") + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


class TensorBoard:
    """TensorBoard events in `folder`: each number of a row under its own name, by step.

    An event's time is the run's own `seconds` (virtual or real), so that TensorBoard's "relative" axis shows
    the time that the report shows. Values that are None are left out.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"TensorBoard events were asked for in {folder}, but the package 'tensorboard' cannot be imported "
                f"({error}). Install it: pip install 'dure[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in ("step", "seconds") and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"], walltime=row["seconds"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
