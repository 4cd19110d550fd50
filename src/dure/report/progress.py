"""Shows the progress of long work on standard error, in 80 columns.

    ssp:bound=3 ps:shards=2 (virtual) ━━━━━━━━━━━━╸━━━━━━  45 %  loss 0.2381  7 s left

On a terminal the bar is drawn again and again; elsewhere (a log file, CI) a plain line is written every few seconds.
If an evaluation gives a mean return, the line shows it in place of the loss. After an evaluation, the line ends with
the seconds that evaluations took. The clock is a parameter, as only runtimes read clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from dure.core.text import printable

NAME = 22
"""Columns of the name of a run."""

_REFRESH_SECONDS = 0.1
_WINDOW_SECONDS = 5.0


class Progress:
    """A context manager that draws a progress line; `update` draws at most ten times a second.

    `name` with `place` after it is cut to NAME columns, so that it differs from the `others`. `clock` gives real
    seconds, also for a virtual run: `time.monotonic`. `every` is the number of seconds between plain lines, without a
    terminal.
    """

    evaluation_seconds: float
    """Seconds that evaluations have taken."""

    def __init__(
        self,
        name: str,
        place: str = "",
        *,
        others: Sequence[str] = (),
        clock: Callable[[], float],
        console: Console | None = None,
        every: float = 5.0,
    ) -> None:
        self.evaluation_seconds = 0.0
        self._name = f"{_cut_apart(printable(name), others, NAME - len(place))}{place}"
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._bar = self._terminal_bar() if self._console.is_terminal else None
        self._task: TaskID | None = None
        self._period = _REFRESH_SECONDS if self._bar else every
        self._next = clock() if self._bar else clock() + every
        self._seen: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None
        self._now: tuple[int, int | None, float | None] = (0, None, None)
        self._notice = ""
        self._return: float | None = None

    def update(self, step: int, total: int | None, loss: float | None, samples: int) -> None:
        """Show `step` of `total` (None if the end is unknown), the last `loss` and the `samples` so far."""
        now = self._clock()
        if not self._seen:
            self._seen.append((now, samples))
        self._first = self._first or (now, step)
        self._now = step, total, loss
        finished = total is not None and step >= total
        if now < self._next and not (finished and self._bar):
            return
        self._next = now + self._period
        speed = self._speed(now, samples)
        if self._bar:
            self._draw(self._left(now))
        else:
            parts = [_share(step, total), self._measured(loss), speed, self._left(now), self._evaluated()]
            self._print_line([*parts, self._notice])

    def returned(self, mean_return: float | None) -> None:
        """Show `mean_return` from now on: the mean return of the last evaluation. None has no effect."""
        self._return = self._return if mean_return is None else mean_return

    def notice(self, text: str) -> None:
        """Show `text` at the end of the line until the next call: the processes that a run waits for."""
        text = printable(text)
        if text == self._notice:
            return
        self._notice = text
        if self._bar:
            self._draw("")
        elif text:
            step, total, _ = self._now
            self._print_line([_share(step, total), text])

    def _print_line(self, parts: Sequence[str]) -> None:
        line = f"{self._name}: {', '.join(filter(None, parts))}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While open, seconds count as `evaluation_seconds`. It may be used on another thread."""
        began = self._clock()
        if self._bar:
            self._draw("evaluating")
        try:
            yield
        finally:
            self.evaluation_seconds += self._clock() - began

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            if self._task is not None:
                self._draw("")
            self._bar.stop()

    def _terminal_bar(self) -> Bar:
        fixed = Column(no_wrap=True)
        return Bar(
            TextColumn("{task.description}", markup=False, table_column=fixed),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False, style="cyan", table_column=fixed),
            console=self._console,
            auto_refresh=False,
            expand=True,
            get_time=self._clock,
        )

    def _draw(self, doing: str) -> None:
        assert self._bar is not None
        step, total, loss = self._now
        parts = [_share(step, total), self._measured(loss), doing, self._evaluated(), self._notice]
        state = "  ".join(filter(None, parts))
        if self._task is None:
            self._task = self._bar.add_task(self._name, total=total, state=state)
        self._bar.update(self._task, completed=step, total=total, state=state)
        self._bar.refresh()

    def _left(self, now: float) -> str:
        """Seconds until the last step, at the mean speed so far."""
        step, total, _ = self._now
        if total is None or self._first is None or step <= self._first[1]:
            return ""
        since, before = self._first
        return f"{_seconds_text((now - since) / (step - before) * max(0, total - step))} left"

    def _measured(self, loss: float | None) -> str:
        return f"loss {_number_text(loss)}" if self._return is None else f"return {_number_text(self._return)}"

    def _evaluated(self) -> str:
        return f"eval {_seconds_text(self.evaluation_seconds)}" if self.evaluation_seconds >= 1 else ""

    def _speed(self, now: float, samples: int) -> str:
        """Samples per second over the last few seconds."""
        while len(self._seen) > 1 and self._seen[0][0] < now - _WINDOW_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        self._seen.append((now, samples))
        return f"{_count_text((samples - before) / (now - since))}/s" if now > since else "-/s"


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}\N{HORIZONTAL ELLIPSIS}"


def _cut_apart(text: str, others: Sequence[str], columns: int) -> str:
    """`text` in so many columns, with the letters in which it differs from `others`: cut in the middle if need be.

    >>> _cut_apart("averaging:period=8", ["bsp", "averaging:period=16"], 12)
    'ave…period=8'
    """
    shared = max((_shared(text, other) for other in others if other != text), default=0)
    if len(text) <= columns or shared < columns - 1:
        return _cut(text, columns)
    head = columns // 4
    rest = columns - head - 1
    return f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{_cut(text[min(shared - 1, len(text) - rest) :], rest)}"


def _shared(one: str, other: str) -> int:
    """The letters that two different texts share at their beginning."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _share(step: int, total: int | None) -> str:
    return f"step {step:,}" if total is None else f"{100 * step // max(total, 1):3d} %"


def _seconds_text(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"


def _count_text(count: float) -> str:
    return f"{count:,.0f}" if count < 1e5 else f"{count / 1e3:,.0f}k"


def _number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
