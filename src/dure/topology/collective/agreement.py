"""Before each step, ranks that need each other exchange their intentions.

One tiny all_reduce of five counts: the ranks that take a step, that have no more work, that evaluate the model that the
method would deliver, that skip a step, and that left out the step before although its gradients had been exchanged. A
rank that has no more work ends the training for all ranks, at the same step. A rank that evaluates while others take a
step would wait for ever, so that is an error at once, at every rank. A step that some ranks left out and others took
makes replicas differ: an error at every rank, before the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.core.node import Group, Operation

Intention = Literal["step", "end", "evaluate", "skip"]
_INTENTIONS: tuple[Intention, ...] = ("step", "end", "evaluate", "skip")


class Agreement:
    """What the ranks of `group` are about to do. The counts are on the CPU, where they are read."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, mine: Intention, *, left_out: bool = False) -> Operation[torch.Tensor]:
        """Say what this rank is about to do, and whether it left out the exchanged step before; the counts of all."""
        said = torch.zeros(len(_INTENTIONS) + 1, dtype=torch.int32, device="cpu")
        said[_INTENTIONS.index(mine)] = 1
        said[-1] = left_out
        return self._group.all_reduce(said)


def going_on(counts: torch.Tensor) -> bool:
    """Whether all ranks step or skip, or all only evaluate.

    Raises `UsageError` if some only look, or some left out an exchanged step that others took.
    """
    *counted, left_out = counts.tolist()
    _, ending, evaluating, _ = counted
    if 0 < left_out < sum(counted):
        raise UsageError(
            f"{left_out} of {sum(counted)} ranks left out a step whose gradient had been exchanged, and the others "
            "took it: the replicas differ. Over collectives backward() exchanges the gradient: call replica.skip() "
            "before it, or let all ranks leave out the same steps, by a test of the mean that gradients hold after it."
        )
    if 0 < evaluating < sum(counted):
        raise UsageError(
            f"{evaluating} of {sum(counted)} ranks entered replica.evaluation() and the others did "
            "not. Over collectives the mean of all replicas is shown: let every rank enter it after the same step, and "
            "print on one of them."
        )
    return not ending


def all_skip(counts: torch.Tensor) -> bool:
    """Whether no rank takes the step, so that no optimizer may step."""
    stepping, ending, evaluating, *_ = counts.tolist()
    return not (stepping or ending or evaluating)
