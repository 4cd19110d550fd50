"""Collectives written from sends, in place of the engine's; the same code on every runtime.

`algorithms` has the algorithms. All broadcast down a tree, and their barrier is a dissemination. Only the ring has a
reduce_scatter of its own; with the others each rank keeps its slice of an all_reduce.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.core.node import Operation, nothing
from dure.core.vectors import Range, equal_ranges
from dure.topology.collective.algorithms import AllToAll, HalvingDoubling, Hierarchical, Ring, Torus, Tree, hosts_of
from dure.topology.collective.ranks import SERVICE, GroupFailure, Ranks

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.topology.collective.choice import Collective


class Algorithm(Protocol):
    """An algorithm of collectives, which work in place on the flat vector of each rank of its line."""

    async def all_reduce(self, whole: torch.Tensor) -> None: ...

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None: ...


def machines_of(topology: Collective, machines: Sequence[int]) -> Sequence[int]:
    """The machine of each rank: of those on `machines`, unless `topology` states the number of ranks per host."""
    per_host = topology.per_host
    return machines if per_host is None else [place // per_host for place in range(len(machines))]


def algorithm_of(topology: Collective, machines: Sequence[int] = ()) -> Callable[[Ranks], Algorithm]:
    """The maker of the algorithm that `topology` names, for ranks on `machines`; by default each rank has its own."""

    def make(line: Ranks) -> Algorithm:
        hosts = hosts_of(machines_of(topology, machines or line.ranks))
        if topology.algorithm == "hierarchical":
            return Hierarchical(line, hosts)
        if topology.algorithm == "torus":
            return Torus(line, len(hosts[0]))
        makers: dict[str, Callable[[Ranks], Algorithm]] = {
            "ring": Ring,
            "tree": Tree,
            "halving-doubling": HalvingDoubling,
            "all-to-all": AllToAll,
        }
        return makers[topology.algorithm](line)

    return make


class SentGroup:
    """A `Group` whose collectives are messages between its members.

    Every member runs its collectives one after another, in the order of the calls, while their callers go on. The loss
    of a member ends all of them at all members, with `PeerLost`.

    `algorithm` makes their algorithm, given the line of the members.
    """

    def __init__(self, node: Node, ranks: Sequence[int], algorithm: Callable[[Ranks], Algorithm], meter: Meter) -> None:
        self.ranks: Sequence[int] = tuple(ranks)
        self._node = node
        self._meter = meter
        self._loss = GroupFailure(node, self.ranks)
        node.serve(SERVICE, self._loss)
        self._line = Ranks(node, tuple(ranks), self._loss)
        self._algorithm = algorithm(self._line)
        self._last: Operation[Any] | None = None

    # ---- what members call

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._begin("the others' all_reduce", partial(self._all_reduce, tensor))

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._begin("the others' all_gather", partial(self._all_gather, tensor))

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._begin("the others' reduce_scatter", partial(self._reduce_scatter, tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        return self._begin("the root's broadcast", partial(self._broadcast, tensor, self.ranks.index(root)))

    def barrier(self) -> Operation[None]:
        return self._begin("the others at a barrier", self._barrier)

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """Compute a gradient, then sum it: nothing is sent before all of it is computed."""
        started = self._node.now()
        computing = self._node.compute(work)
        return self._begin("the group's mean gradient", partial(self._mean_gradient, computing, started, share))

    # ---- their work

    async def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        await self._algorithm.all_reduce(tensor.view(-1))
        return tensor

    async def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        size, here = tensor.numel(), self._line.here
        whole = tensor.new_empty(size * len(self.ranks))
        cuts = equal_ranges(whole.numel(), len(self.ranks))
        parts = [whole[start:stop] for start, stop in cuts]
        parts[here].copy_(tensor.view(-1))
        await self._algorithm.all_gather(whole, cuts)
        return [part.view_as(tensor) for part in parts]

    async def _reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone().view(-1)
        if isinstance(self._algorithm, Ring):
            return (await self._algorithm.reduce_scatter(total)).clone()
        await self._algorithm.all_reduce(total)
        start, stop = equal_ranges(total.numel(), len(self.ranks))[self._line.here]
        return total[start:stop].clone()

    async def _broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        whole = tensor.view(-1)
        if isinstance(self._algorithm, Hierarchical):
            await self._algorithm.broadcast(whole, root)
        else:
            size = len(self.ranks)
            tree = Tree(self._line.among([(root + place) % size for place in range(size)]))
            await tree.broadcast(whole, tree.ask_for(whole))
        return tensor

    async def _barrier(self) -> None:
        """In round r each rank sends to the one 2^r further. After the last round all have entered the barrier."""
        line, here, size = self._line, self._line.here, len(self.ranks)
        steps = [1 << r for r in range((size - 1).bit_length())]
        word = torch.empty(0, device="cpu")
        coming = [line.recv((here - step) % size, torch.empty_like(word)) for step in steps]
        for step, asked in zip(steps, coming, strict=True):
            sent = line.send((here + step) % size, word)
            await line.end(asked, (here - step) % size)
            await line.end(sent, (here + step) % size)

    async def _mean_gradient(self, computing: Operation[Any], started: float, share: float) -> Any:
        gradient = (await computing).scaled(share)
        computed = self._node.now()
        self._meter.add("compute", started, computed)
        await self._algorithm.all_reduce(gradient.values)
        self._meter.add("communicate", computed, self._node.now(), "all_reduce")
        return gradient

    # ---- one after another

    def _begin(self, label: str, work: Callable[[], Awaitable[Any]]) -> Operation[Any]:
        operation = self._last = self._node.spawn(self._in_turn(self._last, work), label)
        operation.when_done(nothing)  # its error is raised where it is awaited
        return operation

    async def _in_turn(self, before: Operation[Any] | None, work: Callable[[], Awaitable[Any]]) -> Any:
        # Members match messages by their order alone, so no two collectives may run at once. Only the end of the one
        # before is awaited, not its value: its error belongs to its own caller.
        if before is not None and not before.done:
            await self._node.first(before)
        self._loss.check()
        return await work()
