"""Addresses of programs that a user names: HOST:PORT."""

from __future__ import annotations

import re

FOUND = "auto"
"""The address of a cluster that its own client finds on this machine."""

_ADDRESS = re.compile(r"(?P<host>[^:\[\]/\s]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")


def host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None for a text of another form.

    >>> host_and_port("10.0.0.1:6379"), host_and_port("[fd00::1]:6379"), host_and_port("10.0.0.1:0")
    (('10.0.0.1', 6379), ('fd00::1', 6379), None)
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        return None
    return match["host"].strip("[]"), int(match["port"])
