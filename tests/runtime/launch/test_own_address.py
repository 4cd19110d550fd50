"""The address of a machine for others, and the interface of the engine, over IPv4 and IPv6."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.ipv6_hosts import over_ipv6

from dure.cli.reproduce import namespaces
from dure.errors import UsageError
from dure.runtime.launch.own_address import address_toward

REASON = namespaces.missing()

ASK = """\
import json, sys
from dure.errors import UsageError
from dure.runtime.launch.own_address import address_toward, lead_engine

def found(host):
    environ = {}
    try:
        address = address_toward(host)
    except UsageError as error:
        return str(error)
    lead_engine(address, environ)
    return [address, environ]

print(json.dumps([found(host) for host in sys.argv[1:]]))
"""


def asked(namespace: str, *hosts: str) -> list[Any]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", ASK, *hosts]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_a_name_without_an_address_is_refused() -> None:
    assert address_toward("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"MASTER_ADDR is 'no\.such\.invalid'.*no address"):
        address_toward("no.such.invalid")


@pytest.mark.alone
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_machine_with_ipv6_alone_has_an_address_and_an_interface_for_the_engine() -> None:
    eth0, lo = ({"GLOO_SOCKET_IFNAME": name} for name in ("eth0", "lo"))
    with namespaces.hosts(1, bandwidth=12.5e6) as hosts:
        name = over_ipv6(hosts).names[0]
        namespaces._ip(name, "-6 addr add fe80::77/64 dev eth0 nodad")
        found = asked(name, "fd77::9", "fd77::1", "::1", "10.77.0.9", "fe80::9%eth0")
    assert found[:3] == [["fd77::1", eth0], ["fd77::1", eth0], ["::1", lo]]
    assert "cannot reach its address 10.77.0.9 (Network is unreachable)" in found[3]
    assert "the address of one link" in found[4]
