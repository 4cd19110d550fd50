"""Gradients as values, the protocols between a worker and the source of its gradients, and the source of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from dure.job.data.dataset import Batch, moved

if TYPE_CHECKING:
    from dure.core.node import Node, Operation
    from dure.core.state import State
    from dure.job.data.dataset import DataSet
    from dure.job.data.split import BatchSampler
    from dure.job.optimizer import OptimizerSpec


@dataclass(slots=True)
class GradientWork:
    """A request for the gradient of one mini-batch at the flat parameters `values`.

    `values` are lent: their owner does not change them before the result. `inputs` and `targets` have one sample in
    each row of a tensor (`data/dataset.py`); both are None in a timing-only run. Random layers draw from (`seed`,
    `rank`, `step`). `flops` counts the floating-point operations of the whole batch, and `samples` those that are read
    for it, for virtual time. `buffers` is the worker's snapshot (`Replica.buffers_flat`); None means the buffers of a
    fresh model.
    """

    rank: int
    step: int
    values: Tensor
    inputs: Batch | None
    targets: Batch | None
    seed: int
    flops: float
    buffers: Tensor | None = None
    samples: int = 0

    def run(self) -> NoReturn:
        """Raise `TypeError`: only the `GradientEngine` of a runtime computes gradients."""
        raise TypeError("GradientWork is computed by a GradientEngine. Write engine.evaluate([work])[0].")

    def ghost(self) -> Gradient:
        """The result in a timing-only run, in which `values` is a `core.node.Ghost`."""
        return Gradient(self.values, loss=0.0, samples=0)


@dataclass(slots=True)
class Gradient:
    """A flat gradient, which its receiver owns, with the mean loss and the number of samples of its batch.

    Gradients of one stack are disjoint views of the same memory; copy a gradient that is kept for long. `buffers` is
    the worker's new snapshot, None for a model without buffers. `for_servers` is the part of the gradient that is not
    in `values`, since servers hold its parameters (`hybrid`). `checked`: the values are known to be finite. `faulty`
    ranks had a gradient that was not finite, and are left out of this mean. Where `values` are a part of a mean,
    `local` is the whole gradient of this worker, if its memory was kept.
    """

    values: Tensor
    loss: float
    samples: int
    buffers: Tensor | None = None
    for_servers: ServerGradient | None = None
    checked: bool = False
    faulty: Sequence[int] = ()
    local: Tensor | None = None

    def scaled(self, factor: float) -> Gradient:
        """Multiply this gradient by `factor` in place, and return it.

        It is not `checked` any more: scaled gradients are summed over a group, and a sum may overflow.
        """
        self.values *= factor
        self.checked = False
        if self.for_servers is not None:
            for part in (self.for_servers.whole, *(values for _, values in self.for_servers.rows)):
                part *= factor
        return self

    def with_values(self, values: Tensor) -> Gradient:
        """A copy with other `values`, which are not `checked`."""
        return replace(self, values=values, checked=False)

    def part(self, values: Tensor, *, keeps_local: bool) -> Gradient:
        """A copy whose `values` are this worker's part of a mean."""
        return replace(self, values=values, checked=False, local=self.values if keeps_local else None)


class ServerGradient(NamedTuple):
    """The gradient of the parameters that servers hold in a hybrid run (`GradientEngine.split_off`).

    `rows` has a pair for each table: the ascending numbers (count) of all rows that may differ from zero, and their
    values (count, width). `whole` is the flat gradient of the other parameters that servers hold.
    """

    rows: Sequence[tuple[torch.Tensor, torch.Tensor]]
    whole: torch.Tensor


class MeanGradients(Protocol):
    """The part of a worker's group that a source uses."""

    @property
    def encodes(self) -> bool:
        """Whether a codec encodes what travels over the group."""
        ...

    def mean_gradient(self, work: Any, share: float) -> Operation[Gradient]:
        """Start the gradient of `work`, times `share`, summed over the group."""
        ...

    def mean(self, values: torch.Tensor, share: float | None = None) -> Operation[torch.Tensor]:
        """Start on the mean of `values` over the group; each member has a `share` of the samples."""
        ...

    async def all_go_on(self, late: bool) -> bool:
        """Whether all members go on: none of them is `late`."""
        ...


class HeldShard(Protocol):
    """The part of a worker in what the workers of one part of a model would hold alike: ranges of a flat vector."""

    @property
    def own(self) -> Sequence[tuple[int, int]]:
        """The ranges, in the order of the shard."""
        ...

    async def part_of_mean(self, values: torch.Tensor, share: float) -> torch.Tensor:
        """This worker's part of the mean of `values`, of which each member has a `share`."""
        ...

    async def agreed(self, gradient: Gradient) -> Gradient:
        """Limit the norm of a gradient of which each worker has a part, and let all refuse one that is not finite."""
        ...

    async def sum_near(self, number: float) -> float:
        """The sum of a number over the workers that share a copy."""
        ...


class ShardedUnits(HeldShard, Protocol):
    """A shard of the parameters, which are gathered, and whose gradients are scattered, unit by unit."""

    def gather_unit(self, unit: int, memory: torch.Tensor) -> Operation[torch.Tensor]:
        """Begin to gather the parameters of a unit into `memory`."""
        ...

    def is_as_gathered(self, unit: int, memory: torch.Tensor) -> bool:
        """Whether the own part of a unit in `memory` is as it was gathered."""
        ...

    def scatter_unit(self, unit: int, gradient: torch.Tensor) -> Operation[torch.Tensor]:
        """Begin to sum the gradient of a unit over all members; the result is this worker's part."""
        ...

    def place_of(self, unit: int) -> int:
        """The start of a unit's part in the shard."""
        ...


class Requester(Protocol):
    """The part of a worker that a source uses: the worker requests a gradient.

    A restart restores `kept` and `kept_plain` (values that JSON has).
    """

    rank: int
    clock: int
    node: Node
    params: torch.Tensor
    buffers: torch.Tensor | None
    kept: dict[str, torch.Tensor]
    kept_plain: dict[str, Any]
    optimizer: LocalOptimizer
    lr: float | Sequence[float] | None

    @property
    def group(self) -> MeanGradients: ...

    @property
    def shard(self) -> HeldShard | None:
        """The shard of a worker that holds one."""
        ...

    @property
    def drained_at(self) -> int: ...

    @property
    def versions(self) -> list[int] | None:
        """The version of each shard of the parameters; None without servers."""
        ...

    def settle(self, values: torch.Tensor) -> None:
        """Copy the parameters to `values`, the memory in which a user's loop reads them."""
        ...


class GradientSource(Protocol):
    """Source of a worker's gradients: a job's data, or a user's own training loop.

    `can_stop`: whether a gradient can be cancelled after its start. `whole`: a gradient is that of the whole model, not
    that of a stage, and its time is the computation's.
    """

    batch_size: int
    can_stop: bool
    whole: bool

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        """Start the next gradient at the worker's parameters."""
        ...

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        """As `gradient`, averaged over the worker's group, weighted by batch size."""
        ...

    def model(self, requester: Requester) -> torch.Tensor:
        """The model of the worker: its parameters, unless the source keeps several versions of them."""
        ...

    async def settled(self) -> None:
        """Wait until others have received all that this source has sent."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class DataSource(GradientSource, Protocol):
    """A source that owns its data, so that it can compute the gradient of any samples, not only of the next ones.

    `samples` is the number of samples; `epoch` counts passes over this worker's samples.
    """

    @property
    def samples(self) -> int: ...

    @property
    def epoch(self) -> float: ...

    def next(self, requester: Requester) -> GradientWork:
        """Draw the next mini-batch; return the work of computing its gradient."""
        ...

    def gradient_again(self, requester: Requester, values: torch.Tensor) -> Operation[Gradient]:
        """Start another gradient of the last mini-batch, at `values`."""
        ...

    def gradient_at(
        self, requester: Requester, values: torch.Tensor, indices: torch.Tensor, *, draw: int
    ) -> Operation[Gradient]:
        """Start the mean gradient over given samples, at `values`."""
        ...


class LocalOptimizer(Protocol):
    """The optimizer of `Worker.step`: a rule on flat vectors (`FlatOptimizer`), or a user's own optimizer."""

    spec: OptimizerSpec

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None: ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


class JobSource:
    """Mini-batches of `batch_size` from `train`, the training data of a job, in the order of one worker's `sampler`.

    `share` is this worker's share of the group's batch, `flops` the operations of one mini-batch. With `sampler=None`
    (timing only), a unit of work has a size but no data.
    """

    can_stop = True
    whole = True

    def __init__(
        self,
        train: DataSet,
        sampler: BatchSampler | None,
        *,
        batch_size: int,
        share: float,
        seed: int,
        flops: float = 0.0,
    ) -> None:
        self.train = train
        self.sampler = sampler
        self.batch_size = batch_size
        self.share = share
        self.seed = seed
        self._flops = flops
        self._last: GradientWork | None = None

    @property
    def samples(self) -> int:
        """Number of training samples of the job."""
        return len(self.train)

    @property
    def epoch(self) -> float:
        """Passes so far over this worker's samples; over the shared samples if several workers share a stream."""
        return 0.0 if self.sampler is None else self.sampler.epoch

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        return requester.node.compute(self.next(requester))

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        return requester.group.mean_gradient(self.next(requester), self.share)

    def gradient_again(self, requester: Requester, values: torch.Tensor) -> Operation[Gradient]:
        """Start another gradient of the last mini-batch, at `values`, with the same random draws."""
        assert self._last is not None
        return requester.node.compute(replace(self._last, values=values, samples=0))

    def gradient_at(
        self, requester: Requester, values: torch.Tensor, indices: torch.Tensor, *, draw: int
    ) -> Operation[Gradient]:
        """Start the mean gradient over the samples `indices`, at `values`. The sampler does not advance.

        Random layers draw from (seed, `draw`), so the result does not depend on the worker or the time.
        """
        inputs = targets = None
        if self.sampler is not None:
            inputs, targets = self._batch(indices, (self.seed, 0, draw), values)
        work = GradientWork(
            rank=-1,
            step=draw,
            values=values,
            inputs=inputs,
            targets=targets,
            seed=self.seed,
            flops=self._flops * len(indices) / self.batch_size,
            buffers=requester.buffers,
            samples=len(indices),
        )
        return requester.node.compute(work)

    def _batch(self, indices: torch.Tensor, draw: Sequence[int], values: torch.Tensor) -> tuple[Batch, Batch]:
        """The samples `indices`, on the device of the parameters `values`."""
        inputs, targets = self.train.batch(indices, draw)
        device = values.device
        if device.type == "cpu":
            return inputs, targets
        return moved(inputs, device), moved(targets, device)

    def model(self, requester: Requester) -> torch.Tensor:
        return requester.params

    async def settled(self) -> None:
        """Return at once: no other node reads from this source."""

    def state(self) -> dict[str, Any]:
        return {} if self.sampler is None else dict(self.sampler.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.sampler is not None:
            self.sampler.restore(dict(state))

    def next(self, requester: Requester) -> GradientWork:
        """Draw the next mini-batch; return the work of computing its gradient at the requester's parameters."""
        inputs = targets = None
        if self.sampler is not None:
            draw = self.seed, 1 + requester.rank, requester.clock
            inputs, targets = self._batch(self.sampler.next(), draw, requester.params)
        self._last = GradientWork(
            rank=requester.rank,
            step=requester.clock,
            values=requester.params,
            inputs=inputs,
            targets=targets,
            seed=self.seed,
            flops=self._flops,
            buffers=requester.buffers,
            samples=self.batch_size,
        )
        return self._last
