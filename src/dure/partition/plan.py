"""PipeDream's dynamic programme: stages and replicas of each for the least time per mini-batch, from a profile.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1.

    T_l, a_l, |w_l|     seconds forward and backward, output bytes, parameter bytes of layer l        (`Profile`)
    Tsync(i..j, m)   =  4 (m - 1) |w_i..j| / (m B)              bytes that a replica sends and receives, at bandwidth B
    Tst(i..j, m)     =  1/m max(sum of T_i..j, Tsync(i..j, m))  layers i..j as one stage with m replicas
    A(j, m)          =  min( Tst(1..j, m),
                             min over i < j, m' < m of  max( A(i, m - m'), 2 a_i / B, Tst(i+1..j, m') ) )

A(j, m) is the time per mini-batch of the slowest stage or border of layers 1..j on m workers, in the steady state. It
is computed from the last layer backwards here, which gives the same minimum. Of the plans of that time T, the one of
the fewest stages is then found by the same recurrence, with counts of stages of at most T in place of times.
`combine=add` has a sum in place of the maximum in Tst, as in PipeDream's released optimizer: communication that does
not overlap with computation.

On several *levels* of machines (workers in a host, hosts in a network) the programme runs from the innermost level
outwards. A level's "worker" is a whole unit of the level below, so A of that level takes the place of the sum of T_l.

    | in the paper      | here                    |
    |-------------------|-------------------------|
    | T_l, a_l, abs w_l | `BlockProfile`          |
    | B_k, m_k          | `Level`                 |
    | A^k(i -> j, m)    | `_Programme._times`     |
    | T^k(i -> j, m)    | `_Programme._stage`     |

A stage keeps the weights and activations of every mini-batch in flight: ceil(R / r) for a stage with r replicas, where
R counts the workers of the stage and of those after it. The memory limit holds for these versions; the released
optimizer counts one less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dure.errors import StrategyError

if TYPE_CHECKING:
    from dure.partition.profile import Profile

Combine = Literal["max", "add"]
Vector = NDArray[np.float64]


class Level(NamedTuple):
    """`workers` of one kind, such as the hosts of a network, with a link of `bandwidth` bytes per second each."""

    workers: int
    bandwidth: float = math.inf


class PlannedStage(NamedTuple):
    """Blocks `start` to `stop` - 1 on `replicas` workers."""

    start: int
    stop: int
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Stages in the order of the model, and the seconds per mini-batch of the slowest stage or border."""

    stages: tuple[PlannedStage, ...]
    seconds: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """The numbers of the first block of each stage but the first."""
        return tuple(stage.start for stage in self.stages[1:])


def plan(
    profile: Profile,
    levels: Sequence[Level],
    *,
    combine: Combine = "max",
    memory_nbytes: float = math.inf,
    replicas: Collection[int] | None = None,
) -> StagePlan:
    """The plan of the least time per mini-batch that uses all workers. `levels` come from the innermost outwards.

    `replicas` limits the replicas of a stage: `{1}` makes as many stages as workers. Each stage has a parameter. Of
    several plans with equal times, one of the fewest stages is taken, then the one of the earliest cuts; of several
    levels this holds for the stages of each level.

    Raises `StrategyError` if no plan exists, or none fits the memory of a worker.
    """
    if memory_nbytes < math.inf and len(levels) > 1:
        raise StrategyError("a limit of memory needs one level of workers: the stages of a level do not know the rest.")
    blocks = len(profile.blocks)
    unit: _Unit = _Worker(profile)
    for level in levels:
        unit = programme = _Programme(profile, level, unit, combine, memory_nbytes, replicas)
    seconds = programme.least(blocks)
    if math.isinf(seconds):
        workers = math.prod(level.workers for level in levels)
        limit = f" with at most {memory_nbytes:,.0f} bytes each" if memory_nbytes < math.inf else ""
        raise StrategyError(
            f"no plan puts these {blocks} blocks on {workers} workers{limit}: every stage needs a block "
            "with parameters, and room for the mini-batches in flight. Use other numbers of workers, or smaller blocks."
        )
    return StagePlan(programme.stages(0, blocks), seconds)


class _Unit(Protocol):
    """A worker, or all workers of a level, as one unit of the level above."""

    def seconds(self, stop: int) -> Vector:
        """For each `start` up to `stop`, the seconds of blocks `start` to `stop` - 1; inf where there is no plan."""
        ...

    def stages(self, start: int, stop: int) -> tuple[PlannedStage, ...]:
        """The stages of the plan of these blocks."""
        ...


class _Worker:
    """One worker, which has all blocks of a range in one stage."""

    def __init__(self, profile: Profile) -> None:
        self._trains = np.cumsum([0, *(block.parameter_nbytes > 0 for block in profile.blocks)])
        self._sums, self._unit = _exact_sums([block.seconds for block in profile.blocks])

    def seconds(self, stop: int) -> Vector:
        end = self._sums[stop]
        found = np.array([(end - begin) / self._unit for begin in self._sums[:stop]])
        found[self._trains[:stop] == self._trains[stop]] = np.inf
        return found

    def stages(self, start: int, stop: int) -> tuple[PlannedStage, ...]:
        return (PlannedStage(start, stop),)


class _Programme:
    """The programme of one level, whose units are `inner`."""

    def __init__(
        self,
        profile: Profile,
        level: Level,
        inner: _Unit,
        combine: Combine,
        memory_nbytes: float,
        replicas: Collection[int] | None,
    ) -> None:
        self.level = level
        self.inner = inner
        self.combine = combine
        self.memory_nbytes = memory_nbytes
        self.replicas = [r for r in range(1, level.workers + 1) if replicas is None or r in replicas]
        blocks = profile.blocks
        self._borders = np.array([2 * block.output_nbytes / level.bandwidth for block in blocks])
        self._parameters = np.cumsum([0.0, *(block.parameter_nbytes for block in blocks)])
        self._kept = np.cumsum([0.0, *(block.parameter_nbytes + block.activation_nbytes for block in blocks)])

    def least(self, stop: int) -> float:
        """The least seconds of the blocks up to `stop` - 1."""
        return float(self._times(stop, self._bound(stop))[0, -1])

    def seconds(self, stop: int) -> Vector:
        return self._times(stop)[:-1, -1]

    def stages(self, start: int, stop: int) -> tuple[PlannedStage, ...]:
        limit = self._times(stop, self._bound(stop) if start == 0 else math.inf)[start, -1]
        fewest = self._table(stop, limit, lambda stage, rest: rest + 1, self.replicas)
        found: list[PlannedStage] = []
        units = self.level.workers
        while start < stop:
            end, count = self._first(start, stop, units, limit, fewest)
            found += [each._replace(replicas=each.replicas * count) for each in self.inner.stages(start, end)]
            start, units = end, units - count
        return tuple(found)

    def _first(self, start: int, stop: int, units: int, limit: float, fewest: Vector) -> tuple[int, int]:
        """The end of the first stage, and its units, in the plan of the fewest stages: the earliest end counts."""
        found = []
        for count in (each for each in self.replicas if each <= units):
            ends = slice(start + 1, stop + 1)
            fits = self._fits(start, ends, count)[:, units - count]
            right = (self._stage(start, stop, count) <= limit) & fits
            right &= fewest[ends, units - count] == fewest[start, units] - 1
            found += [(start + 1 + int(end), count) for end in np.flatnonzero(right)[:1]]
        return min(found)

    def _bound(self, stop: int) -> float:
        """The seconds of a plan of the blocks up to `stop`: parts of plans that are slower need not be looked at."""
        simple = [each for each in (1, self.level.workers) if each in self.replicas]
        return float(self._times(stop, math.inf, simple)[0, -1]) if len(self.replicas) > len(simple) > 0 else math.inf

    def _times(self, stop: int, bound: float = math.inf, replicas: Sequence[int] | None = None) -> Vector:
        """The least seconds of the blocks from each to `stop` - 1 on the last 0, 1, ... units; inf above `bound`."""
        return self._table(stop, bound, lambda stage, rest: np.maximum(stage[:, None], rest), replicas or self.replicas)

    def _table(
        self, stop: int, limit: float, join: Callable[[Vector, Vector], Vector], replicas: Sequence[int]
    ) -> Vector:
        """The recurrence over stages of at most `limit`: `join` takes their seconds, and the values behind them."""
        units = self.level.workers
        found = np.full((stop + 1, units + 1), np.inf)
        found[stop, 0] = 0
        for start in range(stop - 1, -1, -1):
            for count in replicas:
                stage = self._stage(start, stop, count)
                near = np.flatnonzero(stage <= limit)
                if near.size:
                    window = slice(near[0], near[-1] + 1)
                    ends = slice(start + 1 + near[0], start + 2 + near[-1])
                    values = join(stage[window], found[ends, : units + 1 - count])
                    values[stage[window] > limit] = np.inf
                    if self.memory_nbytes < math.inf:
                        values[~self._fits(start, ends, count)] = np.inf
                    np.minimum(found[start, count:], values.min(axis=0), out=found[start, count:])
        return found

    def _stage(self, start: int, stop: int, count: int) -> Vector:
        """T(start..end, count) for each end up to `stop`: seconds of `count` replicas, or of the border behind them."""
        inner, ends = self._inner[start, start + 1 : stop + 1], slice(start + 1, stop + 1)
        nbytes = self._parameters[ends] - self._parameters[start]
        sync = 4 * (count - 1) * nbytes / (count * self.level.bandwidth)
        seconds: Vector = (np.maximum(inner, sync) if self.combine == "max" else inner + sync) / count
        seconds[:-1] = np.maximum(seconds[:-1], self._borders[start : stop - 1])
        return seconds

    def _fits(self, start: int, ends: slice, count: int) -> NDArray[np.bool_]:
        """Whether a worker has room for the mini-batches in flight, with 0, 1, ... units behind the stage."""
        in_flight = -(-np.arange(count, self.level.workers + 1) // count)
        fits: NDArray[np.bool_] = np.outer(self._kept[ends] - self._kept[start], in_flight) <= self.memory_nbytes
        return fits

    @cached_property
    def _inner(self) -> Vector:
        """The seconds of all ranges [start, end) on one unit."""
        blocks = len(self._borders)
        found = np.full((blocks, blocks + 1), np.inf)
        for end in range(1, blocks + 1):
            found[:end, end] = self.inner.seconds(end)
        return found


def _exact_sums(values: Sequence[float]) -> tuple[list[int], int]:
    """Running sums, in units of 1 over the second result: equal ranges have equal sums wherever they are."""
    ratios = [value.as_integer_ratio() for value in map(float, values)]
    unit = max(bottom for _, bottom in ratios)  # powers of two
    return [0, *accumulate(top * (unit // bottom) for top, bottom in ratios)], unit
