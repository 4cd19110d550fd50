"""The engine of an attached training loop: PyTorch's process group of all ranks."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as dist

from dure.runtime.process.alone import AloneGroup
from dure.runtime.process.group import TIMEOUT, ProcessGroup

if TYPE_CHECKING:
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode


class Engine:
    """The process group of all ranks in `rendezvous`, separate from the user's own process group if there is one.

    `group` is the `Group` that methods use; `alone` is true in a world of one rank.
    """

    def __init__(self, node: ProcessNode, rendezvous: Rendezvous) -> None:
        self.alone = rendezvous.place.world_size == 1
        self.group: ProcessGroup | AloneGroup = AloneGroup(node)
        self._engine: dist.ProcessGroup | None = None
        self._is_mine = False
        self._connections: dict[int, str] = {}
        if self.alone:
            return
        before = _sockets()
        world = range(rendezvous.place.world_size)
        if dist.is_initialized():
            self._engine = dist.new_group(timeout=TIMEOUT)
        else:
            store = dist.PrefixStore("engine", rendezvous.store)  # type: ignore[attr-defined]
            dist.init_process_group(store=store, rank=node.rank, world_size=len(world), timeout=TIMEOUT)
            self._is_mine = True
        self._connections = dict(_sockets().items() - before.items())
        self.group = ProcessGroup(node, world, self._engine)

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process group; an operation of another rank that needs this rank fails.

        After a failure (`failed`), an operation of the engine may wait for a frozen rank. The engine would wait for
        that operation, here or at the end of the process. Its connections are broken first, which ends the operation.
        """
        if failed:
            self._break_connections()
        if self._is_mine:
            dist.destroy_process_group()
        elif self._engine is not None:
            dist.destroy_process_group(self._engine)
        self._is_mine, self._engine = False, None

    def _break_connections(self) -> None:
        for descriptor, _ in self._connections.items() & _sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # sockets that listen stay
                    connection.shutdown(socket.SHUT_RDWR)
        self._connections = {}


def _sockets() -> dict[int, str]:
    """The sockets of this process, by descriptor; empty where the system has no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the folder itself, closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {descriptor: link for descriptor, link in found.items() if link.startswith("socket:")}
