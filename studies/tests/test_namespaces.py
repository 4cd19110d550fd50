"""Hosts out of network namespaces: limited cards, started as by torchrun, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import gone_within

from dure.errors import DureError, UsageError
from dure_studies import namespaces

REASON = namespaces.missing()
here = pytest.mark.skipif(bool(REASON), reason=REASON)
pytestmark = pytest.mark.alone


def there() -> set[str]:
    return set(namespaces._there())


def limits(namespace: str) -> list[str]:
    """The rates of the token buckets in a namespace."""
    shown = subprocess.run(["tc", "-n", namespace, "qdisc", "show"], capture_output=True, text=True, check=True)
    return re.findall(r"qdisc tbf .* rate (\S+)", shown.stdout)


@here
def test_each_direction_of_each_card_is_limited_and_hosts_reach_each_other() -> None:
    ask = (
        "import os, socket\n"
        "rank, master = int(os.environ['RANK']), os.environ['MASTER_ADDR']\n"
        "place = (master, int(os.environ['MASTER_PORT']))\n"
        "if rank == 0:\n"
        "    listener = socket.create_server(place)\n"
        "    print(sorted(listener.accept()[1][0] for _ in range(2)))\n"
        "else:\n"
        "    while True:\n"
        "        try:\n"
        "            socket.create_connection(place, timeout=5)\n"
        "            break\n"
        "        except ConnectionRefusedError:\n"
        "            pass\n"
        "print(os.environ['WORLD_SIZE'], os.environ['WORD'])\n"
    )
    with namespaces.hosts(3, bandwidth=12.5e6) as hosts:
        for name in hosts.names:
            assert limits(name) == ["100Mbit"]
        assert limits(hosts.names[0].rpartition("-")[0] + "-switch") == ["100Mbit"] * 3
        assert hosts.congestion in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        done = hosts.run([sys.executable, "-c", ask], seconds=30, environ={"WORD": "one"})
    assert [each.out for each in done] == ["['10.77.0.2', '10.77.0.3']\n3 one\n", "3 one\n", "3 one\n"]


@here
def test_several_ranks_on_each_host_are_numbered_host_by_host() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    told = f"import os; print(*(os.environ[name] for name in {names}), os.stat('/proc/self/ns/net').st_ino)"
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        done = hosts.run([sys.executable, "-c", told], seconds=30, per_host=2)
    places, networks = zip(*(each.out.strip().rsplit(" ", 1) for each in done), strict=True)
    assert places == ("0 0 4 2", "1 1 4 2", "2 0 4 2", "3 1 4 2")
    assert networks[0] == networks[1] != networks[2] == networks[3]


@here
def test_nothing_is_left_behind_by_a_program_that_fails() -> None:
    before = there()
    program = "[ $RANK = 1 ] || exit 0; (setsid sleep 300 &); echo so bad >&2; exit 3"
    with (
        pytest.raises(DureError, match="rank 1 ended with status 3: so bad"),
        namespaces.hosts(2, bandwidth=1e6) as two,
    ):
        two.run(["bash", "-c", program], seconds=30)
    assert there() == before


@here
def test_a_program_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with namespaces.hosts(1, bandwidth=1e6) as hosts:
        with pytest.raises(DureError, match="had not ended"):
            hosts.run(["bash", "-c", f"setsid sleep 300 & echo $! $$ > {pids}; wait"], seconds=0.5)
        assert gone_within([int(pid) for pid in pids.read_text().split()], 5.0)


@here
def test_what_a_killed_process_left_is_swept_away_and_what_a_living_one_has_is_not() -> None:
    program = (
        "from dure_studies import namespaces\n"
        "import subprocess, sys\n"
        "with namespaces.hosts(1, bandwidth=1e6) as hosts:\n"
        "    command = ['ip', 'netns', 'exec', hosts.names[0], 'sleep', '300']\n"
        "    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, *hosts.names, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with namespaces.hosts(1, bandwidth=1e6) as mine:
        owner = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        pid, *names = owner.stdout.readline().split()
        namespaces.sweep()
        assert {*names, *mine.names} <= there()
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=10)
        namespaces.sweep()
        assert not there() & set(names)
        assert there() >= set(mine.names)
        assert gone_within([int(pid)], 5.0)


@here
def test_dure_trains_across_hosts_over_the_engines_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own name leads to the loopback, where the other host cannot be reached; so may its environment."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = ["-m", "dure", "train", "digits-mlp", "--sync", "bsp", "--on", "torchrun", "--steps", "4", "--json"]
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        done = hosts.run([sys.executable, *command], seconds=100)
    summary = json.loads(done[0].out.splitlines()[-1])
    assert (summary["workers"], summary["time"], summary["steps"]) == (2, "real", 4)
    assert done[1].out == ""


@pytest.mark.parametrize("lost", ["ip", "tc"])
def test_what_is_missing_is_said(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == lost else f"/sbin/{name}")
    with pytest.raises(UsageError, match=f"{lost} cannot be found"), namespaces.hosts(1, bandwidth=1e6):
        pass


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "only root can make" in namespaces.missing()


@here
@pytest.mark.parametrize(("count", "bandwidth"), [(0, 1e6), (251, 1e6), (2, 0.0)])
def test_nonsense_is_refused(count: int, bandwidth: float) -> None:
    with pytest.raises(UsageError, match="got"), namespaces.hosts(count, bandwidth=bandwidth):
        pass
