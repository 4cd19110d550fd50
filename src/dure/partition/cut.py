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
from dure.partition.block_times import BlockTimes
from dure.partition.blocks import block_name
from dure.partition.plan import Level, plan
from dure.partition.profile import Profile

RULES = ("parameters", "even", "profile")
PROFILES = (".json", ".yaml")
"""Ends of the names of files with a profile."""


class Speeds(NamedTuple):
    """Seconds of a mini-batch of the whole model at one worker, and bytes per second of the links between stages.

    `call` is the share of the seconds that does not depend on the number of samples. `times` are those of the model's
    blocks, if they have been measured.
    """

    seconds: float = 1.0
    bandwidth: float = math.inf
    call: float = 0.0
    times: BlockTimes | None = None


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
        raise UsageError(f"{cuts} is a profile of {len(found.blocks)} blocks, and this model has {count}.")
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
