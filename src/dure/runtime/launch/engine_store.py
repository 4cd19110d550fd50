"""The store through which the workers of a run set up the engine's collectives.

| workers | store | other processes that can reach it |
|---|---|---|
| on this machine | a file | processes of the same user |
| on several machines | a TCP server on one interface | all that reach the interface: the engine's store has no key |
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

CONNECT_SECONDS = 60.0
"""Time limit for a worker to reach the store."""


class EngineStore:
    """The store of one run, open until `close`: a file, or a server on the address `interface` if that is given.

    Workers pass `place`, a path, or host and port (JSON values), to `connected`.
    """

    def __init__(self, interface: str | None, workers: int) -> None:
        self._undo = ExitStack()
        self._server: Any = None
        self.place: list[Any] = [self._file()] if interface is None else self._listening(interface, workers)

    def close(self) -> None:
        self._server = None
        self._undo.close()

    def _file(self) -> str:
        """Make a file that no other user can open. On Linux it is in memory and has no name, so that none remains."""
        if sys.platform == "linux":
            file = os.memfd_create("dure store", os.MFD_CLOEXEC)
            self._undo.callback(os.close, file)
            return f"/proc/{os.getpid()}/fd/{file}"
        folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="dure-"))  # its mode is 0700
        return os.path.join(folder, "store")

    def _listening(self, interface: str, workers: int) -> list[Any]:
        self._server = listening_store(interface, 0, workers)
        return [interface, self._server.port]


def listening_store(interface: str, port: int, workers: int) -> Any:
    """Open the engine's TCP store on one interface; by default it would listen on all of them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with contextlib.closing(socket.create_server((interface, port), family=family, backlog=1024)) as sock:
        port = int(sock.getsockname()[1])
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        options["multi_tenant"] = True  # the user's own init_process_group may use the port too, in this process
        return TCPStore(interface, port, workers, master_listen_fd=sock.detach(), **options)


def connected(place: Sequence[Any], workers: int) -> Store:
    """Connect a worker to the store at `place`."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if len(place) == 1:
        return FileStore(str(place[0]), -1)
    return TCPStore(place[0], int(place[1]), workers, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
