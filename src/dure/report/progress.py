"""A progress bar for long work, on standard error.

On a terminal: bar, steps, loss, samples/s, time left. Elsewhere (a log file, CI): one plain line every few
seconds. The clock is given, because only a runtime reads one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_REFRESH_SECONDS = 0.1
_WINDOW_SECONDS = 5.0


class Progress:
    """Use as a context manager; call `update` as often as you like, it draws ten times a second at most.

    `clock` gives seconds that pass for the person who watches: `time.monotonic`, also for a virtual run.
    `every` is the number of seconds between plain lines where there is no terminal.
    """

    def __init__(
        self, description: str, *, clock: Callable[[], float], console: Console | None = None, every: float = 5.0
    ) -> None:
        self._description = description
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._bar = self._terminal_bar() if self._console.is_terminal else None
        self._task: TaskID | None = None
        self._period = _REFRESH_SECONDS if self._bar else every
        self._next = clock() if self._bar else clock() + every
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, step: int, total: int | None, loss: float | None, samples: int) -> None:
        """`step` of `total` (None where the end is unknown), the last `loss`, `samples` processed so far."""
        now = self._clock()
        if not self._seen:
            self._seen.append((now, samples))
        finished = total is not None and step >= total
        if now < self._next and not (finished and self._bar):
            return
        self._next = now + self._period
        speed = self._speed(now, samples)
        if self._bar:
            self._draw(step, total, _loss_text(loss), speed)
        else:
            of = f"/{total:,}" if total is not None else ""
            line = f"{self._description}: step {step:,}{of}, loss {_loss_text(loss)}, {speed}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.refresh()
            self._bar.stop()

    def _terminal_bar(self) -> Bar:
        return Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}", style="cyan"),
            TextColumn("{task.fields[speed]}", style="green"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            expand=True,
            get_time=self._clock,
        )

    def _draw(self, step: int, total: int | None, loss: str, speed: str) -> None:
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task(self._description, total=total, loss=loss, speed=speed)
        self._bar.update(self._task, completed=step, total=total, loss=loss, speed=speed)
        self._bar.refresh()

    def _speed(self, now: float, samples: int) -> str:
        """Samples per second over the last few seconds."""
        while len(self._seen) > 1 and self._seen[0][0] < now - _WINDOW_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        self._seen.append((now, samples))
        return f"{(samples - before) / (now - since):,.0f} samples/s" if now > since else "- samples/s"


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"
