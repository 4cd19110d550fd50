"""The description of a virtual cluster: machines, links, costs, and events (crash, join, pause, slow-down).

    machines:                               # one worker on each, unless `workers` says otherwise
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

The same keys make a `Cluster` in Python. Every key has a default (docs/reference/cluster-file.md). Parameter servers
have machines of their own, numbered after those of the workers, unless the topology places them beside workers. A
machine can have several workers, which share its network card and its cores. Workers are numbered machine by machine:

    machines:
    - {count: 4, workers: 2}                # workers 0 and 1 on machine 0, 2 and 3 on machine 1, ...
    inside: {bandwidth: 12 GB/s, latency: 10 us}    # between workers of one machine

`runtime.virtual.fabric` describes racks and sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dure.core import units
from dure.core.collective_cost import HEADER, SMALL, Transit
from dure.core.cost import CodecCost
from dure.core.deployment import check_workers
from dure.core.devices import Device, device
from dure.core.spec_text import machines_in_line
from dure.core.text import quoted
from dure.core.units import MemoryRate, PositiveSeconds, Rate, Seconds, Size
from dure.core.validated import FieldError, Validated, read_described
from dure.errors import ClusterError, UsageError
from dure.runtime.virtual.accelerators import INSIDE, AcceleratorEngine, Card, InsideLink
from dure.runtime.virtual.compute import Compute, Constant, Durations, Factor, Speed
from dure.runtime.virtual.fabric import Fabric, Racks, Site, SiteLines, check_sites

PerByte = Annotated[float, BeforeValidator(units.per_byte), PlainSerializer(units.as_per_byte, when_used="json")]
SamplesRate = Annotated[
    float,
    BeforeValidator(units.samples_per_second),
    PlainSerializer(units.as_samples_per_second, when_used="json"),
]
Price = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]

Cores = Annotated[int, Field(ge=1, le=1_000_000)]
Nbytes = Annotated[int, Field(ge=0, le=10**12)]

_COMPUTE_STREAM = 1  # separates these random streams from others of the same (seed, worker)


class Link(Validated):
    """The network link of a machine."""

    bandwidth: Rate = 1.25e9
    """Bandwidth of each direction of a network card."""
    latency: Seconds = 1e-4
    """Time from the last byte sent to its arrival. Between two different links the larger latency counts."""


class Machines(Validated):
    """`count` machines of one kind, with `workers` workers on each, which share the machine's `link` and `cores`."""

    count: int = Field(default=1, ge=1)
    """Machines of this kind. A cluster has at most 100,000 workers."""
    gpus: int | None = Field(default=None, ge=1)  # before `workers`, as errors name the first field
    """Accelerators of each machine, in place of `workers`: a worker on each. Their collectives are those of the engine
    of accelerators, over `card`.
    """
    gpu: str | None = None
    """Name of these accelerators in the catalogue that `dure devices` prints. Its speed, its memory and its usual link
    inside a machine count where the file states nothing else.
    """
    workers: int = Field(default=1, ge=1)
    """Workers on each machine. They share its network card and its cores."""
    compute: Compute = Constant()
    """Duration of a step."""
    speed: Speed = 1.0
    """Divides the duration of each step: a number, a list with one number for each worker, or a distribution from which
    each worker draws once.
    """
    cores: Cores = 4
    """Cores that handle messages, shared by the machine's workers."""
    memory: Size | None = None
    """Memory of each worker. A run that needs more is refused. Default: that of `gpu`, else no limit."""
    input: SamplesRate | None = None
    """Samples that a machine loads in a second, an equal share for each of its workers. Default: no limit."""
    price: Price | None = None
    """Price of an hour of a machine, in any currency. `dure plan` then shows costs."""
    link: Link | None = None
    """Link of this kind of machine. Default: the cluster's `link`."""
    inside: InsideLink | None = None
    """Link between workers of one machine of this kind. Default: the cluster's `inside`."""
    card: Card | None = None
    """Network cards of a machine with `gpus`. Default: the cluster's `card`."""

    def changed(self, **values: Any) -> Machines:
        kept = {name: getattr(self, name) for name in type(self).model_fields if name != "workers" or not self.gpus}
        if "gpu" in values and self.gpu is not None and self.memory == _known_device(self.gpu).memory:
            del kept["memory"]  # that of another device is another one
        return Machines(**kept | values)

    def with_workers(self, workers: int) -> Machines:
        """These machines with another number of workers on each."""
        return self.changed(**{"gpus" if self.gpus else "workers": workers})

    @model_validator(mode="before")
    @classmethod
    def _gpus_are_workers(cls, values: Any) -> Any:
        gpus = values.get("gpus") if isinstance(values, dict) else None
        if gpus is None:
            return values
        if "workers" in values:
            problem = f"gpus: {quoted(gpus)} is the number of workers, which are accelerators: leave `workers` out"
            raise FieldError(("workers",), problem)
        return {**values, "workers": gpus}

    @model_serializer(mode="wrap")
    def _without_workers_of_gpus(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dumped(self)
        return {name: value for name, value in found.items() if name != "workers" or not self.gpus}

    @model_validator(mode="before")
    @classmethod
    def _memory_of_its_device(cls, values: Any) -> Any:
        name = values.get("gpu") if isinstance(values, dict) else None
        if name is None or values.get("memory") is not None:
            return values
        return {**values, "memory": _known_device(name).memory}

    @model_validator(mode="after")
    def _device_of_accelerators(self) -> Machines:
        if self.gpu is not None and self.gpus is None:
            raise FieldError(("gpu",), f"{self.gpu} is an accelerator: write gpus with the number of each machine, too")
        return self

    @model_validator(mode="after")
    def _cards_of_accelerators(self) -> Machines:
        if self.gpus is None and self.card is not None:
            problem = "cards are those of accelerators: write gpus in place of workers, or leave card out"
            raise FieldError(("card",), problem)
        return self

    @model_validator(mode="after")
    def _one_speed_each(self) -> Machines:
        workers = check_workers(self.count * self.workers)
        if isinstance(self.speed, tuple) and len(self.speed) != workers:
            problem = f"{len(self.speed)} speeds for {workers} workers: write one for each, or a single number"
            raise FieldError(("speed",), problem)
        return self


class ServerMachines(Validated):
    """Machines of parameter servers that are not beside workers, and the software of all (`server_software`)."""

    cores: Cores = 4
    """Cores of a server's machine."""
    price: Price | None = None
    """Price of an hour of a server's machine."""
    link: Link | None = None
    """Link of the servers. Default: the cluster's `link`."""
    variable: Seconds = 0.0
    """Time of a process for each variable of a push or a pull, at both ends."""
    process: MemoryRate | None = None
    """Bytes of pushes and pulls that a process packs or unpacks in a second. Default: no limit."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Variables that a process packs at once. One more thread unpacks, if there are several."""
    per_machine: bool = False
    """The workers of a machine push and pull as one."""
    overlap: bool = False
    """With `bsp` and without a codec, variables are pushed during backward, as soon as each is complete."""
    early_pulls: bool = False
    """With `overlap`, a variable is pulled as soon as all workers have pushed it."""

    @model_validator(mode="after")
    def _pulls_follow_pushes(self) -> Self:
        if self.early_pulls and not self.overlap:
            problem = "variables are pulled early only if they are pushed during backward: write overlap: true, too"
            raise FieldError(("early_pulls",), problem)
        return self

    @property
    def software(self) -> dict[str, Any]:
        """The keys of software that are given, with their values."""
        given = {"variable": self.variable, "process": self.process, "per_machine": self.per_machine}
        given |= {"overlap": self.overlap, "early_pulls": self.early_pulls}
        return {name: value for name, value in given.items() if value}


class RoundCost(Validated):
    """Cost of a round between neighbors in the engine's ring."""

    start: Seconds = 1e-4
    """Time of a round, whatever its size."""
    byte: PerByte = 0.1e-9
    """Time for each byte that a rank sends in the round."""


class SharedHost(Validated):
    """One machine on which all workers and servers are processes that share its `cores`.

    Busy processes share the cores equally. A message takes `alpha + bytes * beta` seconds of a core in the process of
    its sender, then the latency of the link, then as many seconds of a core in the process of its receiver.
    """

    cores: Cores = 2
    """Cores that all workers and servers share."""
    all_reduce: RoundCost = RoundCost()
    """Cost of a round of the engine's collectives."""
    gradient: RoundCost = RoundCost()
    """Cost of a round in which gradients are summed during backward."""


class Event(Validated):
    """An event at a worker, and its time.

    The factors of overlapping slow events multiply. Of overlapping pauses the later end counts. After a crash and a
    join, earlier slow events and pauses have no effect.
    """

    at: Seconds
    """Time of the event."""
    kind: Literal["crash", "join", "pause", "slow"]
    """`crash`: the worker fails, and data that it has not sent is lost. `join`: the worker starts, or starts again as a
    new worker; a worker whose first event is a join is absent from the start. `pause`: the worker computes and answers
    nothing for a time. `slow`: its steps take `factor` times as long.
    """
    worker: int = Field(ge=0)
    """Number of the worker, from 0."""
    duration: PositiveSeconds | None = Field(default=None, alias="for")
    """Duration of a pause, which needs one, or of a slow-down. Default: to the end of the run."""
    factor: Factor | None = None
    """Factor on the duration of steps. A slow-down needs one."""

    @property
    def until(self) -> float:
        """End of the event, in seconds."""
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
    """A virtual cluster: machines, links, costs and events, with the keys of a cluster file.

    Every key has a default: `Cluster()` has 8 equal machines. Parameter servers have machines of their own, numbered
    after those of the workers, unless the topology places them beside workers.

    Raises:
        ClusterError: the values describe no cluster; the message names the key and the possible values.
    """

    machines: tuple[Machines, ...] = Field(default=(Machines(count=8),), min_length=1)
    """Machines of the workers, a list with an entry for each kind. Default: one kind of 8 machines."""
    servers: ServerMachines = ServerMachines()
    """Machines and software of the parameter servers."""
    link: Link = Link()
    """Link of each machine's network card."""
    inside: InsideLink = InsideLink()
    """Link between workers of one machine."""
    card: Card = Card()
    """Network cards of machines with `gpus`."""
    engine: AcceleratorEngine = AcceleratorEngine()
    """Engine of the collectives of machines with `gpus`."""
    racks: Racks | None = None
    """Racks of machines behind uplinks. Default: no racks."""
    sites: tuple[Site, ...] = ()
    """Sites, each with the next machines of the cluster. Default: one site."""
    between: SiteLines | None = None
    """Lines between sites: one for any two, or a list with one for each pair."""
    host: SharedHost | None = None
    """If given, all workers and servers are processes of this one machine."""
    alpha: Seconds = 20e-6
    """A core's time for a message, at both ends at once."""
    beta: PerByte = 0.1e-9
    """A core's time for a byte of a message, at both ends at once."""
    gamma: PerByte = 0.3e-9
    """A server's time for each byte of memory that it reads or writes to apply an update."""
    header: Nbytes = HEADER
    """Bytes added to each message. The chunks of the engine's collectives have none."""
    field: Nbytes = 16
    """Bytes added to a message for each plain value in it, such as a version or a weight."""
    small: Nbytes = SMALL
    """Messages of at most so many bytes, header included, do not queue."""
    detection: Seconds = 0.05
    """Time from a crash until the other nodes notice it. If a worker joins again within that time, its crash is not
    noticed.
    """
    backward: float = Field(default=2 / 3, ge=0, le=1)
    """Share of a step, at its end, in which the slices of its gradient are completed."""
    memory_bandwidth: MemoryRate = 10e9
    """Bandwidth of messages between a worker and a server beside it."""
    unfairness: float = Field(default=0.0, ge=0, le=2)
    """Inequality of the messages that share a card: the standard deviation of the logarithm of a message's weight. 0:
    equal shares.
    """
    codecs: dict[str, CodecCost] = Field(default_factory=dict)
    """Costs of codecs, by name. Others cost what their classes state."""
    events: tuple[Event, ...] = ()
    """Events at workers."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts that `dure probe` measured for the file. A report of real runs on the same hosts states the
    error of virtual time.
    """

    @model_validator(mode="after")
    def _not_too_many(self) -> Cluster:
        check_workers(self.workers)
        return self

    @model_validator(mode="after")
    def _one_host_or_several(self) -> Cluster:
        several = next((i for i, kind in enumerate(self.machines) if kind.workers > 1), None)
        if self.host is not None and several is not None:
            problem = "`host` places all workers on one machine: write their number as count, or leave `host` out"
            raise FieldError(("machines", several, "workers"), problem)
        if self.host is not None:
            self._no_software_of_machines()
        return self

    def _no_software_of_machines(self) -> None:
        """Raise `FieldError` for a key that the processes of one `host` do not have."""
        given: list[tuple[str | int, ...]] = [("servers", name) for name in self.servers.software]
        given += [("machines", i, "input") for i, kind in enumerate(self.machines) if kind.input is not None]
        if given:
            raise FieldError(given[0], "`host` has no such processes: leave it out, or describe several machines")

    @model_validator(mode="after")
    def _stays_where_machines_push(self) -> Cluster:
        if self.servers.per_machine or self.servers.overlap:
            moved = next((i for i, event in enumerate(self.events) if event.kind in ("crash", "join")), None)
            if moved is not None:
                key = "per_machine" if self.servers.per_machine else "overlap"
                problem = f"with servers.{key} workers wait for each other in each step: leave one of the two out"
                raise FieldError(("events", moved, "kind"), problem)
        return self

    @model_validator(mode="after")
    def _accelerators_everywhere(self) -> Cluster:
        without = next((i for i, kind in enumerate(self.machines) if kind.gpus is None), None)
        if without is not None and any(kind.gpus for kind in self.machines):
            problem = (
                "other machines have `gpus`, and one engine reduces for all: write gpus for all kinds, or for none"
            )
            raise FieldError(("machines", without, "gpus"), problem)
        for name, part in (("engine", self.engine), ("card", self.card)):
            if not self.accelerated and part != type(part)():
                raise FieldError((name,), "it is for accelerators: write gpus in machines, or leave it out")
        if self.host is not None and self.accelerated:
            problem = "`host` has processes on the cores of one machine: leave it out, or write workers"
            raise FieldError(("machines", 0, "gpus"), problem)
        return self

    @model_validator(mode="after")
    def _machines_have_places(self) -> Cluster:
        if self.host is not None and (self.racks is not None or self.sites):
            key = "sites" if self.racks is None else "racks"
            raise FieldError((key,), "`host` places all workers on one machine: leave one of the two out")
        check_sites(self.sites, self.between, sum(kind.count for kind in self.machines))
        return self

    @model_validator(mode="after")
    def _events_make_sense(self) -> Cluster:
        there: dict[int, bool] = {}
        for i, event in sorted(enumerate(self.events), key=lambda pair: pair[1].at):
            worker, kind = event.worker, event.kind
            if worker >= self.workers:
                right = f"write 0 to {self.workers - 1}, or describe more machines"
                raise FieldError(
                    ("events", i, "worker"), f"there is no worker {quoted(worker)} among {self.workers}: {right}"
                )
            present = there.get(worker, kind != "join")
            if present == (kind == "join"):
                problem = f"worker {worker} cannot {kind} at {units.as_seconds(event.at)}: "
                problem += "it is there already" if present else "it crashed before; let it join first"
                raise FieldError(("events", i, "kind"), problem)
            there[worker] = kind != "crash"
        return self

    @classmethod
    def uniform(cls, workers: int = 8, *, compute: Compute | None = None, cores: int = 4, **rest: Any) -> Cluster:
        """Make a cluster of `workers` equal machines; `rest` as for `Cluster`."""
        if workers < 1:
            raise ClusterError(f"workers: {workers} machines make no cluster: write a whole number from 1, such as 8.")
        return cls(machines=(Machines(count=workers, compute=compute or Constant(), cores=cores),), **rest)

    @classmethod
    def described(cls, text: str) -> Cluster:
        """The cluster of one line, as `machines_in_line` reads it, or of a file. Raises `ClusterError`.

        >>> Cluster.described("4x8 v100-sxm2-16gb @ 100 Gbit/s").about()
        '4 machines with 32 GPUs, links of 100 Gbit/s'
        >>> Cluster.described("4x8 v100-sxm2-16gb @ 4x 25 Gbit/s tcp").card.assumed()
        ['TCP uses 90 % of a card', 'at most 13 Gbit/s of a card by TCP']
        """
        line = machines_in_line(text)
        if line is None:
            return cls.from_yaml(text)
        kind: dict[str, Any] = {"count": line.machines, "gpus": line.gpus, "gpu": line.gpu}
        given = {"count": line.cards, "transport": line.transport}
        card = {name: value for name, value in given.items() if value not in (None, "")}
        rest = {"link": {"bandwidth": line.link}} if line.link else {}
        try:
            kind |= {"inside": usual_inside(line.gpu, line.inside)} if line.inside else {}
            if not line.link and line.machines > 1:
                raise ClusterError(f"nothing says how fast the machines' cards are: write {text} @ 100 Gbit/s.")
            if line.link.replace(".", "").isdigit():
                raise ClusterError(f"{line.link} has no unit: write {line.link} Gbit/s, or another one.")
            return cls(machines=(kind,), card=card, **rest)
        except ClusterError as error:
            raise ClusterError(f"{text}: {error}") from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Read a cluster file. Raises `ClusterError` with the file and the key."""
        folder, keys = Path(path).parent, cls.model_fields
        return read_described(path, "a cluster file", keys, lambda given: cls(**_resolved(given, folder)))

    def to_yaml(self) -> str:
        """Describe this cluster as YAML. Reading the text gives an equal cluster."""
        plain = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None)

    def about(self) -> str:
        """The machines in a few words: "8 machines of 2 kinds, links of 100 Mbit/s"."""
        if self.host is not None:
            found = f"{_counted(self.workers, 'worker')} on a machine of {_counted(self.host.cores, 'core')}"
        else:
            links = {units.as_rate(self.link_of(machine).bandwidth): None for machine in range(len(self._kinds))}
            found = _counted(len(self._kinds), "machine")
            found += f" of {len(self.machines)} kinds" if len(self.machines) > 1 else ""
            noun = "GPU" if self.accelerated else "worker"
            found += f" with {_counted(self.workers, noun)}" if self.workers > len(self._kinds) else ""
            found += "" if self._is_one_of_gpus else f", links of {' and '.join(links)}"
            found += f", {self.fabric.about()}" if self.fabric is not None else ""
        return found + (f", as measured on {', '.join(self.hosts)}" if self.hosts else "")

    def basis(self) -> str:
        """One line on the seconds of these machines: the values that were assumed, and how wrong they may be."""
        shared = "" if self.fabric is None else f"Described, not measured: {self.fabric.about()}. "
        if self.hosts:
            return (
                f"Steps and links are measured. {shared}How wrong the seconds are on {', '.join(self.hosts)}: not "
                "checked yet; dure compare with real runs there and this description (--on twice) checks it."
            )
        assumed = self._assumed()
        checked = "dure probe measures machines"
        if self.accelerated:
            checked = "35 of 45 published efficiencies of collectives were near (dure reproduce published)"
        return (
            f"Assumed by default: {', '.join(assumed)}. " if assumed else "All speeds and links are as described. "
        ) + f"{shared}How wrong the seconds are: not checked for these machines; {checked}."

    def _assumed(self) -> list[str]:
        """The speeds and links that are defaults, in words. A file that this cluster wrote names defaults, too."""
        found: dict[str, None] = {}
        for kind in self.machines:
            compute, link = kind.compute, kind.link or self.link
            if kind.gpu is not None:
                found[f"the catalogue's figures of {kind.gpu}"] = None
            elif compute.assumes_speed:
                found[f"{units.as_flops(compute.flops_per_second)} for a machine of speed 1"] = None
            if kind.gpu is None and compute.seconds is None and _is_default(compute, "overhead"):
                found[f"{units.as_seconds(compute.overhead)} of overhead for each step"] = None
            said = self.accelerated and "bandwidth" in link.model_fields_set
            if self.host is None and not self._is_one_of_gpus and _is_default(link, "bandwidth") and not said:
                found[f"links of {units.as_rate(link.bandwidth)}"] = None
            if _is_default(link, "latency") and not self.accelerated:
                found[f"a latency of {units.as_seconds(link.latency)}"] = None
            if self.accelerated and kind.workers > 1:
                stated = (kind.inside or self.inside).model_fields_set
                found |= {} if "bandwidth" in stated else {self._inside(kind).about(): None}
            if self.accelerated and not self._is_one_of_gpus:
                found |= dict.fromkeys((kind.card or self.card).assumed())
        return list(found)

    @cached_property
    def accelerated(self) -> bool:
        """Whether the workers are accelerators, with an engine of their own for collectives."""
        return self.machines[0].gpus is not None

    @property
    def _is_one_of_gpus(self) -> bool:
        """Whether all workers are accelerators of one machine, which no message leaves."""
        return self.accelerated and len(self._kinds) == 1

    @cached_property
    def engine_in_use(self) -> AcceleratorEngine:
        """The engine; without a spread of its own where the durations of steps have a distribution."""
        constant = all(isinstance(kind.compute, Constant) for kind in self.machines)
        return self.engine if constant else self.engine.changed(spread=0.0)

    @cached_property
    def workers(self) -> int:
        """Number of workers, on all machines."""
        return sum(kind.count * kind.workers for kind in self.machines)

    @cached_property
    def absent(self) -> frozenset[int]:
        """Workers that are absent at the start: their first event is `join`."""
        first: dict[int, str] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            first.setdefault(event.worker, event.kind)
        return frozenset(worker for worker, kind in first.items() if kind == "join")

    def joins_after(self, worker: int, seconds: float) -> bool:
        """Whether a worker joins later than `seconds`."""
        return any((each.kind, each.worker) == ("join", worker) and each.at > seconds for each in self.events)

    def placed(self, places: Mapping[str, int]) -> dict[str, int]:
        """The place of each node: as given (`Deployment.places`), or place 0 for all where the cluster is one `host`.

        Place i is that of worker i. The places from number `workers` on are machines of servers.
        """
        return dict(places) if self.host is None else dict.fromkeys(places, 0)

    def machine_of(self, place: int) -> int:
        """The machine of a place. Machines of servers are numbered after those of workers."""
        homes = self._homes
        return homes[place] if place < len(homes) else len(self._kinds) + place - len(homes)

    def link_of(self, machine: int) -> Link:
        """The link of a machine: of its network card."""
        own = self._kinds[machine].link if machine < len(self._kinds) else self.servers.link
        return own or self.link

    def inside_of(self, machine: int) -> InsideLink:
        """The link of each worker of a machine to the others there."""
        return self._inside(self._kinds[machine]) if machine < len(self._kinds) else self.inside

    def _inside(self, kind: Machines) -> InsideLink:
        """The link of a kind: its own or that of the cluster as far as it is stated, the rest that of its device."""
        given = kind.inside or self.inside
        if kind.gpu is None or "bandwidth" in given.model_fields_set:
            return given
        usual = device_inside(kind.gpu) if given.kind is None else usual_inside(kind.gpu, given.kind)
        return usual.changed(latency=given.latency) if "latency" in given.model_fields_set else usual

    def network_bandwidth(self, kind: Machines) -> float:
        """Bytes per second of all network cards of a machine of a kind."""
        nominal, card = (kind.link or self.link).bandwidth, kind.card or self.card
        return nominal if kind.gpus is None else card.count * card.bandwidth(nominal)

    def card_of(self, machine: int) -> Card | None:
        """The cards of a machine of accelerators; None for another, which has one."""
        if not self.accelerated or machine >= len(self._kinds):
            return None
        return self._kinds[machine].card or self.card

    def bandwidth_of(self, machine: int) -> float:
        """Bytes per second of each network card of a machine."""
        card, nominal = self.card_of(machine), self.link_of(machine).bandwidth
        return nominal if card is None else card.bandwidth(nominal)

    def card_number(self, place: int) -> int:
        """The number of the card of a place among those of its machine: neighbors share one."""
        machine = self.machine_of(place)
        card = self.card_of(machine)
        if card is None or card.count == 1:
            return 0
        kind = self._kinds[machine]
        return self._places[place] % kind.workers * min(card.count, kind.workers) // kind.workers

    def cores_of(self, machine: int) -> int:
        """The cores of a machine."""
        return self._kinds[machine].cores if machine < len(self._kinds) else self.servers.cores

    def memory_of(self, worker: int) -> int | None:
        """Bytes of memory of a worker; None: without limit."""
        return self._kinds[self.machine_of(worker)].memory

    def loading(self, worker: int, parts: int = 1) -> float:
        """Seconds in which the machine of a worker loads a sample for it; 0 without limit.

        Of each copy of the model, in `parts` of neighboring workers, the first worker reads the samples.
        """
        kind = self._kinds[self.machine_of(worker)]
        if kind.input is None or worker % parts:
            return 0.0
        first = worker - self._places[worker] % kind.workers
        return len(range(-(-first // parts) * parts, first + kind.workers, parts)) / kind.input

    def latency(self, here: int, there: int) -> float:
        """Latency between two machines, in seconds: the larger of their links' latencies, or of their cards' hops.

        The way between racks or sites adds its own.
        """
        hops = [card.hop for card in (self.card_of(here), self.card_of(there)) if card is not None]
        cards = max(hops) if len(hops) == 2 else max(self.link_of(here).latency, self.link_of(there).latency)
        transit = self.transit(here, there)
        return cards if transit is None else cards + transit.latency

    def bandwidth(self, here: int, there: int) -> float:
        """Bytes per second of a message alone between two machines."""
        transit = self.transit(here, there)
        cards = min(self.bandwidth_of(here), self.bandwidth_of(there))
        return cards if transit is None else min(cards, transit.bandwidth)

    def transit(self, here: int, there: int) -> Transit | None:
        """The way of a message between two machines beside their cards; None within a rack."""
        return None if self.fabric is None else self.fabric.transit(here, there)

    @property
    def states_seconds(self) -> bool:
        """Whether the steps of some machines are seconds, not operations."""
        return any(kind.compute.seconds is not None for kind in self.machines)

    def referred(self, flops: float) -> Cluster:
        """This cluster, whose stated seconds are those of a step of `flops` operations where it does not say."""
        kinds = tuple(kind.changed(compute=kind.compute.referred(flops)) for kind in self.machines)
        return self if kinds == self.machines else self.changed(machines=kinds)

    def durations(self, worker: int, seed: int) -> Durations:
        """Stream of the durations of a worker's steps: the same for the same description, worker and seed."""
        kind = self._kinds[self.machine_of(worker)]
        rng = np.random.default_rng((seed, worker, _COMPUTE_STREAM))
        if isinstance(kind.speed, tuple):
            speed = kind.speed[self._places[worker]]
        else:
            speed = kind.speed if isinstance(kind.speed, float) else kind.speed.speed(rng)
        return Durations(kind.compute, speed, rng)

    def slowness(self, worker: int, now: float) -> float:
        """Factor on the durations of the steps of `worker` at `now`: the product of its slow events."""
        factor = 1.0
        for event in self._events_of[worker]:
            if event.kind == "join" and event.at <= now:
                factor = 1.0
            elif event.factor is not None and event.at <= now < event.until:
                factor *= event.factor
        return factor

    @cached_property
    def fabric(self) -> Fabric | None:
        """The links that machines share; None without racks and sites."""
        if self.racks is None and not self.sites:
            return None
        cards = [self.network_bandwidth(kind) for kind in self._kinds]
        return Fabric(cards, self.racks, self.sites, self.between)

    @cached_property
    def _events_of(self) -> dict[int, list[Event]]:
        """The events of each worker that has some, in order of time."""
        events_of: dict[int, list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            events_of.setdefault(event.worker, []).append(event)
        return events_of

    @cached_property
    def _kinds(self) -> tuple[Machines, ...]:
        """The kind of each machine of workers."""
        return tuple(kind for kind in self.machines for _ in range(kind.count))

    @cached_property
    def _homes(self) -> tuple[int, ...]:
        """The machine of each worker."""
        return tuple(machine for machine, kind in enumerate(self._kinds) for _ in range(kind.workers))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        """The number of each worker among those of its kind."""
        return tuple(i for kind in self.machines for i in range(kind.count * kind.workers))


def device_inside(gpu: str) -> InsideLink:
    """The usual link between devices of the catalogue inside a machine."""
    return InsideLink(**_known_device(gpu).inside or {})


PCIE = ("pcie", "pcie-host")


def usual_inside(gpu: str | None, kind: str) -> InsideLink:
    """The link of a kind between devices inside a machine. That of PCIe has the device's own generation.

    >>> usual_inside("a100-pcie-40gb", "pcie-host").bandwidth, usual_inside("a100-sxm4-40gb", "switch").bandwidth
    (11000000000.0, 230000000000.0)
    """
    usual = InsideLink() if gpu is None else device_inside(gpu)
    if usual.kind == kind:
        return usual
    if usual.kind in PCIE and kind in PCIE:
        return InsideLink(kind=kind, bandwidth=usual.bandwidth * INSIDE[kind].bandwidth / INSIDE[usual.kind].bandwidth)
    return InsideLink(kind=kind)


def _known_device(name: Any) -> Device:
    """The device of that name. Raises `FieldError` unless it is an accelerator of the catalogue."""
    try:
        found = device(str(name))
    except UsageError as error:
        raise FieldError(("gpu",), str(error).removesuffix(".")) from None
    if found.kind == "cpu":
        raise FieldError(("gpu",), f"{name} has cores and no accelerators: write workers in place of gpus and gpu")
    return found


def _is_default(part: Validated, name: str) -> bool:
    """Whether a value of `part` is the default, given or not."""
    return bool(getattr(part, name) == type(part).model_fields[name].default)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _resolved(given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`given` with the paths of trace files resolved against the folder of the cluster file."""
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
