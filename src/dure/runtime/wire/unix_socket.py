"""Unix sockets between processes of one machine, in addition to a TCP port.

They cost the kernel less than TCP over loopback (measured: 31 against 43 ms for 100 MB in both directions). A host that
listens on a loopback port also listens on `unix_name(port)`; callers try that first. Any process of the machine can
take the name, so each side checks that the other belongs to the same user, and otherwise uses TCP.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("3i")  # process, user, group
IS_LINUX = sys.platform == "linux"  # only Linux has abstract names, and tells the user of a peer


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback address."""
    return host.startswith("127.")


def unix_name(port: int) -> str:
    """Abstract name of the Unix socket beside TCP port `port`. The name ends with its socket."""
    return f"\0dure port {port}"


def listen_unix(port: int) -> socket.socket | None:
    """Make a listening socket; None where the system has no abstract names, or the name is taken."""
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
    """Make a connected, non-blocking socket; None if that is not possible."""
    if not IS_LINUX:
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    if sock.connect_ex(unix_name(port)) == 0 and is_mine(sock):
        return sock
    sock.close()
    return None


def process_behind(sock: socket.socket) -> int | None:
    """Id of the process at the other end of a Unix socket; None if this process may not map its memory."""
    if not IS_LINUX or sock.family != socket.AF_UNIX:
        return None
    process: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    return process if process and os.access(f"/proc/{process}/fd", os.R_OK | os.X_OK) else None


def has_memory(process: int | None) -> bool:
    """Whether a process of this machine still has memory. A killed process loses it before its sockets."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[0]) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_mine(sock: socket.socket) -> bool:
    """Whether the other end of a connected Unix socket is a process of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
