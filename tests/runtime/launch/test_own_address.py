"""The address of a machine for others, and the interface of the engine, over IPv4 and IPv6."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ipv6_hosts import over_ipv6
from support.wording import raising

from dure.errors import UsageError
from dure.runtime.launch.engine_store import address_toward
from dure_studies import namespaces

REASON = namespaces.missing()

ASK = """\
import json, sys
from dure.errors import UsageError
from dure.runtime.launch.engine_store import address_toward, lead_engine

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
    with raising(UsageError, "no.such.invalid"):
        address_toward("no.such.invalid")


@pytest.mark.parametrize("host", ["x" * 70, "a..b", ".", "y" * 5000])
def test_a_name_that_no_machine_can_have_is_refused(host: str) -> None:
    with raising(UsageError, "MASTER_ADDR"):
        address_toward(host)


def test_an_address_in_brackets_says_what_to_write() -> None:
    with raising(UsageError, "1"):
        address_toward("[fd00::1]")


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


LOOP = """\
import os, torch, dure
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dure.attach(model, optimizer, sync="bsp", topology=os.environ["TOPOLOGY"]) as replica:
    for _ in range(3):
        model.zero_grad()
        model(torch.full((4, 3), float(os.environ["RANK"]) + 1)).sum().backward()
        replica.step()
print(model.weight.sum().item())
"""
"""The mean of the gradients of two ranks is 4 * 1.5 in each of six weights."""


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.alone
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize("also_ipv4", [False, True])
@pytest.mark.parametrize("topology", ["collective", "collective:algorithm=ring", "ps"])
def test_two_hosts_train_over_ipv6_from_torchrun(topology: str, also_ipv4: bool, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    torch.manual_seed(0)
    wanted = torch.nn.Linear(3, 2).weight.sum().item() - 3 * 0.1 * 6 * 6.0
    line = "-m torch.distributed.run --nnodes 2 --node-rank $RANK --master-addr $MASTER_ADDR --master-port 29511"
    command = ["sh", "-c", f"exec {sys.executable} {line} {tmp_path / 'loop.py'}"]
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        six = over_ipv6(hosts, also_ipv4=also_ipv4)
        done = six.run(command, seconds=150, environ={"TOPOLOGY": topology, "OMP_NUM_THREADS": "1"})
    assert [float(each.out) for each in done] == pytest.approx([wanted, wanted], abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.alone
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize("strategy", ["bsp", "ssp:bound=3 ps"])
def test_dure_trains_across_hosts_with_ipv6_alone(strategy: str) -> None:
    command = [
        "-m",
        "dure",
        "train",
        "digits-mlp",
        "--strategy",
        strategy,
        "--on",
        "torchrun",
        "--steps",
        "4",
        "--json",
    ]
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        done = over_ipv6(hosts).run([sys.executable, *command], seconds=150, environ={"OMP_NUM_THREADS": "1"})
    summary = json.loads(done[0].out.splitlines()[-1])
    assert (summary["workers"], summary["time"], summary["steps"]) == (2, "real", 4)
