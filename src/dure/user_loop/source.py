"""Samples and gradients of a user's own loop: this rank's share of a data set, and what `backward()` leaves.

A method waits here between two steps. A gradient is averaged over the group while the user's backward() computes it:

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

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Sampler as TorchSampler

from dure.core.node import EndOfWork, Operation
from dure.core.vectors import all_finite, equal_ranges
from dure.errors import UsageError
from dure.job.data.split import Dirichlet, Sampler, parse_split
from dure.job.gradient import Gradient
from dure.job.overlap import Overlap
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.topology import Agreement, Intention

if TYPE_CHECKING:
    from dure.core.node import Group, Node
    from dure.job.gradient import Requester
    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode


class StatelessSource:
    """The members that sources of a user's loop share: the samples are the loop's, and nothing of them is saved."""

    can_stop = False
    whole = True

    def model(self, requester: Requester) -> torch.Tensor:
        return requester.params

    async def settled(self) -> None:
        """Return at once: no other node reads from this source."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the loop is the user's."""


class LoopSource(StatelessSource):
    """A `GradientSource`: the method's request is pending until the user's next `step()`.

    `batch_size` is the weight of this replica, and `name` is the model's in errors and warnings. `exchange` makes the
    group's mean of a gradient, None in a world of one and for a replica that is a part of a model. `shares_memory`: the
    worker's parameters are those of the replica.
    """

    def __init__(self, node: ProcessNode, replica: Replica, batch_size: int, name: str) -> None:
        self.name = name
        self.batch_size = batch_size
        self.exchange: Exchange | None = None
        self.wants_mean = False
        self.shares_memory = True
        self._node = node
        self._replica = replica
        self._has_buffers = replica.buffers_flat().numel() > 0
        self._pending: Operation[Gradient] | None = None
        self._asked: Operation[None] = node.promise("the method to ask for a gradient")

    @property
    def asked(self) -> Operation[None]:
        """Done once the method waits for a gradient."""
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
    def is_over(self) -> bool:
        """Whether the exchange of the pending gradient has found that a rank has no more work."""
        return self.is_exchanged and self.exchange is not None and not self.exchange.going

    @property
    def exchanged(self) -> Exchange | None:
        """The exchange, if the pending gradient is to be the group's mean."""
        return self.exchange if self.wants_mean else None

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

    def replace(self) -> None:
        """As `discard`, before another gradient of the same step."""
        if self.exchange is not None and self.wants_mean and self.exchange.going:
            self.exchange.replace()

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
        if self._replica.is_part:
            raise UsageError(
                "the method asks for the mean of a gradient over all groups, and fully_shard exchanges the gradients "
                'of a step inside each group. Take a method that averages models: sync="averaging", "bmuf" or "diloco".'
            )
        return self._ask(requester, mean=True)

    def give(self) -> None:
        """Answer the request with the replica's `grads`: the tensor itself if it is the group's mean, else a copy."""
        replica = self._replica
        buffers = replica.buffers_flat() if self._has_buffers else None
        # The method may still send its gradient after the step.
        values = replica.grads if self.wants_mean else replica.kept_gradient()
        if self.exchanged is not None:
            values = self.exchanged.mean
        self._answer().resolve(Gradient(values, 0.0, self.batch_size, buffers, checked=True))

    def end(self) -> None:
        """Answer the request with `EndOfWork`."""
        self._answer().fail(EndOfWork())

    def forget(self) -> None:
        """Drop the request of a method that does not wait for it any more."""
        self._answer()

    def _ask(self, requester: Requester, *, mean: bool) -> Operation[Gradient]:
        if self.shares_memory:
            requester.settle(self._replica.params)
        else:
            self._replica.load(requester.params)
        self._replica.publish()
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


class EndedSource(StatelessSource):
    """A `GradientSource` without gradients: the method of a worker ends at its first request."""

    def __init__(self, node: Node, batch_size: int) -> None:
        self.batch_size = batch_size
        self._node = node

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        ended: Operation[Gradient] = self._node.promise("the end of work")
        ended.fail(EndOfWork())
        return ended

    mean_gradient = gradient


# ---- the exchange

Failed = Callable[[BaseException], BaseException]
"""Takes an error that ends the training, and returns the error to raise in its place."""


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

    `failed` gets an error in the middle of the user's backward, and returns the one to raise. Set `examines` to have
    every rank check its own gradient for NaN and infinity before it is summed (`faulty_ranks`). `missing` gives the
    parameters without a gradient at this rank; those without one at all ranks are `unused` then.
    """

    def __init__(
        self,
        node: ProcessNode,
        group: Group,
        replica: Replica,
        share: float,
        failed: Failed,
        name: str,
        missing: Callable[[], Sequence[int]],
    ) -> None:
        self.name = name
        self.unused: Sequence[int] = ()
        self._missing = missing
        self._node = node
        self._group = group
        self._replica = replica
        self._share = share
        self._failed = failed
        self._agreement = Agreement(group)
        # A codec encodes the whole gradient at the end of backward, as in a run.
        self._coded = group if isinstance(group, CompressedGroup) else None
        self._overlap = Overlap(replica, None if self._coded is None else replica.grads.nbytes)
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
        self.unused = ()
        self._faulty = False
        self._overlap.arm(self._launch, self._begin, self._begin_again)

    def replace(self) -> None:
        """As `discard`, where the gradient that was exchanged belongs to no step.

        Raises `UsageError`, which ends the training, where the error of its message is added to the next one.
        """
        if self._coded is not None and self._coded.remembers:
            raise self._failed(
                UsageError(
                    f"a gradient of {self.name} was exchanged that belongs to no step, and its codec would add the "
                    "error of that message to the next gradient. Compute it without this model's parameters: "
                    "loss.backward(inputs=list(other.parameters()))."
                )
            )
        self.discard()

    def discard(self) -> None:
        """Exchange the next backward in place of the last, with whose mean this rank does not step."""
        self.left_out = not self.skipped
        self.arm()

    def disarm(self) -> None:
        """Let gradients gather in `grads` without an exchange."""
        self._overlap.disarm()

    def complete(self, mine: Intention) -> bool:
        """Exchange what is in `grads` now, unless a backward has done so; returns whether all ranks go on."""
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

    @property
    def mean(self) -> torch.Tensor:
        """The flat mean, or this rank's part of it, after an exchange."""
        return self._replica.grads

    @property
    def is_finite(self) -> bool:
        """Whether the mean holds neither NaN nor infinity."""
        return all_finite(self.mean)

    def close(self) -> None:
        """Remove the hooks, and drop the operations: they keep the engine's connections open."""
        self._overlap.close()
        self._said = None

    @property
    def _is_open(self) -> bool:
        """Whether a backward has begun the exchange, and none has come to its end."""
        return self._said is not None and self.going is None

    def _begin(self, _: int) -> None:
        if self._said is None:
            self._say("step")
        # The engine calls back at the end of this backward, before `backward()` returns: code after it sees the mean.
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

    def _launch(self, part: torch.Tensor) -> Any:
        if self._coded is not None:
            return self._launch_coded(self._coded, part)
        if self.examines and not all_finite(part):
            self._faulty = True
        if part.numel() and part.data_ptr() == self._replica.grads.data_ptr():
            part = self._with_marks(part)
        part *= self._share
        return self._group.all_reduce(part)

    def _launch_coded(self, group: CompressedGroup, gradient: torch.Tensor) -> Operation[None]:
        """Start on the encoded mean of the whole gradient, and on the marks, which travel as they are."""
        self._with_marks(gradient)
        self._faulty = not all_finite(gradient)
        if self._faulty:
            gradient.zero_()  # a codec cannot encode NaN
        marks = group.all_reduce(self._replica.marks)
        mean = group.mean_values(gradient, self._share, faulty=self._faulty)

        async def both() -> None:
            if await mean:
                gradient.fill_(torch.nan)  # as the sum of all would be
            await marks

        return self._node.spawn(both(), f"{self._node.name} exchanging its encoded gradient")

    def _with_marks(self, first: torch.Tensor) -> torch.Tensor:
        """The `first` part of the gradient, after the marks of the parameters that this rank has a gradient of.

        It is sent last: backward reaches no more parameters.
        """
        replica, self.unused = self._replica, self._missing()
        replica.marks.fill_(1.0)
        if self.unused:
            replica.marks[list(self.unused)] = 0.0
        return replica.marked_grads[: replica.marked_grads.numel() - replica.numel + first.numel()]

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
        self.replace()
        self._overlap.arm(self._launch, None, self._begin_again)
        self._begin(index)

    def _wait(self) -> None:
        assert self._said is not None
        # Every rank starts the agreement first and then the slices from the last to the first, whatever its backward
        # did: collectives have no names, and match by their order alone.
        operations: Sequence[Operation[Any]] = [self._said, *self._sent()]
        self._node.loop.run_until(self._node.spawn(_all(operations), f"{self._node.name} exchanging its gradient"))
        counts = self._agreement.read(self._said.result())
        self.going, self.skipped = counts.going_on, counts.all_skip
        if self.unused:  # at this rank; only then is a device asked for the marks of all
            said = self._replica.marks.tolist()
            self.unused = [index for index in self.unused if not said[index]]

    def _sent(self) -> Sequence[Operation[Any]]:
        """The exchanges of all slices, of which the last are launched here."""
        return self._overlap.finish()


async def _all(operations: Sequence[Operation[Any]]) -> None:
    for operation in operations:
        await operation


def _never(_: torch.Tensor) -> None:
    raise AssertionError


# ---- samples


class EpochSampler(TorchSampler[int]):
    """Indices of one rank's samples, from `Attached.sampler`: each pass over it is the next epoch, in a new order.

    A new sampler begins with the first epoch.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler.next().tolist())

    def __len__(self) -> int:
        return self._sampler.batch_size


def share_of(
    dataset: Sized, rank: int, world_size: int, *, split: str = "iid", seed: int = 0, targets: Any = None
) -> EpochSampler:
    """The sampler of `rank` over `dataset`, split as `dure.job.data.split` says.

    `targets` are those of the whole set, needed where labels decide ("dirichlet"); those of `dataset` if left out.

    Raises `UsageError` for a data set without indices or with fewer samples than ranks, and for other `targets`.
    """
    _check_indexed(dataset, rank, world_size)
    if not len(dataset):
        raise UsageError("the data set is empty: len(dataset) is 0. Give one that has a sample for each rank.")
    chosen = parse_split(split)
    labels = torch.zeros(len(dataset), device="cpu")
    if isinstance(chosen, Dirichlet):
        labels = _labels(dataset, targets, labels)
    sizes = [max(stop - start, 1) for start, stop in equal_ranges(len(dataset), world_size)]
    sampler = chosen.samplers(labels, sizes, seed=seed)[rank]
    if sampler.stride == sampler.batch_size:  # a stream of its own: one batch is one pass over it
        sampler.batch_size = sampler.stride = len(sampler.indices)
    return EpochSampler(sampler)


def _labels(dataset: Sized, targets: Any, default: torch.Tensor) -> torch.Tensor:
    """The label of each sample: `targets`, or those of `dataset`."""
    found = getattr(dataset, "targets", None) if targets is None else targets
    if found is None:
        return default
    if len(found) != len(dataset):
        raise UsageError(
            f"targets are one label for each sample: {len(found)} were found for {len(dataset)} samples. Write "
            "replica.sampler(dataset, targets=labels)."
        )
    return torch.as_tensor(found, device="cpu")


def _check_indexed(dataset: object, rank: int, world_size: int) -> None:
    """Raises `UsageError` for what is no data set of samples with the indices 0 to len(dataset) - 1."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "a sampler gives indices of samples, and a DataLoader gives batches. Write sampler = "
            "replica.sampler(loader.dataset), and DataLoader(loader.dataset, sampler=sampler, ...) with it."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"a sampler gives indices, and {kind} has none: it needs __len__ and __getitem__. Let a data set that is "
            f"read in order leave out the samples of the other ranks, and give it to DataLoader without a sampler: in "
            f"its __iter__, islice(samples, {rank}, None, {world_size}), which is islice(samples, replica.rank, None, "
            "replica.world_size)."
        )
