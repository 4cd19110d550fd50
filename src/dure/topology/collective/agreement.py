"""Before each step, ranks that need each other exchange their intentions.

One tiny all_reduce of five counts: the ranks that take a step, that have no more work, that evaluate the model that the
method would deliver, whose scaled gradient overflowed, and that left out the step before although its gradients had
been exchanged. The other ranks skip the step. A rank that has no more work ends the training for all ranks, at the same
step. A rank that evaluates while others take a step would wait for ever, so that is an error at once, at every rank. A
step that some ranks left out and others took makes replicas differ: an error at every rank, before the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.core.node import Group, Operation

Intention = Literal["step", "end", "evaluate", "skip", "overflow"]
_COUNTED: tuple[Intention, ...] = ("step", "end", "evaluate", "overflow")


class Counts(NamedTuple):
    """The number of ranks with each intention, and of those that left out the exchanged step before."""

    step: int
    end: int
    evaluate: int
    overflow: int
    left_out: int
    ranks: int

    @property
    def going_on(self) -> bool:
        """Whether all ranks step or skip, or all only evaluate.

        Raises `UsageError` if some only look, or some left out an exchanged step that others took.
        """
        if 0 < self.left_out < self.ranks:
            raise UsageError(
                f"{self.left_out} of {self.ranks} ranks left out a step whose gradient had been exchanged, and the "
                "others took it: the replicas differ. Over collectives backward() exchanges the gradient: call "
                "replica.skip() before it, or let all ranks leave out the same steps, by a test of the mean that "
                "gradients hold after it."
            )
        if 0 < self.evaluate < self.ranks:
            raise UsageError(
                f"{self.evaluate} of {self.ranks} ranks entered replica.evaluation() and the others did not. Over "
                "collectives the mean of all replicas is shown: let every rank enter it after the same step, and print "
                "on one of them."
            )
        return not self.end

    @property
    def all_skip(self) -> bool:
        """Whether every rank skips the step, so that no optimizer may step."""
        return not (self.step or self.end or self.evaluate or self.overflow)


class Agreement:
    """The intentions of the ranks of `group`. The counts are on the CPU, where they are read."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, mine: Intention, *, left_out: bool = False) -> Operation[torch.Tensor]:
        """Say what this rank is about to do, and whether it left out the exchanged step before; `read` the result."""
        said = torch.zeros(len(_COUNTED) + 1, dtype=torch.int32, device="cpu")
        if mine in _COUNTED:
            said[_COUNTED.index(mine)] = 1
        said[-1] = left_out
        return self._group.all_reduce(said)

    def read(self, said: torch.Tensor) -> Counts:
        """The counts of all ranks."""
        return Counts._make([*said.tolist(), len(self._group.ranks)])
