"""Needs of the engine (`torch.distributed`) on this machine: a store, a network interface, and no watchdog.

The workers of a run set up the engine's collectives through a store:

| workers | store | other processes that can reach it |
|---|---|---|
| on this machine | a file | processes of the same user |
| on several machines | a TCP server on one interface | all that reach the interface: the engine's store has no key |

The interface is that by which other machines reach this one:

| name of the other machine leads to | address of this machine |
|---|---|
| IPv4 addresses | the IPv4 address of its route there |
| IPv6 addresses | the IPv6 address of its route there |
| both | IPv4 if there is a route, else IPv6: the engine too takes the IPv4 address of an interface with both |
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.text import quoted
from dure.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

ENGINE_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of the engine: the network interface of its collectives."""

_SIOCGIFADDR = 0x8915  # Linux; on other systems the engine chooses the interface

CONNECT_SECONDS = 60.0
"""Time limit for a worker to reach the store."""

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""The setting by which NCCL's backend starts no watchdog. It is read when a group is created."""


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


def address_toward(host: str) -> str:
    """The address of this machine on its route to `host`. Raises `UsageError` if there is none."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a machine has such a part
        reason = f"this machine finds no address of it: {getattr(error, 'strerror', error)}"
        right = f" Write {host.strip('[]')}, without brackets." if host.startswith("[") else ""
        raise UsageError(f"MASTER_ADDR is {quoted(host)}, and {reason}.{right}") from None
    reasons = []
    for family, kind, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing, but finds the route
            except OSError as error:
                reasons.append(f"{address[0]} ({error.strerror})")
            else:
                return _checked(str(probe.getsockname()[0]), host)
    raise UsageError(f"MASTER_ADDR is {host!r}, and this machine cannot reach its address {', '.join(reasons)}.")


def _checked(address: str, host: str) -> str:
    """Refuse an address whose meaning depends on the machine that reads it."""
    if ipaddress.ip_address(address).is_link_local and ":" in address:
        raise UsageError(
            f"MASTER_ADDR is {host!r}, which this machine reaches from {address}: the address of one link, which other "
            "machines cannot use. Give an address that all machines have, such as a unique local one (fd00::/8)."
        )
    return address


def lead_engine(address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the engine's network interface to the one with `address`, unless the environment sets one.

    By default the engine takes the interface of the machine's own name: on many machines the loopback, where no other
    machine can reach it.
    """
    name = _interface_at(address)
    if name is not None:
        environ.setdefault(ENGINE_INTERFACE, name)


@contextmanager
def one_family(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Raise `UsageError` in place of the engine's error if it takes IPv4 addresses at some ranks and IPv6 at others."""
    try:
        yield
    except RuntimeError as error:
        if "ss_family" not in str(error):
            raise
        raise UsageError(
            f"the engine's collectives take the first address of the interface {environ.get(ENGINE_INTERFACE)}: IPv4 "
            "at some ranks, and IPv6 at others that have no IPv4. Give this interface IPv4 addresses at all machines, "
            "or at none. Or write topology collective:algorithm=ring or ps, which use the family of MASTER_ADDR."
        ) from None


def _interface_at(address: str) -> str | None:
    """The network interface whose address is `address`."""
    if ":" in address:
        return _interface_at_ipv6(ipaddress.IPv6Address(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _interface_at_ipv6(address: ipaddress.IPv6Address) -> str | None:
    with suppress(OSError):  # only Linux has the file
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            if bytes.fromhex(line.split()[0]) == address.packed:
                return line.split()[-1]
    return None


@contextmanager
def without_watchdog(device: torch.device) -> Iterator[None]:
    """While open, create groups without a watchdog for a rank on `device`. Groups of the user's own keep theirs."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
