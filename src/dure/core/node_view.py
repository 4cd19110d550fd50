"""A node under other names: the same stage of several pipelines is a set of workers of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dure.core.deployment import WORKER, NodeId
from dure.core.node import Address, Call, Operation, Reply, Service, TensorSpec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    import torch

    from dure.core.node import Group, Node, Work

T = TypeVar("T")


class Names:
    """Names of some nodes of a run among themselves: node i of a kind is node `ranks[kind][i]` of the run.

    A node of these kinds that is not in the set gets a number behind those of the set; other names stay.

    >>> names = Names({"worker": [1, 3, 5]})
    >>> names.outside("worker 2"), names.inside("worker 5"), names.inside("worker 0"), names.outside("driver")
    ('worker 5', 'worker 2', 'worker 3', 'driver')
    """

    def __init__(self, ranks: Mapping[str, Sequence[int]]) -> None:
        self.ranks = ranks
        self._outside = {
            str(NodeId(kind, rank)): str(NodeId(kind, there))
            for kind in ranks
            for rank, there in enumerate(ranks[kind])
        }
        self._inside = {there: here for here, there in self._outside.items()}

    def outside(self, name: str) -> str:
        """The name in the run of a node of this set; other names stay."""
        return self._outside.get(name, name)

    def inside(self, name: str) -> str:
        """The name in this set of a node of the run."""
        found = self._inside.get(name)
        if found is not None:
            return found
        kind, _, rank = name.partition(" ")
        return str(NodeId(kind, len(self.ranks[kind]) + int(rank))) if kind in self.ranks else name

    def has(self, name: str) -> bool:
        """Whether a node of the run is in this set, or of a kind without a set."""
        return name in self._inside or name.partition(" ")[0] not in self.ranks


class NodeView:
    """The node `node` of a run under the names of a set: translates the names of peers, and passes operations on."""

    def __init__(self, node: Node, names: Names) -> None:
        self.real = node
        self.names = names
        self.name = names.inside(node.name)
        self.rank = node.rank if self.name == node.name else NodeId.of(self.name).rank

    @property
    def rng(self) -> np.random.Generator:
        return self.real.rng

    @property
    def incarnation(self) -> int:
        return self.real.incarnation

    @property
    def engine_inside(self) -> bool:
        return self.real.engine_inside

    def borrows(self, peer: str, nbytes: int) -> bool:
        return self.real.borrows(self.names.outside(peer), nbytes)

    def reaches(self, peer: str) -> bool:
        return self.real.reaches(self.names.outside(peer))

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return self.real.overlapped(*values)

    def compute(self, work: Work) -> Operation[Any]:
        return self.real.compute(work)

    def call(
        self,
        service: Address,
        method: str,
        *tensors: torch.Tensor,
        into: Sequence[torch.Tensor] | None = (),
        at_most: bool = False,
        timeout: float | None = None,
        **fields: Any,
    ) -> Operation[Reply]:
        there = Address(self.names.outside(service.node), service.service)
        return self.real.call(there, method, *tensors, into=into, at_most=at_most, timeout=timeout, **fields)

    def send(self, peer: str, tensor: torch.Tensor, *, tag: int = 0) -> Operation[None]:
        return self.real.send(self.names.outside(peer), tensor, tag=tag)

    def recv(self, peer: str, into: torch.Tensor, *, tag: int = 0) -> Operation[torch.Tensor]:
        return self.real.recv(self.names.outside(peer), into, tag=tag)

    def group(self, ranks: Sequence[int]) -> Group:
        return GroupView(self.real.group([self.names.ranks[WORKER][rank] for rank in ranks]), ranks)

    def first(self, *operations: Operation[Any], timeout: float | None = None) -> Operation[Operation[Any] | None]:
        return self.real.first(*operations, timeout=timeout)

    def spawn(self, coroutine: Coroutine[Operation[Any], None, T], name: str = "") -> Operation[T]:
        return self.real.spawn(coroutine, name)

    def sleep(self, seconds: float, *, background: bool = False) -> Operation[None]:
        return self.real.sleep(seconds, background=background)

    def now(self) -> float:
        return self.real.now()

    def promise(self, label: str) -> Operation[Any]:
        return self.real.promise(label)

    def serve(self, name: str, service: Service) -> Address:
        self.real.serve(name, ServiceView(service, self.names))
        return Address(self.name, name)

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.real.room_like(tensor)


class GroupView:
    """A group whose `ranks` count its nodes among themselves."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group = group
        self.ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._group.all_reduce(tensor)

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        return self._group.mean_gradient(work, share)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._group.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._group.reduce_scatter(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        return self._group.broadcast(tensor, root)

    def barrier(self) -> Operation[None]:
        return self._group.barrier()


class ServiceView:
    """Passes calls and losses of nodes to `service`, with the names that the nodes have in the set."""

    def __init__(self, service: Service, names: Names) -> None:
        self._service = service
        self._names = names
        protocol = getattr(service, "protocol", None)
        if protocol is not None:
            self.protocol = protocol

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        return self._service.handle(self.seen(call))

    def seen(self, call: Call) -> Call:
        """The call as the service sees it."""
        return replace(call, caller=self._names.inside(call.caller))

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return self._service.expects(method)

    def lost(self, name: str) -> None:
        """Report the loss of a node to the service, unless another set has the node."""
        lost = getattr(self._service, "lost", None)
        if lost is not None and self._names.has(name):
            lost(self._names.inside(name))
