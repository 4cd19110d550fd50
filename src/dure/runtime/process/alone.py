"""The group of a single process: each collective returns the process's own tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core.node import Operation

if TYPE_CHECKING:
    import torch

    from dure.runtime.process.node import ProcessNode


class AloneGroup:
    """The `Group` of a process that trains alone; it sends nothing."""

    bytes_sent = bytes_received = messages = 0

    def __init__(self, node: ProcessNode) -> None:
        self.ranks: Sequence[int] = (node.rank,)
        self._node = node

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._done([tensor.clone()])

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._done(tensor.clone())

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        return self._done(tensor)

    def barrier(self) -> Operation[None]:
        return self._done(None)

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """Compute the gradient by `GradientEngine.backward`."""
        assert self._node.gradient_engine is not None
        self._node.gradient_engine.replica.zero_grad()
        return self._done(self._node.gradient_engine.backward(work, share))

    def _done(self, value: Any) -> Operation[Any]:
        operation: Operation[Any] = Operation(self._node.loop, "nobody")
        operation.resolve(value)
        return operation
