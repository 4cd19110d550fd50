"""Before each step, ranks that need each other say what they are about to do.

One tiny all_reduce of four counts: how many take a step, how many have no more work, how many want to see the
model that the method would deliver, how many skip a step. Whoever has no more work ends the training for all, at the
same step; a rank that looks at the model while others take a step would wait for ever, so that is an error at once,
and at every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.runtime.base import Group, Operation

Intention = Literal["step", "end", "evaluate", "skip"]
_INTENTIONS: tuple[Intention, ...] = ("step", "end", "evaluate", "skip")


class Agreement:
    """What the ranks of `group` are about to do, on tensors of `device`."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

    def start(self, mine: Intention) -> Operation[torch.Tensor]:
        """Say what this rank is about to do; the counts of all."""
        said = torch.zeros(len(_INTENTIONS), dtype=torch.int32)
        said[_INTENTIONS.index(mine)] = 1
        return self._group.all_reduce(said.to(self._device))


def going_on(counts: torch.Tensor) -> bool:
    """Whether everybody steps or skips, or all only look. Raises `UsageError` if some only look."""
    counted: list[int] = counts.tolist()
    _, ending, evaluating, _ = counted
    if 0 < evaluating < sum(counted):
        raise UsageError(
            f"{evaluating} of {sum(counted)} ranks entered replica.evaluation() and the others did "
            "not. Over collectives the mean of all replicas is shown: let every rank enter it after the same step, and "
            "print on one of them."
        )
    return not ending


def all_skip(counts: torch.Tensor) -> bool:
    """Whether no rank takes the step, so that no optimizer may step."""
    stepping, ending, evaluating, _ = counts.tolist()
    return not (stepping or ending or evaluating)
