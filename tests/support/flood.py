"""A flood of garbage at all sockets of a run, as any user of the machine can send it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

GARBAGE = os.urandom(25)  # as long as a heartbeat in a datagram once was
BURST = 50
HELD = 300
"""Connections that the flood keeps half-open at a time."""

Target = tuple[str, str]
"""A table of /proc/net, and an address: the port, or the name of a Unix socket."""


def sockets_of(pids: Collection[int]) -> list[Target]:
    """All sockets of the processes at which another process is heard."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                inodes |= {found[1]} if found else set()
    heard = {"tcp": ("0A",), "udp": ("07", "01")}
    found = [
        (table, str(int(columns[1].partition(":")[2], 16)))
        for table, states in heard.items()
        for columns in rows(table)
        if columns[9] in inodes and columns[3] in states
    ]
    return [
        *found,
        *(("unix", " ".join(columns[7:])) for columns in rows("unix") if columns[6] in inodes and columns[7:]),
    ]


def rows(table: str) -> Iterator[list[str]]:
    return (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:])


def flood(targets: Sequence[Target], seconds: float) -> dict[str, int]:
    """Send garbage to all `targets` at full speed for `seconds`. Return how often each kind of socket was hit."""
    hits = dict.fromkeys(("udp", "tcp", "unix"), 0)
    held: list[socket.socket] = []
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.setblocking(False)
        while time.monotonic() < end:
            for table, address in targets:
                with contextlib.suppress(OSError):
                    if table == "udp":
                        for _ in range(BURST):
                            datagrams.sendto(GARBAGE, ("127.0.0.1", int(address)))
                    else:
                        held.append(connected(table, address))
                        held[-1].send(GARBAGE)
                    hits[table] += 1
            if len(held) > HELD:
                for each in held:
                    each.close()
                held.clear()
    return hits


def connected(table: str, address: str) -> socket.socket:
    """A connection to the target; one over TCP may still be opening."""
    sock = socket.socket(socket.AF_INET if table == "tcp" else socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", int(address)) if table == "tcp" else address.replace("@", "\0", 1))
    return sock
