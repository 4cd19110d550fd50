"""Seconds of a step from plain figures.

K workers compute c seconds each and exchange n bytes. A message of n bytes takes M(n) = a + n b: a for its latency and
its cost, b per byte of the slowest link. A receiver adds up a byte in g seconds.

    form                       seconds of a step                                                         function
    ring all-reduce            R(n) = 2 (K - 1) M(n / K) + (K - 1) / K n g                               `ring`
    overlapped with backward   e_i = max(e_(i-1), r_i) + R(n_i), the end of slice i, computed at r_i     `overlapped`
    workers apart              max(K / sum of 1 / s_k, q): s_k of worker k alone, q of a step of all     `apart`
                               workers at the busiest link or server
    pipeline with a flush      max over k of w_1 - w_k + U t_k + wait_k; for K equal stages              `flushed`
                               (U + K - 1) t + 2 (K - 1) M(n)
    pipeline without a flush   U times the largest of t_k and w_k / (K - k + 1)                          `endless`

Stage k of a 1F1B pipeline needs t_k for the forward f_k and the backward of one of U micro-batches. The way w_k of a
micro-batch from there to the last stage and back is the sum of t_j over j >= k and of 2 (K - k) messages. The stage
makes K - k forwards while it waits for the first gradient: wait_k = max(0, w_k - t_k - (K - k) f_k). Where it computes
a forward again before each backward, it does that while it waits, too, and the ways are without it. As K - k + 1
micro-batches are in flight there, it begins no more than these in each w_k. All messages of a micro-batch at one card
bound the seconds between two micro-batches (`Between`). Where gradients of weights are computed later (zero bubble),
the ways are without them, and the last backwards of stage k begin earlier by k - 1 of them.
"""

from itertools import accumulate
from typing import NamedTuple

from dure.core.collective_cost import HostedRanks, Shift


def ring(nbytes, ranks, paths):
    """Seconds of an all-reduce of `nbytes` on each of `ranks`.

    >>> from dure.core.collective_cost import Path
    >>> ring(8, 4, Path(latency=1.0, alpha=0.0, bandwidth=2.0))
    12.0
    """
    if ranks == 1:
        return 0.0
    part, neighbors = -(-nbytes // ranks), Shift(ranks)
    if isinstance(paths, HostedRanks) and paths.transit is not None:  # tests/core/test_collective_cost.py has the form
        return paths.ring_seconds(ranks, part, (True, False))
    return (ranks - 1) * (paths.shift_seconds(neighbors, part, adds=True) + paths.shift_seconds(neighbors, part))


def overlapped(compute, backward, slices):
    """Seconds of a step whose gradient is sent in slices while backward, a share of `compute`, goes on.

    A slice is the share of backward behind it, and its seconds on the network.

    >>> overlapped(3.0, 2 / 3, [(0.5, 1.5), (0.0, 1.5)])
    5.0
    """
    free = 0.0
    for left, seconds in slices:
        free = max(free, compute * (1 - backward * left)) + seconds
    return max(free, compute)


def apart(alone, busiest):
    """Seconds in which workers that wait for no other make one step each, on average.

    `alone` has the seconds of a step of each worker; `busiest` are those of one step of each worker at the busiest
    server or link.

    >>> apart([2.0, 2.0], busiest=1.0), apart([2.0, 2.0], busiest=4.0)
    (2.0, 4.0)
    """
    return max(len(alone) / sum(1 / seconds for seconds in alone), busiest)


class StageSeconds(NamedTuple):
    """Seconds of a micro-batch at a stage: a forward, the gradients of its inputs and of its weights, two messages.

    `weights` is 0 where a backward is one computation. `outputs` is the message to the next stage, `gradients` the one
    back. `again` is a forward that is computed again while the stage waits for a gradient.
    """

    forward: float
    inputs: float
    weights: float = 0.0
    outputs: float = 0.0
    gradients: float = 0.0
    again: float = 0.0

    @property
    def backward(self):
        """Seconds of both gradients."""
        return self.inputs + self.weights

    @property
    def busy(self):
        """Seconds of the stage's work."""
        return self.forward + self.again + self.backward

    @property
    def passing(self):
        """Seconds for which other stages wait: those of the way to the next stage, and back."""
        return self.forward + self.inputs + self.outputs + self.gradients

    @property
    def split(self):
        """These seconds, where the two gradients of a backward are computed apart, each in half of its seconds."""
        return self._replace(inputs=self.backward / 2, weights=self.backward / 2)


class Between(NamedTuple):
    """Seconds of a request between stages, and of all messages of a micro-batch at the busiest card.

    `ask` is 0 where stages ask so early that no message waits for its request.
    """

    ask: float = 0.0
    busiest: float = 0.0


FREE = Between()
"""Stages whose messages wait for no request and fill no card."""


def ways(stages):
    """The way of a micro-batch from each stage to the last and back."""
    return list(accumulate(stage.passing for stage in reversed(stages)))[::-1]


def longest(stages, between=FREE):
    """Seconds from a micro-batch to the next at the slowest stage or link."""
    return max([stage.busy for stage in stages] + [_at_links(stages, between)])


def _at_links(stages, between):
    """A stage that asks one micro-batch ahead waits for the request and for the message."""
    messages = [between.ask + max(stage.outputs, stage.gradients) for stage in stages[:-1] if between.ask]
    return max([between.busiest, *messages])


def flushed(stages, micro, between=FREE):
    """Seconds of a mini-batch of `micro` micro-batches in a 1F1B pipeline that drains behind it.

    >>> flushed([StageSeconds(1.0, 2.0, outputs=0.1, gradients=0.1), StageSeconds(1.0, 2.0)], micro=4)
    15.4
    """
    count, last, way = len(stages), micro - 1, [*ways(stages), 0.0]
    slowest, filling = longest(stages), 0.0
    found = [way[0] + last * _at_links(stages, between)]
    for k, stage in enumerate(stages):
        ahead = way[k + 1] + stage.outputs + stage.gradients  # of the next stage, and to it and back
        waiting = max(0.0, ahead - min(count - 1 - k, last) * stage.forward - stage.again)
        before = max(way[0] - way[k] - k * stage.weights, filling)
        found.append(before + micro * stage.busy + waiting)
        rounds, rest = divmod(last, count - k)
        if way[k] > (count - k) * slowest:
            found.append(way[0] + rounds * way[k] + rest * slowest)
        filling += stage.forward + stage.outputs
    return max(found)


def endless(stages, between=FREE):
    """Seconds from a micro-batch to the next in a 1F1B pipeline that never drains.

    >>> endless([StageSeconds(0.5, 0.5, outputs=2.0, gradients=1.0), StageSeconds(0.5, 0.5)])
    2.5
    """
    return max(longest(stages, between), *(way / (len(stages) - k) for k, way in enumerate(ways(stages))))
