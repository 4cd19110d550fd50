"""The engine of an attached training loop: PyTorch's process group of all ranks."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dure.runtime.launch.own_address import one_family
from dure.runtime.launch.watchdog import without_watchdog
from dure.runtime.process.alone import AloneGroup
from dure.runtime.process.backends import backends_of, place_of
from dure.runtime.process.group import TIMEOUT, ProcessGroup

if TYPE_CHECKING:
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode


DESTROY_SECONDS = 2.0
"""Time limit for the destruction of a process group after a failure."""


class Engine:
    """The process group of all ranks in `rendezvous`, separate from the user's own process group if there is one.

    Tensors on `device` travel by the device's backend, those of control by Gloo, whichever the user's group has.
    `group` is the `Group` that methods use; `alone` is true in a world of one rank.
    """

    def __init__(self, node: ProcessNode, rendezvous: Rendezvous, device: torch.device) -> None:
        self.alone = rendezvous.place.world_size == 1
        self.group: ProcessGroup | AloneGroup = AloneGroup(node)
        self._engine: dist.ProcessGroup | None = None
        self._is_mine = False
        self._device = device
        self._connections: dict[int, str] = {}
        if self.alone:
            return
        world = range(rendezvous.place.world_size)
        given = dist.get_backend_config() if dist.is_initialized() else None
        backends = backends_of(device, rendezvous.exchange("device", place_of(device)), given)
        before = _sockets()
        with one_family(), without_watchdog(device):
            if given is not None:
                self._engine = dist.new_group(timeout=TIMEOUT, backend=backends)
            else:
                store = dist.PrefixStore("engine", rendezvous.store)  # type: ignore[attr-defined]
                dist.init_process_group(backends, store=store, rank=node.rank, world_size=len(world), timeout=TIMEOUT)
                self._is_mine = True
        self._connections = dict(_sockets().items() - before.items())
        self.group = ProcessGroup(node, world, self._engine)

    def close(self, *, failed: bool = False) -> None:
        """Destroy the process group; an operation of another rank that needs this rank fails.

        After a failure (`failed`), an operation of the engine may wait for a frozen rank. The engine would wait for
        that operation, here or at the end of the process. Its connections are broken first, which ends the operation.
        Gloo misses that if the operation has just begun, so that the destruction has a time limit. Its errors are no
        news, and would hide the failure. A second call does nothing.
        """
        is_mine, engine = self._is_mine, self._engine
        self._is_mine, self._engine = False, None
        if not is_mine and engine is None:
            return
        if not failed:
            dist.destroy_process_group(engine)
            return
        self._abort(engine)
        self._break_connections()
        destroying = Thread(target=_destroy_quietly, args=(engine,), name="end of the engine", daemon=True)
        destroying.start()
        destroying.join(DESTROY_SECONDS)

    def _abort(self, engine: dist.ProcessGroup | None) -> None:
        """End the operations of the device's backend, if it can: NCCL has other ways than sockets between devices."""
        group = engine or dist.group.WORLD
        if self._device.type != "cpu" and group is not None:
            with suppress(RuntimeError):  # only NCCL can
                group._get_backend(self._device).abort()

    def _break_connections(self) -> None:
        for descriptor, _ in self._connections.items() & _sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # sockets that listen stay
                    connection.shutdown(socket.SHUT_RDWR)
        self._connections = {}


def _destroy_quietly(engine: dist.ProcessGroup | None) -> None:
    with suppress(RuntimeError):
        dist.destroy_process_group(engine)


def _sockets() -> dict[int, str]:
    """The sockets of this process, by descriptor; empty where the system has no /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the folder itself, closed by now
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {descriptor: link for descriptor, link in found.items() if link.startswith("socket:")}
