"""Collectives in virtual time. Sums are in rank order; seconds are the closed form of a ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

from dure.core.node import Ghost, Operation
from dure.core.shards import Shards
from dure.core.step_shape import GradientTensor
from dure.core.vectors import Range, all_finite, equal_ranges, gather, size
from dure.errors import PeerLost
from dure.job.gradient import Gradient, GradientWork
from dure.runtime.virtual.buckets import Computed, end_of_step

if TYPE_CHECKING:
    import torch

    from dure.core.accelerator_cost import LeveledCost
    from dure.core.collective_cost import Cost
    from dure.core.meter import Meter
    from dure.core.step_shape import StepShape
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.kernel import Kernel
    from dure.runtime.virtual.network import Network


class GroupRuntime(Protocol):
    """The part of the virtual runtime that a group uses."""

    kernel: Kernel
    network: Network
    cluster: Cluster
    slices: Sequence[tuple[int, float]]
    shape: StepShape
    groups: dict[Sequence[int], Any]

    @property
    def nodes(self) -> Mapping[str, GroupNode]: ...


class GroupNode(Protocol):
    """The part of a node that a group uses."""

    rank: int
    alive: bool
    loaded: float
    meter: Meter
    payload_sent: int
    payload_received: int

    @property
    def runtime(self) -> GroupRuntime: ...

    def compute(self, work: GradientWork) -> Operation[Any]: ...


class Round:
    """One collective: operation and value of each rank that has arrived, and the times of its gradient.

    A rank requests it, it starts when its data are there, and it ends. With `shards` each rank gets a part of the sum.
    """

    __slots__ = ("arrived", "compute_ended", "kind", "requested", "shards", "started")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.shards: Shards | None = None
        self.arrived: dict[int, tuple[Operation[Any], Any]] = {}
        self.requested: dict[int, float] = {}
        self.started: dict[int, float] = {}
        self.compute_ended: dict[int, float] = {}


class CollectiveRounds:
    """The rounds of one set of ranks; the n-th operation of each member is part of round n.

    One object for all members holds what depends on the ranks alone. `present` are the ranks that the runtime has: all,
    or those of one replica, where replicas are alike. A round costs as many seconds as one of all `ranks`.
    """

    def __init__(self, runtime: GroupRuntime, ranks: Sequence[int]) -> None:
        self.runtime = runtime
        self.ranks = ranks
        self._indices = [runtime.network.node(f"worker {rank}") for rank in ranks]
        self.places = [place for place, rank in enumerate(ranks) if f"worker {rank}" in runtime.nodes]
        self.present = [ranks[place] for place in self.places]
        self.names = [f"worker {rank}" for rank in self.present]
        self._costs: dict[tuple[str, int, int, bool], Cost | LeveledCost] = {}
        self.rounds: dict[int, Round] = {}
        self.counts = dict.fromkeys(ranks, 0)
        self.gone: set[int] = set()
        self._free = 0.0

    def join(self, rank: int, kind: str) -> tuple[int, Round]:
        """Count an operation of `rank`. Return the number of its round, and the round."""
        number = self.counts[rank]
        self.counts[rank] += 1
        round_ = self.rounds.setdefault(number, Round(kind))
        if round_.kind != kind:
            raise ValueError(f"worker {rank} calls {kind} and others {round_.kind}: a group's members must agree")
        return number, round_

    def lose(self, rank: int) -> None:
        """Fail the open rounds after a crash of `rank`: a collective needs every member."""
        # Also for rounds that begin later: no collective of these ranks can end any more.
        self.gone.add(rank)
        for round_ in self.rounds.values():
            if rank not in round_.arrived:
                for operation, _ in round_.arrived.values():
                    operation.fail(self._lost(rank))

    def _lost(self, rank: int) -> PeerLost:
        return PeerLost(
            f"worker {rank} is gone, and a collective needs every rank. "
            "Use a method over a parameter server (ps), or resume from the last checkpoint."
        )

    def arrive(
        self, number: int, rank: int, operation: Operation[Any], value: Any, end: Callable[[Round], None]
    ) -> None:
        """Record the `value` of `rank`; the last member to arrive ends the round."""
        if self.gone:
            operation.fail(self._lost(min(self.gone)))
            return
        round_ = self.rounds[number]
        round_.arrived[rank] = (operation, value)
        if len(round_.arrived) == len(self.present):
            del self.rounds[number]
            end(round_)

    def cost(self, kind: str, nbytes: int, itemsize: int, *, gradient: bool = False) -> Cost | LeveledCost:
        """As `Network.cost` for all ranks, computed once for each size."""
        key = (kind, nbytes, itemsize, gradient)
        if key not in self._costs:
            self._costs[key] = self.runtime.network.cost(kind, nbytes, self._indices, itemsize, gradient=gradient)
        return self._costs[key]

    def in_turn(self, seconds: float) -> float:
        """The end of a collective of shards that all members have come to now: it begins at the end of the last one."""
        self._free = max(self._free, self.runtime.kernel.now) + seconds
        return self._free

    def charge(self, kind: str, nbytes: int, itemsize: int) -> float:
        """Count the bytes of a collective. Return its seconds on this cluster."""
        cost = self.cost(kind, nbytes, itemsize)
        self.runtime.network.count(cost, self._indices)
        if nbytes:
            for name, place in zip(self.names, self.places, strict=True):
                node = self.runtime.nodes[name]
                node.payload_sent += cost.sent[place]
                node.payload_received += cost.received[place]
        return cost.seconds


def shared(ranks: Sequence[int]) -> Sequence[int]:
    """The key of the rounds of `ranks`: a range where they are consecutive, to save memory with many ranks."""
    consecutive = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    return consecutive if ranks == consecutive or tuple(ranks) == tuple(consecutive) else tuple(ranks)


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of `tensors` in the given order, which makes it reproducible bit for bit."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result += tensor
    return result


class VirtualGroup:
    """A group of workers, as seen by one member."""

    def __init__(self, node: GroupNode, ranks: Sequence[int]) -> None:
        self.node = node
        # Members of equal ranks meet in one object, whichever of them makes its group first.
        key, runtime = shared(ranks), node.runtime
        if key not in runtime.groups:
            runtime.groups[key] = CollectiveRounds(runtime, key)
        self.collective_rounds: CollectiveRounds = runtime.groups[key]
        self.ranks = self.collective_rounds.ranks

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        def share(values: list[torch.Tensor]) -> list[torch.Tensor]:
            result = total(values)
            return [value if isinstance(value, Ghost) else value.copy_(result) for value in values]

        return self._collective("all_reduce", tensor, share)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._collective("all_gather", tensor, lambda values: [[v.clone() for v in values] for _ in values])

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        def share(values: list[torch.Tensor]) -> list[torch.Tensor]:
            result, rounds = total(values), self.collective_rounds
            cuts = equal_ranges(result.numel(), len(rounds.ranks))
            return [result[cuts[place][0] : cuts[place][1]].clone() for place in rounds.places]

        return self._collective("reduce_scatter", tensor, share, nbytes=tensor.nbytes)

    def gather(self, whole: torch.Tensor, held: Sequence[Sequence[Range]]) -> Operation[torch.Tensor]:
        def share(values: list[torch.Tensor]) -> list[torch.Tensor]:
            if isinstance(whole, Ghost):
                return values
            for (here, value), (there, other) in product(enumerate(values), repeat=2):
                for start, stop in held[there] if here != there else ():
                    value[start:stop] = other[start:stop]
            return values

        return self._collective("all_gather", whole, share, nbytes=size(list(held[0])) * _itemsize(whole))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        position = self.collective_rounds.present.index(root)

        def share(values: list[torch.Tensor]) -> list[torch.Tensor]:
            return [value if value is values[position] else value.copy_(values[position]) for value in values]

        return self._collective("broadcast", tensor, share)

    def barrier(self) -> Operation[None]:
        return self._collective("barrier", Ghost(0), lambda values: [None] * len(values))

    def _collective(
        self, kind: str, value: Any, share: Callable[[list[Any]], Sequence[Any]], *, nbytes: int | None = None
    ) -> Operation[Any]:
        """A collective of the members' values, of which `share` gives each its result.

        One of shards states the `nbytes` that it costs. A worker begins several of these ahead: they take turns.
        """
        runtime, collective_rounds = self.node.runtime, self.collective_rounds
        operation: Operation[Any] = Operation(runtime.kernel, f"{kind} with the others")
        number, _ = collective_rounds.join(self.node.rank, kind)

        def end(round_: Round) -> None:
            order = [round_.arrived[rank] for rank in collective_rounds.present]
            first = order[0][1]
            spent = first.nbytes if nbytes is None else nbytes
            seconds = collective_rounds.charge(kind, spent, _itemsize(first))
            ended = collective_rounds.in_turn(seconds) if nbytes is not None else runtime.kernel.now + seconds

            def finish() -> None:
                for (waiting, _), result in zip(order, share([v for _, v in order]), strict=True):
                    waiting.resolve(result)

            runtime.kernel.at(ended, finish)

        collective_rounds.arrive(number, self.node.rank, operation, value, end)
        return operation

    def mean_gradient(self, work: GradientWork, share: float) -> Operation[Gradient]:
        return self._mean(work, share, None)

    def mean_part(self, work: GradientWork, share: float, shards: Shards) -> Operation[Gradient]:
        return self._mean(work, share, shards)

    def _mean(self, work: GradientWork, share: float, shards: Shards | None) -> Operation[Gradient]:
        """Compute the group's mean gradient; its first slices are reduced while backward computes the last.

        The slices are those of a real run (`overlap.cut`), the buckets those of the library of accelerators. Backward
        completes gradients at the times of the step's shape.
        """
        runtime, collective_rounds, node = self.node.runtime, self.collective_rounds, self.node
        operation: Operation[Gradient] = Operation(runtime.kernel, "the group's mean gradient")
        number, round_ = collective_rounds.join(node.rank, "mean_gradient")
        round_.shards = shards
        round_.requested[node.rank] = runtime.kernel.now
        computation = node.compute(work)
        round_.started[node.rank] = max(runtime.kernel.now, node.loaded)

        def computed() -> None:
            if not node.alive:
                return
            gradient: Gradient = computation.result()
            round_.compute_ended[node.rank] = runtime.kernel.now
            collective_rounds.arrive(number, node.rank, operation, gradient.scaled(share), self._end_gradients)

        computation.when_done(computed)
        return operation

    def _end_gradients(self, round_: Round) -> None:
        runtime = self.node.runtime
        order = [round_.arrived[rank] for rank in self.collective_rounds.present]
        started, ended = round_.started, round_.compute_ended
        kind = "all_reduce" if round_.shards is None else "reduce_scatter"
        self.collective_rounds.charge(kind, order[0][1].values.nbytes, _itemsize(order[0][1].values))
        last = max(ended.values())
        finish = max(last, self._slices_sent(started, ended, order[0][1].values, kind))
        for rank, name in zip(self.collective_rounds.present, self.collective_rounds.names, strict=True):
            meter = runtime.nodes[name].meter
            meter.add("compute", round_.requested[rank], ended[rank])
            meter.add("wait", ended[rank], last)
            meter.add("communicate", last, finish, kind)

        def deliver() -> None:
            mean = total([gradient.values for _, gradient in order])
            checked = not isinstance(mean, Ghost) and all_finite(mean)  # once for all members
            for place, (operation, gradient) in enumerate(order):
                if round_.shards is not None:
                    part = _part(mean, round_.shards, place)
                    operation.resolve(gradient.part(part, keeps_local=not round_.shards.frees_gradients))
                    continue
                gradient.values.copy_(mean)
                gradient.checked = checked
                operation.resolve(gradient)

        runtime.kernel.at(finish, deliver)

    def _slices_sent(
        self, started: Mapping[int, float], ended: Mapping[int, float], gradient: torch.Tensor, kind: str
    ) -> float:
        """Time at which the last slice is reduced: slices in turn, each once all members have computed it."""
        runtime, itemsize, free = self.node.runtime, _itemsize(gradient), 0.0
        backward, slices = runtime.shape.backward, runtime.slices
        if runtime.cluster.accelerated:
            return self._buckets_sent(started, ended, gradient, kind)
        for numel, left in slices or [(gradient.numel(), 0.0)]:
            # A slice can leave once the slowest member has computed it; `left` is the share of backward after that.
            there = max(ended[r] - (ended[r] - started[r]) * backward * left for r in ended)
            cost = self.collective_rounds.cost(kind, numel * itemsize, itemsize, gradient=True)
            free = max(free, there) + cost.seconds
        return free

    def _buckets_sent(
        self, started: Mapping[int, float], ended: Mapping[int, float], gradient: torch.Tensor, kind: str
    ) -> float:
        """Time at which an engine of accelerators has reduced the last bucket, and the optimizer has applied it."""
        runtime, rounds, itemsize = self.node.runtime, self.collective_rounds, _itemsize(gradient)
        if len(rounds.ranks) == 1:  # no library: nothing is summed
            return max(ended.values())
        computed = [Computed(started[rank], ended[rank] - started[rank]) for rank in ended]
        shape = runtime.shape
        if not shape.tensors:  # the gradient of a part of the model
            shape = replace(shape, tensors=(GradientTensor(0, gradient.numel(), 1.0),))

        def seconds(nbytes: int) -> float:
            return rounds.cost(kind, nbytes, itemsize, gradient=True).seconds

        return end_of_step(shape, computed, len(rounds.ranks), runtime.cluster.engine_in_use, itemsize, seconds)


def _part(mean: torch.Tensor, shards: Shards, place: int) -> torch.Tensor:
    """The part of a mean gradient that the member at `place` holds."""
    return mean.new_empty(shards.numels[place]) if isinstance(mean, Ghost) else gather(mean, shards.of(place))


def _itemsize(tensor: torch.Tensor) -> int:
    """Bytes of an element; 1 for a tensor without elements."""
    return tensor.nbytes // max(tensor.numel(), 1) or 1
