"""The model of a worker as a service: actors pull its parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core.node import Call, Node, Operation, Reply
from dure.core.protocol import ACTORS, COUNT, RemoteService, remote

if TYPE_CHECKING:
    import torch


class ModelService(RemoteService):
    """The newest model of the worker at `node`, and its version: the updates that the model has had.

    A model is its parameters, and the buffers that training changes if it has some.

    A worker over servers has the updates of all workers in its model. `step` counts those that it has made itself.
    """

    called = "a model"

    def __init__(self, node: Node) -> None:
        self.node = node
        self.step = -1
        self.version = 0
        self._model: tuple[torch.Tensor, ...]
        self._waiting: list[Operation[Any]] = []

    def publish(self, model: Sequence[torch.Tensor], step: int, version: int) -> None:
        """Answer pulls with a copy of `model` from now on: its memory is written to before the next call."""
        self._model = tuple(each.detach().clone() for each in model)
        self.step, self.version = step, version
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.resolve()

    @remote(ACTORS, at_least=COUNT)
    async def _pull(self, call: Call) -> Reply:
        """Version and model, once the worker has made so many steps."""
        while self.step < call.fields["at_least"]:
            self._waiting.append(self.node.promise(f"step {call.fields['at_least']} of the model"))
            await self._waiting[-1]
        return Reply({"version": self.version}, tuple(each.cpu() for each in self._model))
