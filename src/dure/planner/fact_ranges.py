"""The range of a plan's answer over the facts that the cluster leaves open, and the facts on which the answer depends.

The answer, plain data parallelism, one machine and the next best are timed again with each other value of each fact
alone (`open_facts`). Then those values that make the answer slowest are taken together, and those that make it fastest;
so it is with plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.core.spec_text import machines_in_line
from dure.planner.candidates import PLAIN, Scene
from dure.planner.open_facts import ClusterFact, extremes, open_facts
from dure.planner.ranking import Ranked, in_order, ranked, retimed
from dure.planner.side_by_side import Deadline, timings
from dure.planner.timing import Timing
from dure.report.labels import samples_text, seconds_text

if TYPE_CHECKING:
    from dure.planner.search import Found
    from dure.runtime.virtual.cluster import Cluster

Point = tuple[tuple[str, str], ...]
"""Facts by their names, with their values in words: the other facts have the assumed values."""

ALONE = 0.75
"""Share of the seconds for values alone. The rest is for those that are taken together."""


@dataclass(frozen=True, slots=True)
class FactRanges:
    """The figures of strategies at values of the `facts`. `rows` has the timed ones of each point.

    The first point has the assumed values. `first` has the strategy of the first rank at the points at which all were
    timed. `complete`: whether the seconds sufficed for all points.
    """

    facts: Sequence[ClusterFact]
    rows: Mapping[Point, Sequence[Ranked]]
    first: Mapping[Point, str]
    complete: bool

    @property
    def best(self) -> str:
        """The answer of the plan."""
        return self.first[()]

    @property
    def timed(self) -> list[str]:
        """The strategies, the answer first."""
        return [row.strategy for row in self.rows[()]]

    def samples(self, strategy: str, fact: str = "") -> tuple[float, float]:
        """The least and most samples per second of a strategy, with all values or those of one fact alone."""
        found = [
            row.timing.samples_per_second
            for point, rows in self.rows.items()
            if not fact or not point or [name for name, _ in point] == [fact]
            for row in rows
            if row.strategy == strategy
        ]
        return min(found), max(found)

    def width(self, fact: ClusterFact) -> float:
        """By what share a fact alone changes the answer's samples per second, from the least to the most."""
        low, high = self.samples(self.best, fact.name)
        return high / low - 1

    def by_effect(self) -> list[ClusterFact]:
        """The facts, that which changes the answer most first."""
        return sorted(self.facts, key=lambda fact: -self.width(fact))

    def others(self) -> dict[str, list[Point]]:
        """The strategies that are first at other points, with these; values together only where none alone do."""
        found: dict[str, list[Point]] = {}
        for point, first in sorted(self.first.items(), key=lambda pair: len(pair[0])):
            if first != self.best and (len(point) == 1 or first not in found):
                found.setdefault(first, []).append(point)
        return found

    def values(self, on: str) -> dict[str, Any]:
        """The ranges as plain values, with the sentences about them. `on` names the cluster."""
        return {
            "said": said(self, on),
            "ranges": [
                {"strategy": name, "samples_per_second": self.samples(name), "seconds_per_step": _steps(self, name)}
                for name in _shown(self)
            ],
            "facts": [
                {
                    "fact": fact.name,
                    "key": fact.key,
                    "assumed": fact.assumed,
                    "values": [*fact.values],
                    "state": fact.state,
                    "samples_per_second": self.samples(self.best, fact.name),
                }
                for fact in self.by_effect()
            ],
            "answers": [
                {"strategy": strategy, "values": [dict(point) for point in points]}
                for strategy, points in self.others().items()
            ],
            "timed": self.timed,
            "complete": self.complete,
        }


def _shown(found: FactRanges) -> list[str]:
    """The answer, and plain data parallelism."""
    return [name for name in found.timed if name in (found.best, PLAIN)]


def _steps(found: FactRanges, strategy: str) -> tuple[float, float]:
    """The least and most seconds of a step."""
    timing = next(row.timing for row in found.rows[()] if row.strategy == strategy)
    batch = timing.seconds * timing.samples_per_second
    low, high = found.samples(strategy)
    return batch / high, batch / low


def fact_ranges(
    scene: Scene,
    search: Found,
    rows: Sequence[Ranked],
    deadline: Deadline,
    say: Callable[[str, int, int | None], None] = lambda *_: None,
) -> FactRanges | None:
    """Time `rows`, the first of which is the answer, over the facts that the cluster leaves open; None without any."""
    facts = open_facts(scene.cluster)
    if not facts:
        return None
    say("timing over the facts that the cluster leaves open", 0, None)
    trials = _Trials(scene, search, rows, {fact.name: fact for fact in facts})
    alone: list[Point] = [((fact.name, words),) for fact in facts for words in fact.values]
    complete = trials.time(alone, deadline.part(ALONE))
    ends = [end for row in rows if row.strategy in (rows[0].strategy, PLAIN) for end in trials.ends(row)]
    together = [end for end in dict.fromkeys(ends) if end not in trials.rows]
    complete = trials.time(together, deadline) and complete
    return FactRanges(facts, trials.rows, trials.first, complete)


class _Trials:
    """Timings at points: the rows of each, and the strategy that is first where all were timed."""

    def __init__(self, scene: Scene, search: Found, rows: Sequence[Ranked], facts: Mapping[str, ClusterFact]) -> None:
        self._scene = scene
        self._order = search.order
        self._facts = facts
        self.rows: dict[Point, Sequence[Ranked]] = {(): rows}
        self.first: dict[Point, str] = {(): rows[0].strategy}

    def time(self, points: Sequence[Point], deadline: Deadline) -> bool:
        """Time all strategies at `points`, the answer at all of them first. False if the seconds did not suffice."""
        rows, scenes = self.rows[()], [self._scene.on(self._at(point)) for point in points]
        wanted = [(number, row.strategy) for row in rows for number in range(len(points))]
        found = dict(timings(scenes, wanted, deadline))
        missed = {number for (number, _), timing in found.items() if isinstance(timing, float)}
        for number, point in enumerate(points):
            timed = [(row, found[number, row.strategy]) for row in rows]
            again = [
                retimed(row, ranked(row.strategy, timing, scenes[number]))
                for row, timing in timed
                if isinstance(timing, Timing)
            ]
            self.rows[point] = again
            if again and number not in missed:
                simplest = sorted(again, key=lambda row: self._order.index(row.strategy))
                self.first[point] = in_order(simplest)[0].strategy
        return not missed

    def ends(self, row: Ranked) -> list[Point]:
        """The values that make a strategy slowest together, and those that make it fastest."""
        tried = {name: [*self._alone(name, row.strategy)] for name in self._facts}
        assumed = row.timing.samples_per_second
        lowest, highest, _ = extremes(assumed, {name: pairs for name, pairs in tried.items() if pairs})
        return [tuple(values.items()) for values in (lowest, highest) if values]

    def _alone(self, name: str, strategy: str) -> Iterable[tuple[float, str]]:
        for words in self._facts[name].values:
            for row in self.rows.get(((name, words),), ()):
                if row.strategy == strategy:
                    yield row.timing.samples_per_second, words

    def _at(self, point: Point) -> Cluster:
        cluster = self._scene.cluster
        for name, words in point:
            cluster = self._facts[name].values[words](cluster)
        return cluster


# ---- in words


LEAST = 0.01
"""Width from which on a fact is told."""


def said(found: FactRanges, on: str) -> list[str]:
    """Sentences: the range of the answer, the facts that would narrow it, and the values with other answers."""
    if not any(rows for point, rows in found.rows.items() if point):
        names = ", ".join(fact.name for fact in found.facts)
        return [f"The cluster leaves facts open ({names}), and the seconds did not suffice for their values: {MORE}."]
    lines = [f"The cluster leaves facts open, so {'; '.join(_range(found, name) for name in _shown(found))}."]
    told = [fact for fact in found.by_effect() if found.width(fact) >= LEAST]
    lines += [f"Most of that is {fact.name}: {_alone(found, fact)}. {_how(fact, on)}" for fact in told[:1]]
    less = "; ".join(f"{fact.name}, {_alone(found, fact)}: {fact.key}" for fact in told[1:])
    lines += [f"Less is {less}."] if less else []
    lines.append(_answers(found))
    return lines if found.complete else [*lines, f"The seconds did not suffice for all values: {MORE}."]


MORE = "give more with --within"


def _range(found: FactRanges, strategy: str) -> str:
    low, high = found.samples(strategy)
    short, long = map(seconds_text, _steps(found, strategy))
    if low == high:
        return f"{strategy} has {samples_text(low)} samples/s with the values that were timed"
    return f"{strategy} has {samples_text(low)} to {samples_text(high)} samples/s (steps of {short} to {long})"


def _alone(found: FactRanges, fact: ClusterFact) -> str:
    """The samples per second of the answer with the values of a fact alone: "447 (TCP) to 1,617 (RDMA)"."""
    points: dict[str, Point] = {"": (), **{words: ((fact.name, words),) for words in fact.values}}
    tried = [
        (row.timing.samples_per_second, words)
        for words, point in points.items()
        for row in found.rows.get(point, ())
        if row.strategy == found.best
    ]
    ends = (min(tried), max(tried))
    return " to ".join(f"{samples_text(samples)} ({words or 'as assumed'})" for samples, words in ends)


def _how(fact: ClusterFact, on: str) -> str:
    """How a person finds the value of a fact, and states it."""
    line = machines_in_line(on)
    example = "" if line is None or not fact.in_line else f', or write for example "{line._replace(**fact.in_line)}"'
    return f"{fact.look} State it by {fact.state} in a cluster file{example}."


def _answers(found: FactRanges) -> str:
    """A sentence with the values with which another strategy is first, or that there are none."""
    others = found.others()
    if not others:
        timed = "No value" if found.complete else "No value that was timed"
        return f"{timed} changes the answer, among the {len(found.timed)} strategies that were timed again."
    each = [f"with {_values(points)}, {strategy} is first" for strategy, points in others.items()]
    return f"The answer depends on these facts: {'; '.join(each)}."


def _values(points: Sequence[Point]) -> str:
    return " or ".join(" and ".join(words for _, words in point) for point in points)
