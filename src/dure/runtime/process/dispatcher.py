"""Calls of the services of a process: from other processes, and from its own roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dure.core.log import log
from dure.core.node import Call, Loop, Operation, Reply, Service
from dure.errors import DureError, Refused, RemoteError

if TYPE_CHECKING:
    import torch


class Dispatcher:
    """Calls the `services` of the process `name`, and answers with their replies or errors."""

    def __init__(self, name: str, loop: Loop, services: Mapping[str, Service]) -> None:
        self._name = name
        self._loop = loop
        self._services = services

    def call_own(
        self, operation: Operation[Reply], service: str, call: Call, into: Sequence[torch.Tensor] | None
    ) -> None:
        """Resolve `operation` with the answer of an own service, whose tensors are copied to `into`."""

        def answered(answer: Reply | RemoteError) -> None:
            if isinstance(answer, RemoteError):
                operation.fail(answer)
                return
            if into is not None:
                for destination, tensor in zip(into, answer.tensors, strict=True):
                    destination[: tensor.numel()].copy_(tensor)
                answer.release()
            operation.resolve(answer)

        self.handle(service, call, answered)

    def handle(
        self, service: str, call: Call, respond: Callable[[Reply | RemoteError], None], *, isolated: bool = False
    ) -> None:
        """Answer `call` by a service of this node, at once or later.

        An error in the handler of an `isolated` call fails that call but not this process.
        """
        try:
            answer = self._services[service].handle(call)
        except Exception as error:  # noqa: BLE001  (an error of the handler is the answer)
            respond(self._answer(service, call, error, isolated=isolated))
            return
        if isinstance(answer, Reply):
            respond(answer)
            return
        later: Operation[Reply] = (
            answer if isinstance(answer, Operation) else self._loop.spawn(answer, f"{call.method} for {call.caller}")  # type: ignore[arg-type]
        )

        def done() -> None:
            try:
                reply = later.result()
            except Exception as error:  # noqa: BLE001  (as above)
                respond(self._answer(service, call, error, isolated=isolated))
            else:
                respond(reply)

        later.when_done(done)

    def _answer(self, service: str, call: Call, error: Exception, *, isolated: bool) -> RemoteError:
        """The answer for an error of a handler. Raises an unexpected error unless the call is `isolated`."""
        if isinstance(error, RemoteError):
            return error
        if isinstance(error, DureError):
            return Refused(str(error))
        if not isolated:
            raise error
        return self.failed(service, call, error)

    def failed(self, service: str, call: Call, error: Exception) -> Refused:
        """Log the `error` of a handler. Return the answer for the caller."""
        place = f"{call.method} of {service} at {self._name}"
        log.error("%s, called by %s, has failed.", place, call.caller, exc_info=error)
        return Refused(f"{place} has failed with {type(error).__name__}: {error}")
