"""Ranking of timed strategies: by the seconds that they need for equal learning.

    score  =  samples per second / factor * (machines of workers) / (all machines)

Samples per second are those of a run of the job's steps, with the exchange at its end. Servers with machines of their
own use machines that could be workers. `factor` is the number of samples that a strategy needs for the
learning of one sample of synchronous SGD. Until it is measured (`learning.py`), it is *assumed*:

    | property                             | assumed factor               | reason                                     |
    |--------------------------------------|------------------------------|--------------------------------------------|
    | the updates of synchronous SGD       | 1                            | equal results (tests/oracles)              |
    | gradients stale by s common batches  | 1 + 0.25 s                   | a lower rate is needed                     |
    | an average every p steps             | 1 + 0.05 log2 p              | replicas drift apart in between            |
    | gossip of K workers                  | that, times 1 + 0.1 log2 K   | an exchange has two workers only           |
    | int8; 1bit; top-k and strom          | 1.01; 1.05; 1.1              | rounding; most of a gradient waits         |

These hold for many exchanges in a run. Replicas that never exchange learn as one of them does, and need K times the
samples. With E exchanges in a run of the job's steps, K replicas with the factor f of the table learn

    1 + (K / f - 1) E / (E + RARE)       times as fast as one; in gossip, E / PAIR counts
            K / f       E / (E + RARE)       with elastic averaging, whose center moves by exchanges alone

An exchange of a share of the elements (top-k) counts as that share of one, and one of single bits as BITS of one: the
others wait for later exchanges, which are as rare. Under a momentum of blocks (BMUF, DiLoCo) single bits count as none.

One machine (`candidates.ONE`) has the factor 1. It is the answer if no other is better by more than the known error of
the ranking. Otherwise a strategy that is simpler than the one of the highest score is the answer if its score is at
least NEAR of it. Plain data parallelism is the simplest. docs/explanations/planning.md has the measurements behind
these rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.core.target import NEAR
from dure.planner.candidates import ONE
from dure.run.strategy import Strategy, name_of
from dure.sync.base import Periodic
from dure.topology.offers import offers_of

if TYPE_CHECKING:
    from dure.planner.candidates import Scene
    from dure.planner.timing import Timing

STALE, DRIFT = 0.25, 0.05
CODECS = {"int8": 1.01, "1bit": 1.05, "top-k": 1.1, "strom": 1.1}
GOSSIP = 0.1
ELASTIC, BLOCKS = ("easgd", "eamsgd"), ("bmuf", "diloco")

RARE, PAIR, BITS = 4.0, 2.0, 1 / 8
"""Exchanges in a run with which replicas have half of the gain over one replica, exchanges of pairs that mix as one of
all workers, and what counts of one with `1bit` (`bench/rare_exchanges.py`)."""

SECONDS_ERROR, LEARNING_ERROR = 0.14, 0.4
"""The known errors of the ranking, 90th percentiles: of seconds behind network cards, and of assumed samples."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A timed strategy, and its assumed `factor`. `seconds_to_target` is measured, if it is known.

    `stepping` is the share of a run's seconds before the exchange with which it ends.
    """

    strategy: str
    timing: Timing
    factor: float
    seconds_to_target: float | None = None
    stepping: float = 1.0

    @property
    def score(self) -> float:
        """Samples of synchronous SGD per second, for as many machines as those of the workers."""
        timing = self.timing
        machines = timing.worker_machines / (timing.worker_machines + timing.server_machines)
        return self.stepping * timing.samples_per_second / self.factor * machines

    @property
    def error(self) -> float:
        """The known error of the score, or of the seconds to the target."""
        assumed = self.factor != 1 and self.seconds_to_target is None
        return LEARNING_ERROR if assumed else SECONDS_ERROR


def ranked(strategy: str, timing: Timing, scene: Scene) -> Ranked:
    """`strategy` with its factor in a run of `scene`."""
    if strategy == ONE:
        return Ranked(strategy, timing, 1.0)
    chosen = Strategy.parse(strategy)
    factor = assumed_factor(chosen, timing, scene.batch, scene.run)
    return Ranked(strategy, timing, factor, stepping=_stepping(chosen, timing, scene.run))


def assumed_factor(strategy: Strategy, timing: Timing, batch: int, steps: int) -> float:
    """The factor of the table above in a run of so many steps, each with a batch of all workers."""
    factor = 1 + STALE * timing.staleness * timing.batch_size / batch
    factor *= CODECS.get(name_of("codec", strategy.codec), 1.0)
    period, pairs = _period(strategy, timing), "peers" in offers_of(strategy.topology)
    if pairs:
        factor *= 1 + GOSSIP * math.log2(timing.copies)
    if math.isinf(period):
        return float(timing.copies)
    factor *= 1 + DRIFT * math.log2(period)
    if period == 1 and not pairs:
        return factor
    exchanges = _share(strategy) * steps / period / (PAIR if pairs else 1)
    alone = 0.0 if name_of("sync", strategy.sync) in ELASTIC else 1.0
    return timing.copies / (alone + (timing.copies / factor - alone) * exchanges / (exchanges + RARE))


def _share(strategy: Strategy) -> float:
    """The share of an exchange that counts with the strategy's codec."""
    if name_of("codec", strategy.codec) == "1bit":
        return 0.0 if name_of("sync", strategy.sync) in BLOCKS else BITS
    return float(getattr(strategy.codec, "share", 1.0))


def _period(strategy: Strategy, timing: Timing) -> float:
    """The steps from one exchange to the next; in gossip counted, infinite if none succeeds."""
    if "peers" in offers_of(strategy.topology):
        return max(1.0, 1 / timing.exchanges) if timing.exchanges else math.inf
    return float(getattr(strategy.sync, "period", getattr(strategy.sync, "n_push", 1)))


def _stepping(strategy: Strategy, timing: Timing, steps: int) -> float:
    """The share of a run's seconds before its last exchange. That of a period counts as far as the run cuts it off."""
    cut = 1.0
    if isinstance(strategy.sync, Periodic):
        rounds = steps / strategy.sync.period
        cut = math.ceil(rounds) - rounds
    seconds = steps * timing.seconds
    return seconds / (seconds + cut * timing.ending)


def in_order(found: Sequence[Ranked]) -> list[Ranked]:
    """The strategies, given in the order of simplicity, in the order of their rank.

    Strategies whose seconds to the target are known come first.
    """
    if not found:
        return []
    known = [each for each in found if each.seconds_to_target is not None]
    ordered = sorted(known, key=_to_target) + sorted(
        (each for each in found if each not in known), key=lambda each: -each.score
    )
    best = ordered[0]
    simplest = next(each for each in known or found if _is_near(each, best))
    alone = next((each for each in known or found if each.strategy == ONE), None)
    if alone is not None and all(_is_as_good(alone, each) for each in known or found):
        simplest = alone
    return [simplest, *(each for each in ordered if each is not simplest)]


def _to_target(each: Ranked) -> float:
    return math.inf if each.seconds_to_target is None else each.seconds_to_target


def _is_near(each: Ranked, best: Ranked) -> bool:
    if best.seconds_to_target is not None:
        return NEAR * _to_target(each) <= best.seconds_to_target
    return each.score >= NEAR * best.score


def _is_as_good(alone: Ranked, other: Ranked) -> bool:
    """Whether `other` is better than one machine by no more than its known error."""
    if other.seconds_to_target is not None:
        return _to_target(alone) <= (1 + other.error) * other.seconds_to_target
    return (1 + other.error) * alone.score >= other.score


def with_target(each: Ranked, seconds: float | None) -> Ranked:
    """`each` with the measured seconds to the target."""
    return replace(each, seconds_to_target=seconds)


def retimed(row: Ranked, other: Ranked) -> Ranked:
    """`other`, the strategy of `row` with another timing. As many steps lead to a target that was reached."""
    target = row.seconds_to_target
    return with_target(other, None if target is None else target * other.timing.seconds / row.timing.seconds)
