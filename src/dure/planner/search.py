"""Search of a plan: candidates, timed one after another within a number of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dure.errors import DureError
from dure.planner.candidates import PLAIN, crossed, shape_of, single
from dure.planner.deadline import Deadline
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.scene import Scene
from dure.planner.timing import timed
from dure.run.strategy import by_axis

Notify = Callable[[int, int | None, str], None]
"""Receives the number of timed candidates, the number of all (None: not known yet) and the strategy that is timed."""

BEST = 2
"""Partitions, methods and codecs of step 1 that are crossed in step 2."""

AXES = ("partition", "sync", "codec")


@dataclass(slots=True)
class Found:
    """The result of a search: the timed strategies in the order of rank, the refused ones with the reason.

    `order` has the candidates, the simplest first. `left` are those that were not timed, as the seconds were over.
    """

    rows: list[Ranked] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def search(scene: Scene, seconds: float, notify: Notify = lambda done, of, strategy: None) -> Found:
    """Time the candidates of `scene`; plain data parallelism always, others while fewer than `seconds` have passed."""
    deadline = Deadline(seconds)
    found = Found()
    first = list(single(shape_of(scene)))
    _time(scene, first, deadline, found, notify)
    second = [each for each in crossed(*_best(found)) if each not in first]
    _time(scene, second, deadline, found, notify)
    found.rows = in_order(found.rows)
    return found


def _time(scene: Scene, strategies: Iterable[str], deadline: Deadline, found: Found, notify: Notify) -> None:
    strategies = list(dict.fromkeys(strategies))
    found.order += strategies
    for number, strategy in enumerate(strategies):
        if deadline.over and strategy != PLAIN:
            found.left.append(strategy)
            continue
        notify(number, len(strategies), strategy)
        try:
            found.rows.append(ranked(strategy, timed(scene, strategy), scene.batch))
        except DureError as error:
            found.refused[strategy] = str(error)


def _best(found: Found) -> tuple[list[str], list[str], list[str]]:
    """The best partitions, methods and codecs of step 1, which differ from plain data parallelism on one axis."""
    best: Mapping[str, list[str]] = {axis: [] for axis in AXES}
    for row in in_order(found.rows):
        members = by_axis(row.strategy)
        axis = next((each for each in AXES if members.get(each, PLAIN) != PLAIN), None)
        if axis is not None and len(best[axis]) < BEST:
            best[axis].append(row.strategy)
    return best["partition"], best["sync"], best["codec"]
