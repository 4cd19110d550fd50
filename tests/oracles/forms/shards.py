"""Seconds of a step of sharded data parallelism from plain figures.

N ranks share one copy of what is sharded, and M(n) is a message. A reduce-scatter of n bytes takes
S(n) = (N - 1) M(n / N) + (N - 1) / N n g, an all-gather G(n) = (N - 1) M(n / N). A is the all-reduce of a number of
8 bytes, by which all ranks know the norm of the gradient. X(n) is an all-reduce of n / N among the groups, if there
are several.

    form                          seconds of a step                                                  function
    stages 1, 2: slices n_i       e_i = max(e_(i-1), r_i) + S(n_i), then X(P) + A + G(P)              `sliced`
    stage 3: blocks               `blockwise`: at the computation the sum of f_k and b_k, G_1 and S_1;
                                  at the lane of messages (2 n - 1) G + n S + f_n for equal blocks

In stage 3 G_(k+1) begins with the forward before f_(k+1), and G_(k-1) with b_k; S_k follows b_k once S_(k+1) has ended.
"""

from typing import NamedTuple

from oracles.forms.steps import overlapped, ring

from dure.core.collective_cost import HostedRanks, Shift


def half_ring(nbytes, ranks, paths, *, adds=False):
    """Seconds of a reduce-scatter (`adds`) or an all-gather of `nbytes`.

    >>> from dure.core.collective_cost import Path
    >>> half_ring(8, 4, Path(latency=1.0, alpha=0.0, bandwidth=2.0))
    6.0
    """
    part, neighbors = -(-nbytes // ranks), Shift(ranks)
    if isinstance(paths, HostedRanks) and paths.transit is not None:
        return paths.ring_seconds(ranks, part, (adds,))
    return (ranks - 1) * paths.shift_seconds(neighbors, part, adds=adds)


class Exchanges(NamedTuple):
    """Seconds of the collectives of a unit: its gather, its scatter, and the sum of a part of it across groups."""

    gather: float
    scatter: float
    across: float = 0.0


def agreed(ranks, paths):
    """Seconds of the all-reduce of a number."""
    return ring(8 * ranks, ranks, paths)  # one rank has all of it


def sliced(compute, backward, slices, whole, agreement):
    """Seconds of a step of stage 1 or 2: slices are scattered during backward, and all parameters gathered at the end.

    >>> sliced(3.0, 2 / 3, [(0.5, 1.5), (0.0, 1.5)], Exchanges(2.0, 0.0), 0.25)
    7.25
    """
    return overlapped(compute, backward, slices) + whole.across + agreement + whole.gather


def blockwise(passes, units, root, agreement):
    """Seconds of a step of stage 3 with `passes` (forward, backward) of blocks, and the exchanges of each.

    Blocks that share parameters have those of the `root`, which is gathered before all and scattered after all.

    >>> blockwise([(1.0, 2.0)] * 3, [Exchanges(0.5, 0.25)] * 3, Exchanges(0.0, 0.0), 0.0)
    9.75
    >>> blockwise([(1.0, 2.0)] * 3, [Exchanges(8.0, 4.0)] * 3, Exchanges(0.0, 0.0), 0.0) == 5 * 8 + 3 * 4 + 1
    True
    """
    last, there, lane = len(passes) - 1, {}, root.gather
    now = before = lane
    for k, (forward, _) in enumerate(passes):
        for number in {k, min(k + 1, last)} - {*there}:
            there[number] = lane = max(lane, before if k else root.gather) + units[number].gather
        now = max(now, there[k]) + forward
        before = now
    there, scattered = {last: now}, 0.0
    for k in range(last, -1, -1):
        if k:
            there[k - 1] = lane = max(lane, now) + units[k - 1].gather
        now = max(max(now, there[k]) + passes[k][1], scattered)
        lane = max(lane, now) + units[k].scatter
        scattered = max(lane, scattered) + units[k].across
    scattered = max(lane, scattered) + root.scatter + root.across
    return scattered + agreement
