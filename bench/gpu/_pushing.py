"""A node of a device replica, and a server in another process that takes its messages and forgets them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from _check import Setting, target
from torch import Tensor

from dure.core.node import Address, Call, Reply, TensorSpec
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity

CREDENTIALS = Credentials(bytes(32))  # both processes know them
SINK = Address("server 0", "sink")


class Sink:
    """Takes messages (`uint8`) and values (`float32`) of at most `numel` elements."""

    def __init__(self, numel: int) -> None:
        kinds = {"message": ("uint8", 4 * numel), "values": ("float32", numel)}
        self._specs = {method: [TensorSpec(*spec, at_most=True)] for method, spec in kinds.items()}

    def handle(self, call: Call) -> Reply:
        return Reply()

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return self._specs[method]


def push(node: ProcessNode, tensor: Tensor) -> None:
    """Send a tensor of the device; returns when the server has it."""
    method = "message" if tensor.dtype == torch.uint8 else "values"

    async def pushing() -> None:
        await node.call(SINK, method, tensor)

    node.loop.run_until(node.spawn(pushing(), "pushing"))


@contextmanager
def pushing_node(setting: Setting, numel: int) -> Iterator[ProcessNode]:
    """A node whose tensors are on the device, connected to a `Sink`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(theirs, numel), daemon=True)
    server.start()
    node = ProcessNode(Identity("gpu", "worker 0"), CREDENTIALS, device=target.of_rank(0))
    try:
        if not ours.poll(60):
            raise SystemExit("the server did not start")
        node.directory["server 0"] = ("127.0.0.1", ours.recv())
        yield node
    finally:
        node.wire.close()
        server.join(10)
        server.kill()


def _serve(pipe: Connection, numel: int) -> None:
    torch.set_num_threads(1)
    node = ProcessNode(Identity("gpu", "server 0"), CREDENTIALS)
    node.serve("sink", Sink(numel))
    pipe.send(node.wire.listen())
    node.loop.wire = node.wire
    lost: list[object] = []
    node.on_lost = lost.append
    while not lost:
        node.loop.turn(1.0)
