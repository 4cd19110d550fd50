"""The table and the text of `dure plan`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dure.core.packages import import_extra
from dure.planner.candidates import ONE, PLAIN
from dure.report.labels import NOTHING, bytes_text, samples_text, seconds_text
from dure.run.emit import launch_of
from dure.run.emit_targets import emitted

if TYPE_CHECKING:
    from dure.planner.options import PlanOptions
    from dure.run.emit import Emission

SHOWN = 10
"""Strategies in the table."""


def advice(options: PlanOptions, emission: Emission) -> tuple[dict[str, Any], Sequence[Any], str]:
    """Plan; return the values, the text and table for people, and a line about the page.

    With `emission.emit` the text for people is the one that starts the best strategy, and the answer is in the line.
    """
    from dure.planner.plan import planned

    if options.report is not None:
        import_extra("report", "the page of a plan")
    progress = PlanProgress()
    try:
        found = planned(options, say=progress)
        values = found.values()
    finally:
        progress.end()
    said = ""
    if options.report is not None:
        from dure.report.plan_page import write_plan_page

        said = f"page: {write_plan_page(options.report, values)}"
    if emission.emit is not None:
        command = found.commands[found.strategy]
        text = emitted(emission.emit, launch_of(emission.emit, command.config, command.ranks, emission.image))
        return {**values, "emitted": text}, [text], "\n".join(filter(None, [*sentences(values), said]))
    return values, [answer(values), table(values), ending(values)], said


EVERY = 5.0
"""Seconds between two lines of progress without a terminal."""


class PlanProgress:
    """The part of the planning that is under way, on standard error: one line on a terminal, lines elsewhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + EVERY
        self._terminal = sys.stderr.isatty()

    def __call__(self, part: str, done: int, of: int | None) -> None:
        text = part if of is None else f"{done + 1} of {of}: {part}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text[:79]}")
            sys.stderr.flush()
        elif self._clock() > self._next:
            self._next = self._clock() + EVERY
            sys.stderr.write(f"{text}\n")

    def end(self) -> None:
        """Remove the line from a terminal."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


def answer(values: dict[str, Any]) -> str:
    """The answer in sentences, and its command."""
    return "\n".join([*sentences(values), "", f"  {values['answer']['command']}", ""]) + "\n"


def sentences(values: dict[str, Any]) -> list[str]:
    """The best strategy and the reasons for it."""
    found = values["answer"]
    head = (
        f"Plain data parallelism (DDP) is the best {'of those timed' if values['left'] else 'choice here'}."
        if found["plain_ddp"]
        else f"The best choice here: {found['strategy']}"
    )
    return [head, *found["why"]]


def table(values: dict[str, Any]) -> Any:
    """The strategies, the best first, with plain data parallelism and one machine, to which they are compared."""
    from rich.table import Table

    rows = values["rows"]
    priced, timed = (any(row[key] is not None for row in rows) for key in ("cost_per_hour", "seconds_to_target"))
    shown = Table(box=None, pad_edge=False)
    heads = [
        "",
        "strategy",
        "batch",
        "step",
        "samples/s",
        "x samples",
        "memory",
        "sent/step",
        "bottleneck",
    ]
    heads += ["to target"] * timed + ["cost/h"] * priced
    for head in heads:
        shown.add_column(
            head,
            justify="left" if head in ("strategy", "bottleneck") else "right",
            no_wrap=head != "strategy",
            overflow="fold",  # a name that is cut is the name of several strategies
        )
    for row in [*rows[:SHOWN], *(row for row in rows[SHOWN:] if row["strategy"] in (ONE, PLAIN))]:
        cells = [
            str(row["rank"]),
            row["strategy"] + (f" (+{row['servers']} machines)" if row["servers"] else ""),
            str(row["batch"]),
            seconds_text(row["seconds_per_step"]),
            samples_text(row["samples_per_second"]),
            f"{row['factor']:.2f}",
            bytes_text(sum(row["memory"].values())),
            bytes_text(row["bytes_per_step"]),
            row["bottleneck"] or NOTHING,
        ]
        cells += [seconds_text(row["seconds_to_target"])] * timed
        cells += ["" if row["cost_per_hour"] is None else f"{row['cost_per_hour']:.2f}"] * priced
        shown.add_row(*cells)
    return shown


def ending(values: dict[str, Any]) -> str:
    """The text below the table: changes that would change the ranking, and the strategies that the table leaves out."""
    lines = [""]
    rest = len(values["rows"]) - SHOWN
    if rest > 0:
        refused = len(values["refused"])
        lines.append(
            f"{rest} more {'strategy was' if rest == 1 else 'strategies were'} timed, and "
            f"{refused} {'does' if refused == 1 else 'do'} not work here; --json lists them."
        )
    if values["answer"]["would_change"]:
        lines += ["What would change the answer:", *(f"  {each}" for each in values["answer"]["would_change"])]
    if values["open"]:
        lines += [*values["open"]["said"], ""]
    lines.append(
        f"Seconds are predicted, in virtual time, for {values['cluster']}: {values['machines']}; with "
        f"{values['batch']} samples in a step of all workers. `{ONE}` is the fastest machine alone. `x samples` is the "
        "assumed number of samples for equal learning; `memory` and `sent/step` are those of one worker: "
        f"the largest memory, with the state of {values['optimizer']}, and the mean of the bytes. The bottleneck of "
        f"the best of each kind is looked for while time lasts; {NOTHING} stands for the others."
    )
    lines.append(values["basis"])
    if values["answer"]["ddp_script"]:
        lines += ["", values["answer"]["ddp_script"].rstrip()]
    return "\n".join(lines) + "\n"
