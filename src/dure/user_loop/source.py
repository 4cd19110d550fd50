"""Gradients that a loop of the user's own computes: between two steps, a method waits here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.core.node import EndOfWork, Operation
from dure.job.gradient import Gradient

if TYPE_CHECKING:
    import torch

    from dure.job.gradient_source import Requester
    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode
    from dure.user_loop.exchange import Exchange


class LoopSource:
    """A `GradientSource`: the method's request is pending until the user's next `step()`.

    `batch_size` is this rank's weight, and `name` is the model's in errors and warnings. `exchange` makes the group's
    mean of a gradient, None in a world of one.
    """

    can_stop = False
    whole = True

    def __init__(self, node: ProcessNode, replica: Replica, batch_size: int, name: str) -> None:
        self.name = name
        self.batch_size = batch_size
        self.exchange: Exchange | None = None
        self.wants_mean = False
        self._node = node
        self._replica = replica
        self._has_buffers = replica.buffers_flat().numel() > 0
        self._pending: Operation[Gradient] | None = None
        self._asked: Operation[None] = node.promise("the method to ask for a gradient")

    @property
    def asked(self) -> Operation[None]:
        """Done once the method stands at a request."""
        return self._asked

    @property
    def exchanges(self) -> bool:
        """Whether the pending gradient is to be the group's mean, and is made during backward."""
        return self.wants_mean and self.exchange is not None

    @property
    def is_exchanged(self) -> bool:
        """Whether the pending gradient has been made the group's mean already."""
        return self.exchange is not None and self.wants_mean and self.exchange.going is not None

    @property
    def all_skip(self) -> bool:
        """Whether every rank skipped the step whose gradients were exchanged last."""
        return self.exchange is not None and self.exchange.skipped

    def leave_out(self) -> None:
        """Note that this rank does not step with the mean that was exchanged, unless every rank skipped."""
        if self.is_exchanged and not self.all_skip:
            assert self.exchange is not None
            self.exchange.left_out = True

    def discard(self) -> None:
        """Do not step with the mean that was exchanged last: the next one takes its place."""
        if self.exchange is not None and self.wants_mean and self.exchange.going:
            self.exchange.discard()

    def hold(self) -> None:
        """Let the gradients of more than one backward gather."""
        if self.exchange is not None:
            self.exchange.disarm()

    def release(self) -> None:
        """The next backward is the last of its step."""
        if self.exchange is not None and self.wants_mean and self.exchange.going is not False:
            self.exchange.arm()

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        return self._ask(requester, mean=False)

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        return self._ask(requester, mean=True)

    def give(self) -> None:
        """Go on with what is in the replica's `grads`, which stays the replica's where it is the mean."""
        replica = self._replica
        buffers = replica.buffers_flat() if self._has_buffers else None
        values = replica.grads if self.wants_mean else replica.grads.clone()
        self._answer().resolve(Gradient(values, 0.0, self.batch_size, buffers, checked=True))

    def end(self) -> None:
        """There is no more work."""
        self._answer().fail(EndOfWork())

    def model(self, requester: Requester) -> torch.Tensor:
        return requester.params

    async def settled(self) -> None:
        """Return at once: no other node reads from this source."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing: the loop is the user's."""

    def _ask(self, requester: Requester, *, mean: bool) -> Operation[Gradient]:
        requester.settle(self._replica.params)
        if requester.buffers is not None:
            self._replica.load_buffers(requester.buffers)
        self.wants_mean = mean
        if self.exchange is not None and mean:
            self.exchange.arm()
        self._pending = self._node.promise("the user's next step()")
        self._asked.resolve()
        return self._pending

    def _answer(self) -> Operation[Gradient]:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._asked = self._node.promise("the method to ask for the next gradient")
        return pending
