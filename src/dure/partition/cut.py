"""Cutting a list of blocks into stages: `cuts` of a partition, and PipeDream's dynamic programme behind two of them.

    | `cuts`       | stages                                                                      |
    |--------------|-----------------------------------------------------------------------------|
    | `4/8/12`     | by hand: the numbers of the first block of each stage but the first, from 0 |
    | `parameters` | the largest stage has as few parameters as possible; the default            |
    | `even`       | the largest stage has as few blocks with parameters as possible             |
    | `profile`    | the slowest stage or border is as fast as possible, by counted operations   |
    | `FILE.json`  | as `profile`, by the profile in a file (`Profile.write`)                    |

The last two use the dynamic programme with one replica of each stage, and the slowest link between two stages of the
cluster in virtual time; other runs have links without limit (`Speeds`).

Every stage needs a trainable parameter, since it is a worker of its own. Blocks without parameters (activations,
pooling) stay with the block before them where the rule leaves a choice, so equal models are cut equally.

The programme finds stages, and replicas of each, for the least time per mini-batch, from a profile: Narayanan et al.,
"PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1.

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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dure.core.spec_text import nearest
from dure.errors import StrategyError, UsageError
from dure.partition.backward import DeviceSpeed
from dure.partition.blocks import block_name
from dure.partition.profile import BlockTimes, Profile

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
        raise StrategyError(
            f"a limit of memory needs one level of workers, got {len(levels)}: a level does not know the mini-batches "
            "in flight of the others. Leave memory_nbytes out, or plan for one level."
        )
    blocks = len(profile.blocks)
    unit: _Unit = _Worker(profile)
    for level in levels:
        unit = programme = _Programme(profile, level, unit, combine, memory_nbytes, replicas)
    seconds = programme.least(blocks)
    if math.isinf(seconds):
        workers = math.prod(level.workers for level in levels)
        limit = f" with at most {memory_nbytes:,.0f} bytes each" if memory_nbytes < math.inf else ""
        raise StrategyError(
            f"no plan puts these {blocks} blocks on {workers} workers{limit}: every stage needs a block with "
            "parameters, and memory for the mini-batches in flight. Use other numbers of workers, or smaller blocks."
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
        """An upper bound of the seconds of the best plan of the blocks up to `stop`; `_times` skips slower parts."""
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
        """Whether a worker has memory for the mini-batches in flight, with 0, 1, ... units behind the stage."""
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


RULES = ("parameters", "even", "profile")
PROFILES = (".json", ".yaml")
"""Ends of the names of files with a profile."""


class Speeds(NamedTuple):
    """Seconds of a mini-batch of the whole model at one worker, and bytes per second of the links between stages.

    `call` is the share of the seconds that does not depend on the number of samples. `times` are those of the model's
    blocks, if they have been measured. `device` gives the speed of accelerators for parameters of a dtype.
    """

    seconds: float = 1.0
    bandwidth: float = math.inf
    call: float = 0.0
    times: BlockTimes | None = None
    device: Callable[[torch.dtype], DeviceSpeed] | None = None


ANY = Speeds()
"""Speeds of unknown machines: links without limit, and no measured times."""


def is_by_profile(cuts: str) -> bool:
    """Whether `cuts` uses a profile, and so the speeds of machines."""
    return cuts == "profile" or cuts.endswith(PROFILES)


def cut_of(
    cuts: str,
    blocks: Sequence[nn.Module],
    num_stages: int,
    profile: Callable[[], Profile] | None = None,
    speeds: Speeds = ANY,
    borders: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The numbers of the first block of each stage but the first. `cuts` is a text of the table above.

    `profile` makes the profile of the blocks for `cuts=profile`; its times are in proportion, and `speeds` gives their
    sum. `borders` are the numbers of the blocks before which a cut may be, in ascending order; None: all.

    Raises `StrategyError` for a text that names no rule, and for blocks that cannot be cut so.
    """
    trains = [any(each.requires_grad for each in block.parameters()) for block in blocks]
    starts = range(len(blocks)) if borders is None else (0, *borders)
    groups = [range(start, stop) for start, stop in pairwise((*starts, len(blocks)))]
    training = [sum(trains[number] for number in group) for group in groups]
    joined = [count > 0 for count in training]
    _check_enough(num_stages, sum(trains), sum(joined), borders)
    even = tuple(starts[number] for number in balanced(training, joined, num_stages))
    if cuts == "even":
        return even
    if cuts in ("", "parameters"):
        sizes = [sum(each.numel() for number in group for each in blocks[number].parameters()) for group in groups]
        return tuple(starts[number] for number in balanced(sizes, joined, num_stages))
    if (cuts == "profile" and profile is not None) or cuts.endswith(PROFILES):
        found = _profile_for(cuts, len(blocks), profile, speeds).joined(starts)
        chosen = plan(found, [Level(num_stages, speeds.bandwidth)], replicas={1}).cuts
        return tuple(starts[number] for number in chosen)
    numbers = _by_hand(cuts, trains, num_stages, "/".join(map(str, even)) or "parameters")
    for number in numbers:
        if number not in starts:
            raise StrategyError(
                f"cuts={cuts} is between {block_name(number - 1, blocks[number - 1])} and "
                f"{block_name(number, blocks[number])}, where each of the workers that share layers has a part of the "
                f"tensors. Cut before {_listed(starts[1:])}, as in cuts={'/'.join(map(str, even))}."
            )
    return numbers


def _check_enough(num_stages: int, blocks: int, groups: int, borders: Sequence[int] | None) -> None:
    """Raise `StrategyError` if a model with so many trainable `blocks`, or `groups` of them, has too few for stages."""
    if blocks < num_stages:
        raise StrategyError(
            f"{num_stages} stages need {num_stages} blocks with trainable parameters or more, and this model has "
            f"{blocks}. Write fewer stages, or let Job.stages return smaller blocks."
        )
    if borders is not None and groups < num_stages:
        where = f"before {_listed(borders)}" if borders else "nowhere"
        raise StrategyError(
            f"{num_stages} stages with trainable parameters need borders between them where the workers that share "
            f"layers have whole tensors, and this model can be cut {where}. Write fewer stages, or let Job.stages "
            "return blocks that end behind layers that are split by inputs."
        )


def _profile_for(cuts: str, count: int, profile: Callable[[], Profile] | None, speeds: Speeds) -> Profile:
    """The profile that `cuts` names, of `count` blocks."""
    if not cuts.endswith(PROFILES):
        assert profile is not None
        found = profile()  # its operations are whole numbers, and sums of them exact
        return found if math.isinf(speeds.bandwidth) else found.lasting(speeds.seconds)
    found = Profile.read(Path(cuts))
    if len(found.blocks) != count:
        raise UsageError(
            f"{cuts} is a profile of {len(found.blocks)} blocks, and this model has {count}. Name a profile of this "
            "model, or cut by the counted operations with cuts=profile."
        )
    return found


def _listed(numbers: Sequence[int]) -> str:
    return f"block {numbers[0]}" if len(numbers) == 1 else f"one of the blocks {', '.join(map(str, numbers))}"


def _by_hand(cuts: str, trains: Sequence[bool], num_stages: int, example: str) -> tuple[int, ...]:
    words = cuts.split("/")
    if not all(word.isdecimal() for word in words):
        raise StrategyError(
            f"cuts={cuts} is no way to cut a model: write block numbers such as cuts={example}, one of "
            f"{', '.join(RULES)}, or the file of a profile.{nearest(cuts, RULES)}"
        )
    numbers = tuple(map(int, words))
    if len(numbers) != num_stages - 1:
        raise StrategyError(
            f"cuts={cuts} makes {len(numbers) + 1} stages, and this partition has {num_stages}: write "
            f"{num_stages - 1} block {'number' if num_stages == 2 else 'numbers'}, such as cuts={example}."
        )
    bounds = (0, *numbers, len(trains))
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if start >= stop:
            raise StrategyError(
                f"cuts={cuts} leaves stage {stage} no block: write ascending numbers from 1 to {len(trains) - 1}, the "
                f"last of this model's {len(trains)} blocks, such as cuts={example}."
            )
        if not any(trains[start:stop]):
            raise StrategyError(
                f"cuts={cuts} leaves stage {stage} (blocks {start} to {stop - 1}) no trainable parameter, so its "
                f"worker would have nothing to train: write cuts such as {example}."
            )
    return numbers


def balanced(sizes: Sequence[int], trains: Sequence[bool], num_stages: int) -> tuple[int, ...]:
    """Cut so that the largest stage is as small as possible; each stage has a block that `trains`.

    Of several such cuts, the one with the smallest sum of squared sizes of stages is taken, then the one with the
    latest cuts. Sizes are whole numbers, so the result is exact.

    >>> balanced([0, 600, 0, 100, 0, 100, 0, 100], [size > 0 for size in [0, 600, 0, 100, 0, 100, 0, 100]], 3)
    (3, 7)
    """
    largest = _least(sizes, trains, num_stages, power=0, limit=sum(sizes))[0]
    return _least(sizes, trains, num_stages, power=2, limit=largest)[1]


def _least(
    sizes: Sequence[int], trains: Sequence[bool], num_stages: int, *, power: int, limit: int
) -> tuple[int, tuple[int, ...]]:
    """The least cost of stages of at most `limit`, and its cuts, by dynamic programming over the first blocks.

    The cost of stages is the sum of their sizes to the `power`, or the largest size for `power=0`. The table for k
    stages gives, for each number of first blocks, the least cost and the cuts negated, so that `min` takes the latest.
    """
    total = [0, *accumulate(sizes)]
    training = [0, *accumulate(map(int, trains))]
    table: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(num_stages):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for stop in range(1, len(sizes) + 1):
            for start, (before, cuts) in table.items():
                size = total[stop] - total[start] if start < stop else 0
                if start < stop and training[start] < training[stop] and size <= limit:
                    new = (before + size**power if power else max(before, size), (*cuts, -start))
                    found[stop] = min(found.get(stop, new), new)
        table = found
    cost, starts = table[len(sizes)]
    return cost, tuple(-start for start in starts[1:])
