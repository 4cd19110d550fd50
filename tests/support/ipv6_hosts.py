"""Hosts out of network namespaces that have IPv6 addresses."""

from __future__ import annotations

from dataclasses import replace

from dure_studies import namespaces


def over_ipv6(hosts: namespaces.Hosts, *, also_ipv4: bool = False) -> namespaces.Hosts:
    """The same hosts, which reach each other by IPv6 alone, or by both."""
    addresses = tuple(f"fd77::{number + 1}" for number in range(len(hosts.names)))
    switches = [f"net.ipv6.conf.{place}.disable_ipv6=0" for place in ("all", "default", "lo", "eth0")]
    for name, address in zip(hosts.names, addresses, strict=True):
        namespaces._do("ip", "netns", "exec", name, "sysctl", "-qw", *switches)
        if not also_ipv4:
            namespaces._ip(name, "addr flush dev eth0 scope global")
        namespaces._ip(name, f"-6 addr add {address}/64 dev eth0 nodad")
    return replace(hosts, addresses=addresses)
