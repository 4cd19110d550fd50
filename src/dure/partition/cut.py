"""Cutting a list of blocks into stages: `cuts` of a partition.

    | `cuts`       | stages                                                                      |
    |--------------|-----------------------------------------------------------------------------|
    | `4/8/12`     | by hand: the numbers of the first block of each stage but the first, from 0 |
    | `parameters` | the largest stage has as few parameters as possible; the default            |
    | `even`       | the largest stage has as few blocks with parameters as possible             |
    | `profile`    | the slowest stage or border is as fast as possible, by counted operations   |
    | `FILE.json`  | as `profile`, by the profile in a file (`Profile.write`)                    |

The last two use the dynamic programme of PipeDream (`plan.py`) with one replica of each stage, and the slowest link
between two stages of the cluster in virtual time; other runs have links without limit (`Speeds`).

Every stage needs a trainable parameter, since it is a worker of its own. Blocks without parameters (activations,
pooling) stay with the block before them where the rule leaves a choice, so equal models are cut equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from torch import nn

from dure.core.spec_text import nearest
from dure.errors import StrategyError, UsageError
from dure.partition.plan import Level, plan
from dure.partition.profile import Profile

RULES = ("parameters", "even", "profile")
PROFILES = (".json", ".yaml")
"""Ends of the names of files with a profile."""


class Speeds(NamedTuple):
    """Seconds of a mini-batch of the whole model at one worker, and bytes per second of the links between stages."""

    seconds: float = 1.0
    bandwidth: float = math.inf


ANY = Speeds()
"""Speeds where none are known."""


def is_by_profile(cuts: str) -> bool:
    """Whether `cuts` uses a profile, and so the speeds of machines."""
    return cuts == "profile" or cuts.endswith(PROFILES)


def cut_of(
    cuts: str,
    blocks: Sequence[nn.Module],
    num_stages: int,
    profile: Callable[[], Profile] | None = None,
    speeds: Speeds = ANY,
) -> tuple[int, ...]:
    """The numbers of the first block of each stage but the first. `cuts` is a text of the table above.

    `profile` makes the profile of the blocks for `cuts=profile`; its times are in proportion, and `speeds` gives their
    sum.

    Raises `StrategyError` for a text that names no rule, and for blocks that cannot be cut so.
    """
    sizes = [sum(each.numel() for each in block.parameters()) for block in blocks]
    trains = [any(each.requires_grad for each in block.parameters()) for block in blocks]
    if sum(trains) < num_stages:
        raise StrategyError(
            f"{num_stages} stages need {num_stages} blocks with trainable parameters or more, and this model has "
            f"{sum(trains)}. Write fewer stages, or let Job.stages return smaller blocks."
        )
    if cuts in ("", "parameters"):
        return balanced(sizes, trains, num_stages)
    if cuts == "even":
        return balanced([*map(int, trains)], trains, num_stages)
    if cuts == "profile" and profile is not None:
        found = profile()  # its operations are whole numbers, and sums of them exact
        unlimited = math.isinf(speeds.bandwidth)
        return _by_profile(found if unlimited else found.lasting(speeds.seconds), num_stages, speeds.bandwidth)
    if cuts.endswith(PROFILES):
        found = Profile.read(Path(cuts))
        if len(found.blocks) != len(blocks):
            raise UsageError(f"{cuts} is a profile of {len(found.blocks)} blocks, and this model has {len(blocks)}.")
        return _by_profile(found, num_stages, speeds.bandwidth)
    return _by_hand(cuts, trains, num_stages)


def _by_profile(profile: Profile, num_stages: int, bandwidth: float) -> tuple[int, ...]:
    return plan(profile, [Level(num_stages, bandwidth)], replicas={1}).cuts


def _by_hand(cuts: str, trains: Sequence[bool], num_stages: int) -> tuple[int, ...]:
    example = "/".join(map(str, balanced([*map(int, trains)], trains, num_stages))) or "parameters"
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
