"""Ranking of timed strategies: by the seconds that they need for equal learning.

    score  =  samples per second / factor * (machines of workers) / (all machines)

Servers with machines of their own use machines that could be workers. `factor` is the number of samples that a strategy
needs for the learning of one sample of synchronous SGD. Until it is measured (`learning.py`), it is *assumed*:

    | property                             | assumed factor               | reason                                     |
    |--------------------------------------|------------------------------|--------------------------------------------|
    | the updates of synchronous SGD       | 1                            | equal results (tests/oracles)              |
    | gradients stale by s common batches  | 1 + 0.25 s                   | a lower rate is needed                     |
    | an average every p steps             | 1 + 0.05 log2 p              | replicas drift apart in between            |
    | gossip of K workers                  | that, times 1 + 0.1 log2 K   | an exchange has two workers only           |
    | int8; 1bit; top-k and strom          | 1.01; 1.05; 1.1              | rounding; most of a gradient waits         |

A strategy that is simpler than the one of the highest score is the answer if its score is at least NEAR of it. Plain
data parallelism is the simplest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dure.core.target import NEAR
from dure.planner.timing import Timing
from dure.run.strategy import Strategy, name_of
from dure.topology.offers import offers_of

STALE, DRIFT = 0.25, 0.05
CODECS = {"int8": 1.01, "1bit": 1.05, "top-k": 1.1, "strom": 1.1}
GOSSIP = 0.1


@dataclass(frozen=True, slots=True)
class Ranked:
    """A timed strategy, and its assumed `factor`. `seconds_to_target` is measured, if it is known."""

    strategy: str
    timing: Timing
    factor: float
    seconds_to_target: float | None = None

    @property
    def score(self) -> float:
        """Samples of synchronous SGD per second, for as many machines as those of the workers."""
        timing = self.timing
        machines = timing.worker_machines / (timing.worker_machines + timing.server_machines)
        return timing.samples_per_second / self.factor * machines


def ranked(strategy: str, timing: Timing, batch: int) -> Ranked:
    """`strategy` with its factor for a batch of all workers."""
    return Ranked(strategy, timing, assumed_factor(Strategy.parse(strategy), timing, batch))


def assumed_factor(strategy: Strategy, timing: Timing, batch: int) -> float:
    """The factor of the table above."""
    factor = 1 + STALE * timing.staleness * timing.batch_size / batch
    factor *= CODECS.get(name_of("codec", strategy.codec), 1.0)
    period = getattr(strategy.sync, "period", 1)
    if "peers" in offers_of(strategy.topology):
        factor *= 1 + GOSSIP * math.log2(timing.copies)
        period = max(1.0, timing.memory.weights / max(timing.bytes_per_step, 1.0))  # steps of an exchange
    return factor * (1 + DRIFT * math.log2(period))


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
    return [simplest, *(each for each in ordered if each is not simplest)]


def _to_target(each: Ranked) -> float:
    return math.inf if each.seconds_to_target is None else each.seconds_to_target


def _is_near(each: Ranked, best: Ranked) -> bool:
    if best.seconds_to_target is not None:
        return NEAR * _to_target(each) <= best.seconds_to_target
    return each.score >= NEAR * best.score


def with_target(each: Ranked, seconds: float | None) -> Ranked:
    """`each` with the measured seconds to the target."""
    return replace(each, seconds_to_target=seconds)
