"""Search of a plan: candidates, timed in the order of their lower bounds, within a number of seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dure.errors import DureError
from dure.job.initial_model import is_on_meta
from dure.partition.mesh import zero_of
from dure.planner.bound import least_seconds
from dure.planner.candidates import (
    ONE,
    PLAIN,
    Scene,
    Shape,
    crossed,
    narrow,
    on_servers,
    plain,
    roomy,
    shape_of,
    sharded_more,
    single,
    wide,
)
from dure.planner.ranking import Ranked, in_order, ranked
from dure.planner.side_by_side import Deadline, timings
from dure.planner.timing import setup_in, timed
from dure.run.memory import NO_ROOM
from dure.run.strategy import Strategy, by_axis
from dure.runtime.virtual.cluster import Cluster

Notify = Callable[[int, int | None, str], None]
"""Receives the number of timed candidates, the number of all (None: not known yet) and the strategy that is timed."""

BEST = 2
"""Partitions, methods and codecs of step 1 that are crossed in step 4."""

AXES = ("partition", "sync", "codec")


SHARE = 0.25
"""Share of the seconds that are left, after which a timing gives way to the others."""

LEAST = 5.0
"""Seconds of plain data parallelism at least, so that a short plan has an answer, too."""


@dataclass(slots=True)
class Found:
    """The result of a search: the timed strategies in the order of rank, the refused ones with the reason.

    `order` has the candidates, the simplest first. `left` are those that were not timed, as the seconds were over, with
    the least seconds of a step.
    """

    rows: list[Ranked] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)

    @property
    def of_all(self) -> list[Ranked]:
        """The timed strategies of all workers in the order of rank: all but one machine."""
        return in_order(sorted((row for row in self.rows if row.strategy != ONE), key=self._simplicity))

    @property
    def has_answer(self) -> bool:
        """Whether the first is an answer: one machine is none while others could be better, and none was timed."""
        return bool(self.rows) and (self.rows[0].strategy != ONE or len(self.rows) > 1 or not self.left)

    @property
    def ranked(self) -> list[Ranked]:
        """The timed strategies in the order of rank."""
        return in_order(sorted(self.rows, key=self._simplicity))

    def _simplicity(self, row: Ranked) -> int:
        return self.order.index(row.strategy)


def search(scene: Scene, deadline: Deadline, notify: Notify = lambda done, of, strategy: None) -> Found:
    """Time the candidates of `scene` before the deadline: one machine, plain data parallelism, others by lower bound.

    Each has a share of the seconds that are left. Those that need more are timed last, with all that is left then.
    """
    found = Found()
    shape = shape_of(scene)
    _prepare(scene)
    if not _holds_whole(scene):
        _step(scene, roomy(shape), deadline, 1.0, found, notify)
    first = Deadline(max(LEAST, SHARE * (math.inf if deadline.left is None else deadline.left)))
    if scene.workers > 1:
        _step(scene, [ONE], first, 1.0, found, notify)
    _step(scene, plain(shape), first, 1.0, found, notify)
    _measure_blocks(scene, shape, first)
    steps: Sequence[Callable[[], Iterable[str]]] = (
        lambda: single(shape),
        lambda: sharded_more([each for each, reason in found.refused.items() if NO_ROOM in reason]),
        lambda: on_servers(_servers_of(found, PLAIN), _servers_of(found, "downpour"), shape),
        lambda: crossed(*_best(found)),
        lambda: () if found.of_all or found.left else (*_fitting(scene, shape, deadline), *wide(shape)),
    )
    for made in steps:
        _step(scene, made(), deadline, SHARE, found, notify)
    _time(scene, list(found.left), deadline, 1.0, found, notify)
    found.rows = found.ranked
    return found


def _holds_whole(scene: Scene) -> bool:
    """Whether a worker has memory for the weights and the gradient of the whole model."""
    limits = [scene.cluster.memory_of(worker) for worker in range(scene.workers)]
    needed = 2 * scene.model.replica.params.nbytes
    return any(limit is None or limit >= needed for limit in limits)


FITTING = 6
"""Pipelines of small micro-batches that are timed: the first that fit into memory."""


def _fitting(scene: Scene, shape: Shape, deadline: Deadline) -> Iterator[str]:
    """The first of the `narrow` candidates that fit into memory, from large micro-batches to small ones."""
    left = FITTING
    for strategy in reversed([*narrow(shape)]):
        if deadline.over or not left:
            return
        with suppress(DureError):
            setup_in(scene, strategy)
            left -= 1
            yield strategy


def _prepare(scene: Scene) -> None:
    """Import what timings import, and measure the model: the processes of timings inherit both."""
    with suppress(DureError):
        timed(scene.on(Cluster.uniform(2)), PLAIN)


def _measure_blocks(scene: Scene, shape: Shape, deadline: Deadline) -> None:
    """Measure the blocks of a large model for the processes of all pipelines, one of which may have too little time."""
    pipeline = next((each for each in single(shape) if "partition" in by_axis(each) and not _is_sharded(each)), None)
    if pipeline is not None and is_on_meta(scene.job):
        _ = list(timings([scene], [(0, pipeline)], deadline))  # the figures of the model are in `scene` then


def _step(
    scene: Scene, strategies: Iterable[str], deadline: Deadline, share: float, found: Found, notify: Notify
) -> None:
    """Time those of `strategies` that are new."""
    new = [each for each in dict.fromkeys(strategies) if each not in found.order]
    found.order += new
    found.left |= {each: _bound(scene, each) for each in new}
    _time(scene, new, deadline, share, found, notify)


def _bound(scene: Scene, strategy: str) -> float:
    try:
        return least_seconds(scene, strategy)
    except DureError:  # a strategy that does not work, as its timing will say
        return 0.0


def _time(
    scene: Scene, strategies: Sequence[str], deadline: Deadline, share: float, found: Found, notify: Notify
) -> None:
    ordered = sorted(strategies, key=found.left.__getitem__)
    wanted = [(0, each) for each in ordered]
    for each in ordered[:1]:
        notify(0, len(ordered), each)
    for number, ((_, strategy), timing) in enumerate(timings([scene], wanted, deadline, share), start=1):
        for each in ordered[number : number + 1]:
            notify(number, len(ordered), each)
        if isinstance(timing, float):
            found.left[strategy] = max(timing, found.left[strategy])
            continue
        del found.left[strategy]
        if isinstance(timing, str):
            found.refused[strategy] = timing
        else:
            found.rows.append(ranked(strategy, timing, scene))


def _servers_of(found: Found, method: str) -> str | None:
    """The layout of servers that is best for `method`."""
    starts = f"{method} ps"
    best = next((row.strategy for row in found.ranked if row.strategy.startswith(starts)), None)
    return None if best is None else best.removeprefix(f"{method} ")


def _is_sharded(strategy: str) -> bool:
    return zero_of(Strategy.parse(strategy).partition) is not None


def _best(found: Found) -> tuple[list[str], list[str], list[str]]:
    """The best partitions, methods and codecs of step 1, which differ from plain data parallelism on one axis."""
    best: Mapping[str, list[str]] = {axis: [] for axis in AXES}
    for row in found.ranked:
        if row.strategy == ONE or _is_sharded(row.strategy):  # neither methods nor codecs join shards
            continue
        members = by_axis(row.strategy)
        axis = next((each for each in AXES if members.get(each, PLAIN) != PLAIN), None)
        if axis is not None and len(best[axis]) < BEST:
            best[axis].append(row.strategy)
    return best["partition"], best["sync"], best["codec"]
