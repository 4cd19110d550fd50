"""Joining what `torchrun` (or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) has started.

A process without these variables is a world of one. Ranks meet at the engine's store, where each leaves notes, JSON
values, for the others; whoever fails leaves a note as well, so that nobody waits for what will never come.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dure.core.node import nothing
from dure.errors import CallTimeout, PeerLost, UsageError
from dure.runtime.launch.engine_store import listening_store

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

MEETING_SECONDS = 120.0
"""How long the others may take to come up."""

ENGINE_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable by which the engine is told which network its collectives use."""

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The environment variable by which torchrun says that its agent has the store."""

PARTING_SECONDS = 5.0
"""How long rank 0 waits for the others to have read its last note."""

LOOK_SECONDS = 0.02
"""How often a rank looks for a note that is not there yet."""

_SIOCGIFADDR = 0x8915  # Linux; elsewhere the engine is left to itself


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """Where this process stands among those that were started together. `master` is None in a world of one.

    `restarts` counts how often the elastic agent has started all of them again, under the same `launch`. `local_size`
    processes are on this machine, as far as is known.
    """

    rank: int = 0
    world_size: int = 1
    master: str | None = None
    restarts: int = 0
    launch: str = ""
    local_size: int = 1

    @property
    def interface(self) -> str:
        """The address of this machine on the way to the master: where others reach this process."""
        if self.master is None:
            return "127.0.0.1"
        family, kind, _, _, address = socket.getaddrinfo(self.master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: asks the system for a route
            return str(probe.getsockname()[0])


def place(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """This process's place, as its environment tells; None if nobody has started it together with others.

    Raises `UsageError` where the environment makes no sense.
    """
    given = [name for name in NEEDED if environ.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise UsageError(
            f"the environment sets {', '.join(given)} and not {', '.join(missing)}: start with torchrun, which sets "
            "all, or unset RANK and WORLD_SIZE to train alone."
        )
    rank, world_size = (_whole(name, environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if not 0 <= rank < world_size:
        raise UsageError(f"RANK must be from 0 to {world_size - 1} (WORLD_SIZE is {world_size}), it is {rank}.")
    master = environ["MASTER_ADDR"] if world_size > 1 else None
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    local_size = int(environ.get("LOCAL_WORLD_SIZE") or world_size)
    return RankEnvironment(rank, world_size, master, restarts, _launch(environ), local_size)


def lead_engine(address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the engine's collectives use the network on which this machine is `address`, unless told otherwise.

    By itself the engine takes the one that the machine's own name leads to: on many machines the loopback, where no
    other machine can reach it.
    """
    name = _interface_at(address)
    if name is not None:
        environ.setdefault(ENGINE_INTERFACE, name)


def _interface_at(address: str) -> str | None:
    """The network interface whose IPv4 address is `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _launch(environ: Mapping[str, str]) -> str:
    """What the restarts of one launch have in common, and no other launch has.

    The identity that torchrun was given or has drawn; where it has none, the agent that is this process's parent.
    """
    given = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":
        return given
    agent = os.getppid()
    with suppress(OSError):  # no /proc: its number has to do
        began = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return f"{socket.gethostname()}-{agent}-{began}"
    return f"{socket.gethostname()}-{agent}"


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"the environment variable {name} must be a whole number, it is {text!r}.")
    return int(text)


class Rendezvous:
    """A store where the ranks at `place` leave notes for each other under keys; every wait is bounded.

    `topic` and how often a rank has met under it keep one meeting apart from the next. `store` is the engine's.
    """

    def __init__(self, place: RankEnvironment, topic: str) -> None:
        import torch.distributed as dist

        self.place = place
        lead_engine(place.interface)
        base = _engine_store(place)
        number = base.add(f"dure/{topic}/{place.rank}", 1)
        self.store = dist.PrefixStore(f"dure/{topic}/meeting {number}", base)  # type: ignore[attr-defined]

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float = MEETING_SECONDS, check: Callable[[], None] = nothing) -> Any:
        """The note under `key`, once it is there. Raises `PeerLost` if some rank has failed, `CallTimeout`.

        `check` is called at each look, and raises what ends the wait.
        """
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):
            reason = self.failure()
            if reason is not None and not self.store.check([key]):  # it may have left its note before it failed
                raise PeerLost(f"rank {self.place.rank} waited for the others: {reason}")
            check()
            if time.monotonic() > deadline:
                raise CallTimeout(f"rank {self.place.rank} waited {seconds:g} s for {key!r} from the other ranks.")
            time.sleep(LOOK_SECONDS)
        return json.loads(self.store.get(key))

    def exchange(self, key: str, mine: Any) -> list[Any]:
        """What every rank has put under `key`, by rank; returns once all have."""
        self.put(f"{key} {self.place.rank}", mine)
        return [self.get(f"{key} {rank}") for rank in range(self.place.world_size)]

    def part(self) -> None:
        """This rank reads no more notes. Rank 0, in whose process they may lie, waits a little for the others."""
        self.put(f"parted {self.place.rank}", True)
        if self.place.rank == 0:
            with suppress(PeerLost, CallTimeout):
                for rank in range(1, self.place.world_size):
                    self.get(f"parted {rank}", PARTING_SECONDS)

    def fail(self, reason: str) -> None:
        """Tell everybody who waits, now or later, that this rank is out."""
        self.put("failure", f"rank {self.place.rank} failed with {reason}")

    def failure(self) -> str | None:
        """What somebody has said of its failure."""
        return json.loads(self.store.get("failure")) if self.store.check(["failure"]) else None


def _engine_store(place: RankEnvironment) -> Any:
    import torch.distributed as dist

    if place.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if _hosts_store(place):
        with suppress(OSError):  # the port is taken: by a store of this process, which the engine uses again
            return listening_store(place.interface, int(os.environ["MASTER_PORT"]), place.world_size)
    meetings = dist.rendezvous("env://", timeout=timedelta(seconds=MEETING_SECONDS))  # type: ignore[attr-defined]
    store, _, _ = next(meetings)
    return store


def _hosts_store(place: RankEnvironment, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks' store is to be in this process: torchrun's agent has one, other launchers have none."""
    return place.rank == 0 and environ.get(AGENT_STORE) != "True"
