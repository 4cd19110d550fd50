"""The description of a virtual cluster: machines, links, costs, and what goes wrong when.

    machines:                               # worker i lives on machine i
    - count: 7
      compute: {distribution: lognormal, sigma: 0.3}
    - count: 1
      speed: 0.2                            # five times slower, always
    link: {bandwidth: 10 Gbit/s, latency: 0.1 ms}
    events:
    - {at: 30 s, kind: crash, worker: 3}
    - {at: 60 s, kind: join, worker: 3}
    - {at: 45 s, kind: pause, worker: 1, for: 5 s}
    - {at: 50 s, kind: slow, worker: 2, factor: 5, for: 20 s}

The same keys make a `Cluster` in Python. Everything has a default (docs/virtual-time.md lists them). Parameter
servers live on machines of their own, behind the workers', unless the topology puts them beside the workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from dure.core import units
from dure.core.collective_cost import HEADER, SMALL
from dure.core.cost import CodecCost
from dure.core.units import PositiveSeconds, Seconds
from dure.core.validated import FieldError, Validated
from dure.core.yaml_text import read_yaml
from dure.errors import ClusterError
from dure.runtime.virtual.compute import Compute, Constant, Durations, Speed

Rate = Annotated[float, BeforeValidator(units.rate), PlainSerializer(units.as_rate, when_used="json")]
MemoryRate = Annotated[float, BeforeValidator(units.rate), PlainSerializer(units.as_memory_rate, when_used="json")]
PerByte = Annotated[float, BeforeValidator(units.per_byte), PlainSerializer(units.as_per_byte, when_used="json")]

_COMPUTE_STREAM = 1  # sets these random streams apart from others made from the same (seed, worker)


class Link(Validated):
    """What connects a machine to the rest: bytes per second in each direction, and seconds of latency.

    Between machines with different links the larger latency counts.
    """

    bandwidth: Rate = 1.25e9
    latency: Seconds = 1e-4


class Machines(Validated):
    """`count` machines of one kind. `link` is the cluster's unless given.

    `speed` divides the duration of every step: a number, one number for each machine, or a distribution from
    which each machine draws once (`lognormal` with sigma, `uniform` from low to high).
    """

    count: int = Field(default=1, ge=1)
    compute: Compute = Constant()
    speed: Speed = 1.0
    cores: int = Field(default=4, ge=1)
    link: Link | None = None

    @model_validator(mode="after")
    def _one_speed_each(self) -> Machines:
        if isinstance(self.speed, tuple) and len(self.speed) != self.count:
            problem = f"{len(self.speed)} speeds for {self.count} machines: write one for each, or a single number"
            raise FieldError(("speed",), problem)
        return self


class ServerMachines(Validated):
    """The machines of parameter servers that are not beside workers. `link` is the cluster's unless given."""

    cores: int = Field(default=4, ge=1)
    link: Link | None = None


class RoundCost(Validated):
    """A round between neighbors in the engine's ring takes `start` seconds, and `byte` seconds per byte sent."""

    start: Seconds = 1e-4
    byte: PerByte = 0.1e-9


class SharedHost(Validated):
    """One machine whose `cores` all workers and servers share: each of them is a process on it.

    Processes at work share the cores equally. A message costs its sender's process and then its receiver's process
    `alpha + bytes * beta` of a core; between the two passes the link's latency. `all_reduce` is a round of the engine's
    collectives, `gradient` a round of the sum of gradients that leaves during backward.
    """

    cores: int = Field(default=2, ge=1)
    all_reduce: RoundCost = RoundCost()
    gradient: RoundCost = RoundCost()


class Event(Validated):
    """What happens to a worker, and when.

    crash   it dies, with all that it had not sent
    join    it comes, or comes back; a worker whose first event this is was not there from the start
    pause   it stands still `for` a time
    slow    its steps take `factor` times as long, `for` a time or to the end

    Where slow events overlap their factors multiply; of pauses the later end counts. Who joins after a crash is neither
    slow nor paused by what was before.
    """

    at: Seconds
    kind: Literal["crash", "join", "pause", "slow"]
    worker: int = Field(ge=0)
    duration: PositiveSeconds | None = Field(default=None, alias="for")
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def until(self) -> float:
        """When it is over, in seconds."""
        return math.inf if self.duration is None else self.at + self.duration

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Event:
        if self.kind == "pause" and self.duration is None:
            raise FieldError(("for",), "a pause needs to say how long it lasts, such as for: 5 s")
        if self.kind == "slow" and self.factor is None:
            raise FieldError(("factor",), "slow needs to say how many times as long steps take, such as factor: 5")
        if self.kind in ("crash", "join") and self.duration is not None:
            right = "write a join event for the time at which the worker comes back" if self.kind == "crash" else ""
            raise FieldError(("for",), f"a {self.kind} has no duration: {right or 'leave it out'}")
        if self.kind != "slow" and self.factor is not None:
            raise FieldError(
                ("factor",), f"{self.factor} has no meaning for a {self.kind}: leave it out, or write slow"
            )
        return self


class Cluster(Validated):
    """A virtual cluster; see the head of this module. Raises `ClusterError` for what describes none.

    Costs: `alpha` seconds of a core per message and `beta` per byte of it, at both ends; `gamma` seconds per byte
    of memory that a server works through to apply an update. A message has `header` bytes more than its tensors and
    `field` bytes more for each plain value; up to `small` bytes in all it does not queue. A crash is noticed after
    `detection` seconds. `backward` is the share of a step in which the slices of its gradient are completed.
    `unfairness` is how unequally messages share a card: the standard deviation of the logarithm of a message's weight,
    0 for equal shares. `codecs` is the cost of codecs by name; others cost what their classes state (`codec.cost`).
    With a `host`, all machines are processes of it.
    """

    machines: tuple[Machines, ...] = Field(default=(Machines(count=8),), min_length=1)
    servers: ServerMachines = ServerMachines()
    link: Link = Link()
    host: SharedHost | None = None
    alpha: Seconds = 20e-6
    beta: PerByte = 0.1e-9
    gamma: PerByte = 0.3e-9
    header: int = Field(default=HEADER, ge=0)
    field: int = Field(default=16, ge=0)
    small: int = Field(default=SMALL, ge=0)
    detection: Seconds = 0.05
    backward: float = Field(default=2 / 3, ge=0, le=1)
    memory_bandwidth: MemoryRate = 10e9
    unfairness: float = Field(default=0.0, ge=0, le=2)
    codecs: dict[str, CodecCost] = Field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @model_validator(mode="after")
    def _events_make_sense(self) -> Cluster:
        there: dict[int, bool] = {}
        for i, event in sorted(enumerate(self.events), key=lambda pair: pair[1].at):
            worker, kind = event.worker, event.kind
            if worker >= self.workers:
                right = f"write 0 to {self.workers - 1}, or describe more machines"
                raise FieldError(("events", i, "worker"), f"there is no worker {worker} among {self.workers}: {right}")
            present = there.get(worker, kind != "join")
            if present == (kind == "join"):
                problem = f"worker {worker} cannot {kind} at {units.as_seconds(event.at)}: "
                problem += "it is there already" if present else "it crashed before; let it join first"
                raise FieldError(("events", i, "kind"), problem)
            there[worker] = kind != "crash"
        return self

    @classmethod
    def uniform(cls, workers: int = 8, *, compute: Compute | None = None, cores: int = 4, **rest: Any) -> Cluster:
        """`workers` machines of one kind; `rest` as for `Cluster`."""
        if workers < 1:
            raise ClusterError(f"workers: {workers} machines make no cluster: write a whole number from 1, such as 8.")
        return cls(machines=(Machines(count=workers, compute=compute or Constant(), cores=cores),), **rest)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """The cluster that a file describes. Raises `ClusterError`, naming the file and the key."""
        try:
            given = read_yaml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ClusterError(f"{path}: the cluster file cannot be read ({reason}): give a YAML file.") from None
        except yaml.YAMLError as error:
            raise ClusterError(f"{path}: {_where(error)}, so this is not the YAML of a cluster.") from None
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            keys = ", ".join(cls.model_fields)
            raise ClusterError(f"{path}: a cluster file is a mapping: write keys out of {keys}.")
        try:
            return cls(**_beside(given, Path(path).parent))
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """The YAML that describes this cluster: read again, it is equal."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None)

    @cached_property
    def workers(self) -> int:
        """How many workers there is place for: one on each machine."""
        return sum(kind.count for kind in self.machines)

    @cached_property
    def absent(self) -> frozenset[int]:
        """The workers that are not there at the start: those whose first event is to join."""
        first: dict[int, str] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            first.setdefault(event.worker, event.kind)
        return frozenset(worker for worker, kind in first.items() if kind == "join")

    def placed(self, machines: Mapping[str, int]) -> dict[str, int]:
        """The machine of each node, given one for each; all on machine 0 where the cluster is one `host`."""
        return dict(machines) if self.host is None else dict.fromkeys(machines, 0)

    def link_of(self, machine: int) -> Link:
        """The link of a machine; those from `workers` on are servers'."""
        own = self._kinds[machine].link if machine < self.workers else self.servers.link
        return own or self.link

    def cores_of(self, machine: int) -> int:
        """The cores of a machine; those from `workers` on are servers'."""
        return self._kinds[machine].cores if machine < self.workers else self.servers.cores

    def latency(self, here: int, there: int) -> float:
        """Seconds between two machines: the larger of their links' latencies."""
        return max(self.link_of(here).latency, self.link_of(there).latency)

    def durations(self, worker: int, seed: int) -> Durations:
        """The durations of a worker's steps: the same for the same description, worker and seed."""
        kind = self._kinds[worker]
        rng = np.random.default_rng((seed, worker, _COMPUTE_STREAM))
        if isinstance(kind.speed, tuple):
            speed = kind.speed[self._places[worker]]
        else:
            speed = kind.speed if isinstance(kind.speed, float) else kind.speed.speed(rng)
        return Durations(kind.compute, speed, rng)

    def slowness(self, worker: int, now: float) -> float:
        """How many times as long the steps of `worker` take at `now`: the product of the events that slow it."""
        factor = 1.0
        for event in self._befalling[worker]:
            if event.kind == "join" and event.at <= now:
                factor = 1.0
            elif event.factor is not None and event.at <= now < event.until:
                factor *= event.factor
        return factor

    @cached_property
    def _befalling(self) -> dict[int, list[Event]]:
        """The events of each worker that has some, in their order."""
        befalling: dict[int, list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            befalling.setdefault(event.worker, []).append(event)
        return befalling

    @cached_property
    def _kinds(self) -> tuple[Machines, ...]:
        return tuple(kind for kind in self.machines for _ in range(kind.count))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        return tuple(i for kind in self.machines for i in range(kind.count))


def _where(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "unreadable"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _beside(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`given` with trace files found from the folder of the cluster file."""
    kinds = given.get("machines")
    if not isinstance(kinds, list):
        return given
    found = []
    for kind in kinds:
        compute = kind.get("compute") if isinstance(kind, dict) else None
        if isinstance(compute, dict) and isinstance(compute.get("file"), str):
            kind = {**kind, "compute": {**compute, "file": str(folder / compute["file"])}}
        found.append(kind)
    return {**given, "machines": found}
