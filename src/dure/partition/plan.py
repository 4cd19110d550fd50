"""PipeDream's dynamic programme: stages and replicas of each for the least time per mini-batch, from a profile.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1.

    T_l, a_l, |w_l|     seconds forward and backward, output bytes, parameter bytes of layer l        (`Profile`)
    Tsync(i..j, m)   =  4 (m - 1) |w_i..j| / (m B)              bytes that a replica sends and receives, at bandwidth B
    Tst(i..j, m)     =  1/m max(sum of T_i..j, Tsync(i..j, m))  layers i..j as one stage with m replicas
    A(j, m)          =  min( Tst(1..j, m),
                             min over i < j, m' < m of  max( A(i, m - m'), 2 a_i / B, Tst(i+1..j, m') ) )

A(j, m) is the time per mini-batch of the slowest stage or border of layers 1..j on m workers, in the steady state.
`combine=add` has a sum in place of the maximum in Tst, as in PipeDream's released optimizer: communication that does
not overlap with computation.

On several *levels* of machines (workers in a host, hosts in a network) the programme runs from the innermost level
outwards. A level's "worker" is a whole unit of the level below, so A of that level takes the place of the sum of T_l.

    | in the paper      | here                    |
    |-------------------|-------------------------|
    | T_l, a_l, abs w_l | `BlockProfile`          |
    | B_k, m_k          | `Level`                 |
    | A^k(i -> j, m)    | `_Programme.best`       |
    | T^k(i -> j, m)    | `_Programme._one_stage` |

A stage keeps the weights and activations of every mini-batch in flight: ceil(R / r) for a stage with r replicas, where
R counts the workers of the stage and of those after it. The memory limit holds for these versions; the released
optimizer counts one less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from dure.errors import StrategyError

if TYPE_CHECKING:
    from dure.partition.profile import Profile

Combine = Literal["max", "add"]


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
    several plans with equal times, one of the fewest stages is taken, then the one of the earliest cuts.

    Raises `StrategyError` if no plan exists, or none fits the memory of a worker.
    """
    if memory_nbytes < math.inf and len(levels) > 1:
        raise StrategyError("a limit of memory needs one level of workers: the stages of a level do not know the rest.")
    one = _seconds(profile)

    def single(start: int, stop: int) -> StagePlan | None:
        return StagePlan((PlannedStage(start, stop),), one(start, stop)) if profile.trains(start, stop) else None

    inner: Callable[[int, int], StagePlan | None] = single
    for level in levels:
        programme = _Programme(profile, level, inner, combine, memory_nbytes, replicas)
        inner = programme.all_workers
    found = inner(0, len(profile.blocks))
    if found is None:
        workers = math.prod(level.workers for level in levels)
        limit = f" with at most {memory_nbytes:,.0f} bytes each" if memory_nbytes < math.inf else ""
        raise StrategyError(
            f"no plan puts these {len(profile.blocks)} blocks on {workers} workers{limit}: every stage needs a block "
            "with parameters, and room for the mini-batches in flight. Use other numbers of workers, or smaller blocks."
        )
    return found


class _Programme:
    """The programme of one level. `inner` gives the plan of a range of blocks on one unit of the level below."""

    def __init__(
        self,
        profile: Profile,
        level: Level,
        inner: Callable[[int, int], StagePlan | None],
        combine: Combine,
        memory_nbytes: float,
        replicas: Collection[int] | None,
    ) -> None:
        self.profile = profile
        self.level = level
        self.inner = cache(inner)
        self.combine = combine
        self.memory_nbytes = memory_nbytes
        self.replicas = replicas
        self.best = cache(self._best)
        self._parameters = [0, *accumulate(block.parameter_nbytes for block in profile.blocks)]
        self._kept = [0, *accumulate(block.parameter_nbytes + block.activation_nbytes for block in profile.blocks)]

    def all_workers(self, start: int, stop: int) -> StagePlan | None:
        """The best plan of a range of blocks on all workers of this level."""
        return self.best(start, stop, self.level.workers)

    def _best(self, start: int, stop: int, workers: int) -> StagePlan | None:
        """A(start..stop, workers): the best plan of these blocks on the first `workers`; None if none is possible."""
        found = [self._one_stage(start, stop, workers, workers)]
        for cut in range(start + 1, stop):
            border = 2 * self.profile.blocks[cut - 1].output_nbytes / self.level.bandwidth
            for last in range(1, workers):
                before = self.best(start, cut, workers - last)
                stage = self._one_stage(cut, stop, last, workers)
                if before is not None and stage is not None:
                    slowest = max(before.seconds, border, stage.seconds)
                    found.append(StagePlan((*before.stages, *stage.stages), slowest))
        return min((each for each in found if each is not None), key=_order, default=None)

    def _one_stage(self, start: int, stop: int, replicas: int, workers: int) -> StagePlan | None:
        """T(start..stop, replicas): these blocks on the last `replicas` of the first `workers`, as replicas."""
        inner = self.inner(start, stop)
        if inner is None or not self._allowed(replicas) or not self._fits(start, stop, replicas, workers):
            return None
        nbytes = self._parameters[stop] - self._parameters[start]
        sync = 4 * (replicas - 1) * nbytes / (replicas * self.level.bandwidth)
        seconds = max(inner.seconds, sync) if self.combine == "max" else inner.seconds + sync
        stages = tuple(stage._replace(replicas=stage.replicas * replicas) for stage in inner.stages)
        return StagePlan(stages, seconds / replicas)

    def _allowed(self, replicas: int) -> bool:
        return self.replicas is None or replicas in self.replicas

    def _fits(self, start: int, stop: int, replicas: int, workers: int) -> bool:
        """Whether a worker has room for the mini-batches in flight at the stage."""
        following = self.level.workers - workers
        in_flight = math.ceil((following + replicas) / replicas)
        return in_flight * (self._kept[stop] - self._kept[start]) <= self.memory_nbytes


def _seconds(profile: Profile) -> Callable[[int, int], float]:
    """The seconds of a range of blocks, rounded once, so that equal ranges have equal times wherever they are."""
    return lambda start, stop: math.fsum(block.seconds for block in profile.blocks[start:stop])


def _order(plan: StagePlan) -> tuple[float, int, tuple[PlannedStage, ...]]:
    return plan.seconds, len(plan.stages), plan.stages
