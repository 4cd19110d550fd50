"""The short way between two processes of one machine: a Unix socket beside the TCP port.

It costs the kernel less than TCP over loopback (measured: 31 against 43 ms for 100 MB there and back). A host that
listens on a loopback port listens on `unix_name(port)` as well; a caller tries that first. The name is free to
take for anybody on the machine, so either side checks that the other belongs to the same user, and else uses TCP.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("3i")  # process, user, group
IS_LINUX = sys.platform == "linux"  # where names need no file and credentials can be asked for


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback address."""
    return host.startswith("127.")


def unix_name(port: int) -> str:
    """What the Unix socket beside TCP port `port` is called: an abstract name, as long-lived as its socket."""
    return f"\0dure port {port}"


def listen_unix(port: int) -> socket.socket | None:
    """A listening socket, or None where there is no such thing or the name is taken."""
    if not IS_LINUX:
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(unix_name(port))
        sock.listen(1024)
    except OSError:
        sock.close()
        return None
    return sock


def connect_unix(port: int) -> socket.socket | None:
    """A connected, non-blocking socket, or None."""
    if not IS_LINUX:
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    if sock.connect_ex(unix_name(port)) == 0 and is_mine(sock):
        return sock
    sock.close()
    return None


def process_behind(sock: socket.socket) -> int | None:
    """The process at the other end of a Unix socket, if this one may map memory of it."""
    if not IS_LINUX or sock.family != socket.AF_UNIX:
        return None
    process: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return process if process and os.access(f"/proc/{process}/fd", os.R_OK | os.X_OK) else None


def has_memory(process: int | None) -> bool:
    """Whether a process of this machine may still read anything. What is killed loses its sockets last."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[0]) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_mine(sock: socket.socket) -> bool:
    """Whether the other end of a connected Unix socket is a process of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
