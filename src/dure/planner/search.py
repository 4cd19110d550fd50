"""Search of a plan: candidates, timed one after another within a number of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dure.planner.candidates import PLAIN, crossed, on_servers, shape_of, single, wide
from dure.planner.deadline import NEVER, Deadline
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.scene import Scene
from dure.planner.side_by_side import timings
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


def search(scene: Scene, deadline: Deadline, notify: Notify = lambda done, of, strategy: None) -> Found:
    """Time the candidates of `scene` before the deadline; after it, only until one works.

    Plain data parallelism is always timed.
    """
    found = Found()
    shape = shape_of(scene)
    _time(scene, [PLAIN], NEVER, found, notify)
    steps: Sequence[Callable[[], Iterable[str]]] = (
        lambda: single(shape),
        lambda: on_servers(_servers_of(found, PLAIN), _servers_of(found, "downpour"), shape),
        lambda: crossed(*_best(found)),
        lambda: () if found.rows else wide(shape),
    )
    for made in steps:
        new = [each for each in dict.fromkeys(made()) if each not in found.order]
        _time(scene, new, deadline, found, notify)
    _until_one_works(scene, found, notify)
    found.rows = in_order(found.rows)
    return found


def _time(scene: Scene, strategies: Sequence[str], deadline: Deadline, found: Found, notify: Notify) -> None:
    found.order += [each for each in strategies if each not in found.order]
    wanted = [(0, each) for each in strategies]
    for each in strategies[:1]:
        notify(0, len(strategies), each)
    for number, ((_, strategy), timing) in enumerate(timings([scene], wanted, deadline), start=1):
        for each in strategies[number : number + 1]:
            notify(number, len(strategies), each)
        if timing is None:
            found.left.append(strategy)
        elif isinstance(timing, str):
            found.refused[strategy] = timing
        else:
            found.rows.append(ranked(strategy, timing, scene.batch))


def _until_one_works(scene: Scene, found: Found, notify: Notify) -> None:
    while found.left and not found.rows:
        _time(scene, [found.left.pop(0)], NEVER, found, notify)


def _servers_of(found: Found, method: str) -> str | None:
    """The layout of servers that is best for `method`."""
    starts = f"{method} ps"
    best = next((row.strategy for row in in_order(found.rows) if row.strategy.startswith(starts)), None)
    return None if best is None else best.removeprefix(f"{method} ")


def _best(found: Found) -> tuple[list[str], list[str], list[str]]:
    """The best partitions, methods and codecs of step 1, which differ from plain data parallelism on one axis."""
    best: Mapping[str, list[str]] = {axis: [] for axis in AXES}
    for row in in_order(found.rows):
        members = by_axis(row.strategy)
        axis = next((each for each in AXES if members.get(each, PLAIN) != PLAIN), None)
        if axis is not None and len(best[axis]) < BEST:
            best[axis].append(row.strategy)
    return best["partition"], best["sync"], best["codec"]
