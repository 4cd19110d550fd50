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
    """The network link of a machine: bytes per second in each direction, and seconds of latency.

    Between machines with different links the larger latency counts.
    """

    bandwidth: Rate = 1.25e9
    latency: Seconds = 1e-4


class Machines(Validated):
    """`count` machines of one kind, with `workers` workers on each, which share the machine's `link` and `cores`.

    `gpus` in place of `workers`: their collectives are those of the engine of accelerators, over `card`. `gpu` names
    them in the catalogue of devices, whose speed, memory and links inside a machine then count where nothing else is
    said. The defaults of `link`, `inside` and `card` are those of the cluster. `speed` divides the duration of every
    step: a number, one number for each worker, or a distribution from which each worker draws once (`lognormal` with
    sigma, `uniform` from low to high). `memory`: bytes of memory of each worker; None: without limit. `input`: samples
    per second that a machine loads, an equal share for each of its workers; None: without limit. `price`: of an hour of
    a machine, in any currency; a plan then shows costs.
    """

    count: int = Field(default=1, ge=1)
    gpus: int | None = Field(default=None, ge=1)  # before `workers`, as errors name the first field
    gpu: str | None = None
    workers: int = Field(default=1, ge=1)
    compute: Compute = Constant()
    speed: Speed = 1.0
    cores: Cores = 4
    memory: Size | None = None
    input: SamplesRate | None = None
    price: Price | None = None
    link: Link | None = None
    inside: InsideLink | None = None
    card: Card | None = None

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
    """Machines of parameter servers that are not beside workers. The default of `link` is the link of the cluster.

    `price`: of an hour of a machine. The others describe the software of all servers (`server_software`). `variable`:
    seconds of a process, at each end, for a variable of a push or a pull. `process`: bytes of these that a process
    packs or unpacks in a second; None: without limit. `threads`: variables that it packs at once. `per_machine`: the
    workers of a machine push and pull as one. `overlap`: with bsp, variables of a gradient are pushed during backward,
    as soon as each is complete. `early_pulls`: then each is pulled as soon as all workers have pushed it.
    """

    cores: Cores = 4
    price: Price | None = None
    link: Link | None = None
    variable: Seconds = 0.0
    process: MemoryRate | None = None
    threads: int = Field(default=1, ge=1, le=1024)
    per_machine: bool = False
    overlap: bool = False
    early_pulls: bool = False

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
    """Cost of a round between neighbors in the engine's ring: `start` seconds, and `byte` seconds per byte sent."""

    start: Seconds = 1e-4
    byte: PerByte = 0.1e-9


class SharedHost(Validated):
    """One machine on which all workers and servers are processes that share its `cores`.

    Busy processes share the cores equally. A message takes `alpha + bytes * beta` seconds of a core in the process of
    its sender, then the latency of the link, then as many seconds of a core in the process of its receiver.
    `all_reduce` is a round of the engine's collectives. `gradient` is a round of the sum of gradients during backward.
    """

    cores: Cores = 2
    all_reduce: RoundCost = RoundCost()
    gradient: RoundCost = RoundCost()


class Event(Validated):
    """An event at a worker, and its time.

    crash   the worker fails; what it had not sent is lost
    join    the worker starts, or starts again; a worker whose first event is `join` is absent from the start
    pause   the worker computes and answers nothing, `for` a time
    slow    the steps of the worker take `factor` times as long, `for` a time or to the end

    The factors of overlapping slow events multiply. Of overlapping pauses the later end counts. After a crash and a
    join, earlier slow events and pauses have no effect.
    """

    at: Seconds
    kind: Literal["crash", "join", "pause", "slow"]
    worker: int = Field(ge=0)
    duration: PositiveSeconds | None = Field(default=None, alias="for")
    factor: Factor | None = None

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
    """A virtual cluster; see the head of this module. Raises `ClusterError` where the values describe none.

    `alpha`, `beta`: seconds of a core per message and per byte of it, at both ends.
    `gamma`: seconds per byte of memory that a server reads or writes to apply an update.
    `header`, `field`: bytes of a message besides its tensors, and for each plain value.
    `small`: messages of at most so many bytes on the wire do not queue.
    `detection`: seconds until the others notice a crash.
    `backward`: the share of a step in which the slices of its gradient are completed.
    `unfairness`: how unequally messages share a network card, as the standard deviation of the logarithm of a
    message's weight; 0 for equal shares.
    `codecs`: the cost of codecs by name; others cost what their classes state (`codec.cost`).
    `host`: if given, all workers and servers are processes of this one machine.
    `inside`: the link between workers of one machine.
    `card`, `engine`: the cards of machines with `gpus`, and the engine of their collectives.
    `racks`, `sites`, `between`: links that several machines share (`runtime.virtual.fabric`).
    `hosts`: names of the hosts that `dure probe` measured for this description; empty if it was written by hand.
    """

    machines: tuple[Machines, ...] = Field(default=(Machines(count=8),), min_length=1)
    servers: ServerMachines = ServerMachines()
    link: Link = Link()
    inside: InsideLink = InsideLink()
    card: Card = Card()
    engine: AcceleratorEngine = AcceleratorEngine()
    racks: Racks | None = None
    sites: tuple[Site, ...] = ()
    between: SiteLines | None = None
    host: SharedHost | None = None
    alpha: Seconds = 20e-6
    beta: PerByte = 0.1e-9
    gamma: PerByte = 0.3e-9
    header: Nbytes = HEADER
    field: Nbytes = 16
    small: Nbytes = SMALL
    detection: Seconds = 0.05
    backward: float = Field(default=2 / 3, ge=0, le=1)
    memory_bandwidth: MemoryRate = 10e9
    unfairness: float = Field(default=0.0, ge=0, le=2)
    codecs: dict[str, CodecCost] = Field(default_factory=dict)
    events: tuple[Event, ...] = ()
    hosts: tuple[str, ...] = ()

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
