"""Makes hosts with slow links on one machine: network namespaces around a switch, each with a limited card.

    host 0:  eth0 == tbf ==>  port0 |          | port1 == tbf ==>  eth0  :host 1
             10.77.0.1       <== tbf |  bridge  | <== tbf ==                10.77.0.2
                                     |  switch  |

Each direction of a host's card is a token bucket (`tc ... tbf`): frames that leave wait at the host, frames that come
wait at the port of the switch. A process inside sees no other network, and reaches its own host over `lo`, which is not
limited. All of it, the switch too, is in namespaces of this process: deleting them removes everything. The namespaces
of a process that was killed are deleted by the next process that makes hosts.

It needs Linux, root, and the programs `ip` and `tc` (Debian's package iproute2); `missing` names a requirement that is
not met.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count as counted
from pathlib import Path

from dure.errors import DureError, UsageError
from dure.runtime.launch.engine_store import ENGINE_INTERFACE

PREFIX = "dure"
FRAME = 9000
"""Bytes of a frame. Jumbo frames cost less processor time, as all hosts share the cores of one machine."""

BURST = 3 * (FRAME + 14)
"""Bytes that an idle card may send at once: three frames, few compared with a message of a megabyte."""

QUEUE_SECONDS = 0.05
"""Time that a frame may wait at a card before later frames are dropped."""

COMMAND_SECONDS = 20.0
LOOK_SECONDS = 0.05
_serial = counted()
GRACE_SECONDS = 15.0
"""Seconds in which the other programs may end by themselves after one has failed."""


@dataclass(frozen=True, slots=True)
class ExitedProcess:
    """The exit status and the output of a program on one host."""

    status: int
    out: str
    err: str


def missing() -> str:
    """The reason why this machine cannot make hosts; an empty text if it can."""
    programs = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if programs:
        return f"{' and '.join(programs)} cannot be found: install iproute2."
    if os.geteuid() != 0:
        return "only root can make network namespaces: run the command with sudo."
    return ""


@contextmanager
def hosts(count: int, *, bandwidth: float) -> Iterator[Hosts]:
    """Yield `count` hosts whose cards carry `bandwidth` bytes per second in each direction, with headers of frames.

    Raises:
        UsageError: such hosts are impossible on this machine.
        DureError: the system refuses to make them.
    """
    reason = missing()
    if reason:
        raise UsageError(f"no hosts can be made out of network namespaces: {reason}")
    if not 1 <= count <= 250:
        raise UsageError(f"hosts must be from 1 to 250, got {count}.")
    if not bandwidth > 0:
        raise UsageError(f"bandwidth is in bytes per second and must be > 0, got {bandwidth}. 100 Mbit/s are 12.5e6.")
    sweep()
    stem = f"{PREFIX}-{_mark(os.getpid())}-{next(_serial)}"
    names = tuple(f"{stem}-{number}" for number in range(count))
    switch = f"{stem}-switch"
    with ExitStack() as stack:
        _add(switch, stack)
        _ip(switch, "link add bridge type bridge")
        _ip(switch, "link set bridge up")
        for number, name in enumerate(names):
            _add(name, stack)
            _connect(name, switch, number, bandwidth)
        found = _do("ip", "netns", "exec", names[0], "cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip()
        yield Hosts(names, tuple(map(_address, range(count))), bandwidth, found)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts in namespaces; `congestion` is TCP's congestion control on them."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    bandwidth: float
    congestion: str

    def run(
        self, command: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None, per_host: int = 1
    ) -> list[ExitedProcess]:
        """Run `command` on each host `per_host` times, started as by torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...).

        After the first failure the others have GRACE_SECONDS to end. After `seconds` all are killed.

        Raises `DureError` with the last output of the first program that failed.
        """
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            programs = [
                Program(self._command(rank, per_host, command, environ or {}), Path(folder), rank)
                for rank in range(per_host * len(self.names))
            ]
            try:
                late = _wait(programs, seconds)
            finally:
                # all processes of the namespaces, since `Program.end` kills no children of a program
                for name in self.names:
                    _end_all(name)
                for program in programs:
                    program.end()
            done = [program.done() for program in programs]
        _complain(done, late, seconds)
        return done

    def _command(self, rank: int, per_host: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        host, local_rank = divmod(rank, per_host)
        place = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": per_host * len(self.names),
            "LOCAL_WORLD_SIZE": per_host,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": 29500,
            **environ,
        }
        given = [f"{name}={value}" for name, value in place.items()]
        elsewhere = ["-u", ENGINE_INTERFACE]  # an interface of this network is none of theirs
        return ["ip", "netns", "exec", self.names[host], "env", *elsewhere, *given, *command]


class Program:
    """A program on a host."""

    def __init__(self, command: Sequence[str], folder: Path, rank: int) -> None:
        self._paths = [folder / f"{rank}.{kind}" for kind in ("out", "err")]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait(self, seconds: float) -> int | None:
        """The exit status; None if the program still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.wait(COMMAND_SECONDS)

    def done(self) -> ExitedProcess:
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self._paths)
        return ExitedProcess(self._process.returncode, out, err)


def _wait(programs: Sequence[Program], seconds: float) -> bool:
    """Wait until all have ended, or GRACE_SECONDS after a failure; returns whether `seconds` were too few."""
    looks = seconds / LOOK_SECONDS
    failed = False
    while going := [program for program in programs if program.wait(0.0) is None]:
        if looks <= 0:
            return not failed
        going[0].wait(LOOK_SECONDS)
        looks -= 1
        if not failed and any(program.wait(0.0) for program in programs):
            failed = True
            looks = min(looks, GRACE_SECONDS / LOOK_SECONDS)
    return False


def sweep() -> None:
    """Delete the namespaces of processes that have ended, and end the programs in them."""
    for name in _there():
        _, pid, began, *_ = name.split("-")
        if _mark(int(pid)) != f"{pid}-{began}":
            _clear(name)


def _there() -> list[str]:
    """The namespaces that this module has made."""
    names = [line.split()[0] for line in _do("ip", "netns", "list").splitlines()]
    return [name for name in names if re.fullmatch(rf"{PREFIX}-\d+-\d+-\d+-\w+", name)]


def _mark(pid: int) -> str:
    """Text that identifies a process uniquely since the start of the machine; empty if the process has ended."""
    with suppress(OSError):
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{pid}-{began}"
    return ""


def _add(name: str, stack: ExitStack) -> None:
    stack.callback(_clear, name)  # first: a namespace that is made only in part is cleared too
    _do("ip", "netns", "add", name)
    _ip(name, "link set lo up")


def _clear(name: str) -> None:
    """Delete a namespace if it exists, and end the programs in it."""
    if name not in _there():
        return
    _end_all(name)
    _do("ip", "netns", "delete", name)


def _end_all(name: str) -> None:
    for pid in _do("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _connect(name: str, switch: str, number: int, bandwidth: float) -> None:
    """Connect a host with the switch, and limit both ends."""
    _ip(name, f"link add eth0 type veth peer name port{number} netns {switch}")
    _ip(switch, f"link set port{number} mtu {FRAME} master bridge up")
    _ip(name, f"addr add {_address(number)}/16 dev eth0")
    _ip(name, f"link set eth0 mtu {FRAME} up")
    queue = BURST + int(bandwidth * QUEUE_SECONDS)
    for place, device in ((name, "eth0"), (switch, f"port{number}")):
        rule = f"qdisc add dev {device} root tbf rate {round(bandwidth * 8)}bit burst {BURST} limit {queue}"
        _do("tc", "-n", place, *rule.split())


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _ip(namespace: str, command: str) -> str:
    return _do("ip", "-n", namespace, *command.split())


def _do(*command: str) -> str:
    """Run a program of the system, and return its output. Raises `DureError` if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DureError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise DureError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}.")
    return done.stdout


def _complain(done: Sequence[ExitedProcess], late: bool, seconds: float) -> None:
    if late:
        raise DureError(f"the hosts' programs had not ended after {seconds:g} s.")
    for rank, each in enumerate(done):
        if each.status > 0:
            raise DureError(f"rank {rank} ended with status {each.status}: {each.err.strip()[-2000:]}")
    for rank, each in enumerate(done):
        if each.status:
            raise DureError(f"rank {rank} was ended by signal {-each.status}: {each.err.strip()[-2000:]}")
