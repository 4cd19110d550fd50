"""The group's mean gradient, exchanged while a backward() that is not ours computes it.

    method stands at mean_gradient()      hooks armed
    user's loss.backward()
        first parameter complete          say "step" (agreement)
        slice complete                    times this rank's share, all_reduce under way
        end of backward                   wait for all: grads hold the mean, so clipping clips the mean
    user's replica.step()                 the method goes on with it

The loss of another model that passes through this one leaves a gradient here too. It is exchanged, and belongs to no
step. `zero_grad()` discards it: then the next backward is exchanged in its place (`discard`).

Without a backward (a skipped step, the end) the same operations are started by `complete`, so that every rank always
takes part in the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.core.finite import all_finite
from dure.errors import UsageError
from dure.job.overlap import Overlap
from dure.topology.collective.topology import Agreement, Intention

if TYPE_CHECKING:
    from dure.core.node import Group, Operation
    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode


Failed = Callable[[BaseException], BaseException]
"""Is told of an error, and gives the one to raise in its place."""


REMEDY = (
    "If both gradients belong to the step, write `with replica.accumulate():` around all but the last backward. If the "
    "first is of another model's loss, which passes through this model, call zero_grad() of this model before the "
    "backward of its own loss, or compute the other alone: loss.backward(inputs=list(other.parameters())). Where a "
    "gradient scaler skipped the step, write replica.step(scaler) in place of scaler.step(optimizer)."
)
"""Advice for a second backward of a model whose gradient has been exchanged."""

_UNFINISHED = (
    "has not come to its end, and the other ranks have a part of its gradient. After an exception in backward() attach "
    "again, with the values of a checkpoint. Without one, two threads run backward() at once, or a layer is in several "
    "parts that torch.utils.checkpoint computes with use_reentrant=True: write use_reentrant=False."
)
"""Why an exchange cannot be finished, and what to do."""


class Exchange:
    """Turns the gradient of the model `name` in `replica.grads` into the mean over `group`; this rank weighs `share`.

    `failed` is told of an error in the middle of the user's backward, and says what to raise. Set `examines` to have
    every rank look whether its own gradient is finite before it is summed (`faulty_ranks`).
    """

    def __init__(
        self,
        node: ProcessNode,
        group: Group,
        replica: Replica,
        share: float,
        failed: Failed,
        name: str,
    ) -> None:
        self.name = name
        self._node = node
        self._group = group
        self._replica = replica
        self._share = share
        self._failed = failed
        self._agreement = Agreement(group)
        self._overlap = Overlap(replica)
        self._said: Operation[torch.Tensor] | None = None
        self.going: bool | None = None
        self.skipped = False
        self.left_out = False
        self.examines = False
        self._faulty = False

    def arm(self) -> None:
        """The next backward is exchanged. `going` tells afterwards whether all ranks continued.

        `skipped` then says whether every rank skipped the step. Set `left_out` where this rank does not step with a
        mean that others may step with: the next agreement compares that.
        """
        if self._is_open:
            self._refuse_part()
        else:
            self._said = None
        self.going = None
        self._faulty = False
        self._overlap.arm(self._launch, self._begin, self._begin_again)

    def discard(self) -> None:
        """Exchange the next backward in place of the last, with whose mean this rank does not step."""
        self.left_out = not self.skipped
        self.arm()

    def disarm(self) -> None:
        """Let gradients gather in `grads`, as hooks that do nothing would."""
        self._overlap.disarm()

    def complete(self, mine: Intention) -> bool:
        """Exchange what is in `grads` now, unless a backward has done so; whether everybody goes on."""
        if self.going is None:
            if self._is_open:
                self._refuse_part(ends=mine == "end")
            if not self._overlap.armed:
                self.arm()
            if self._said is None:
                self._say(mine)
            self._wait()
        self._overlap.disarm()
        assert self.going is not None
        return self.going

    async def faulty_ranks(self) -> list[int]:
        """The ranks whose own gradients were not finite in the last exchange, where `examines`; all ranks call this."""
        mine = torch.tensor([float(self._faulty)], device="cpu")
        said = await self._group.all_gather(mine)
        return [rank for rank, each in zip(self._group.ranks, said, strict=True) if each.item()]

    def close(self) -> None:
        """Take the hooks off, and let go of operations: they keep the engine's connections open."""
        self._overlap.close()
        self._said = None

    @property
    def _is_open(self) -> bool:
        """Whether a backward has begun the exchange, and none has come to its end."""
        return self._said is not None and self.going is None

    def _begin(self, _: int) -> None:
        if self._said is None:
            self._say("step")
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _begin_again(self, index: int) -> None:
        """Begin anew with a backward after one that has failed."""
        self._refuse_part()
        self._overlap.arm(self._launch, None, self._begin_again)
        self._begin(index)

    def _refuse_part(self, *, ends: bool = False) -> None:
        """Raises `UsageError`, which ends the training, where others have a part of a gradient that failed."""
        if ends or self._overlap.has_launched:
            raise self._failed(UsageError(f"a backward() of {self.name} {_UNFINISHED}"))

    def _say(self, mine: Intention) -> None:
        self._said = self._agreement.start(mine, left_out=self.left_out)
        self.left_out = False

    def _launch(self, part: torch.Tensor) -> Operation[torch.Tensor]:
        if self.examines and not all_finite(part):
            self._faulty = True
        part *= self._share
        return self._group.all_reduce(part)

    def _after_backward(self) -> None:
        if self.going is not None:
            return
        try:
            self._wait()
        except BaseException as error:
            told = self._failed(error)
            if told is error:
                raise
            raise told from error
        if self.going:
            self._overlap.arm(_never, self._backward_again)

    def _backward_again(self, index: int) -> None:
        """Begin the exchange of a backward whose parameter `index` is complete; the last one has been exchanged."""
        if not self._replica.is_emptied(but=index):
            raise self._failed(
                UsageError(
                    f"backward() ran twice before replica.step() of {self.name}, and its first gradient has been "
                    f"exchanged already. {REMEDY}"
                )
            )
        self.discard()
        self._overlap.arm(self._launch, None, self._begin_again)
        self._begin(index)

    def _wait(self) -> None:
        assert self._said is not None
        operations: Sequence[Operation[Any]] = [self._said, *self._overlap.finish()]
        self._node.loop.run_until(self._node.spawn(_all(operations), f"{self._node.name} exchanging its gradient"))
        counts = self._agreement.read(self._said.result())
        self.going, self.skipped = counts.going_on, counts.all_skip


async def _all(operations: Sequence[Operation[Any]]) -> None:
    for operation in operations:
        await operation


def _never(_: torch.Tensor) -> None:
    raise AssertionError
