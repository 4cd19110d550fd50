"""Accelerators in a cluster file: the links inside a machine, its network cards, and the engine of their collectives.

    machines:
    - {count: 4, gpus: 8, inside: {kind: mesh}, card: {count: 4}}     # four cards of the link's bandwidth each
    link: {bandwidth: 100 Gbit/s}
    engine: {library: ddp}

`gpus` is the number of workers of a machine, whose collectives are those of an engine of accelerators (NCCL).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dure.core import units
from dure.core.units import MemoryRate, Rate, Seconds, Size
from dure.core.validated import Validated


class InsideKind(NamedTuple):
    """Defaults of a kind of links inside a machine: bytes per second of a link, and seconds of a hop."""

    bandwidth: float
    latency: float


INSIDE = {
    "mesh": InsideKind(22e9, 3.4e-6),
    "switch": InsideKind(120e9, 3.4e-6),
    "pcie": InsideKind(10e9, 5.7e-6),
    "pcie-host": InsideKind(5.5e9, 5.7e-6),
}
"""Kinds of links between the GPUs of a machine: NVLink as a mesh and over switches, both of V100; slots of PCIe 3 below
one switch, and through the host. Bandwidths are usual results of measurements, hops those of NCCL's tuning tables."""

MESH_LINKS = ((2, 1.0), (4, 80 / 22), (8, 130 / 22))
"""Links of a mesh that rings over so many GPUs use at once: 22, 80 and 130 GB/s are usual bus bandwidths of V100."""


class PartlyStated(Validated):
    """A description of which a file states a part (`model_fields_set`), and the rest follows.

    A file that dure writes states the same part, so that the same facts are open in it.
    """

    @model_serializer(mode="wrap")
    def _as_stated(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dumped(self)
        return {name: value for name, value in found.items() if name in self.model_fields_set}


class InsideLink(PartlyStated):
    """The link of a worker to the other workers of its machine. Each worker has one of its own."""

    kind: Literal["mesh", "switch", "pcie", "pcie-host"] | None = None
    """Kind of the link, which sets other defaults of `bandwidth` and `latency`. The links of a `mesh` each have the
    bandwidth, and a ring uses several.
    """
    bandwidth: MemoryRate = 12e9
    """Bandwidth of each direction of the link that a worker has to the others on its machine. The default is that of
    PCIe 3.0 with 16 lanes, 15.75 GB/s less a quarter.
    """
    latency: Seconds = 10e-6
    """Time from the last byte sent to its arrival at another worker of the machine."""

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        known = INSIDE.get(str(values.get("kind"))) if isinstance(values, dict) else None
        return make(values) if known is None else make(known._asdict() | values).stating(values)

    def ring(self, gpus: int) -> float:
        """Bytes per second of a ring over so many GPUs of the machine."""
        if self.kind != "mesh":
            return self.bandwidth
        return self.bandwidth * next((links for most, links in MESH_LINKS if gpus <= most), MESH_LINKS[-1][1])

    def about(self) -> str:
        """The bandwidth in words."""
        each = "by each link of the mesh between" if self.kind == "mesh" else "between"
        return f"{units.as_memory_rate(self.bandwidth)} {each} the GPUs of a machine"


class Card(PartlyStated):
    """The network cards of a machine with accelerators."""

    count: int = Field(default=1, ge=1, le=1024)
    """Network cards of a machine, each of the link's bandwidth."""
    transport: Literal["rdma", "tcp"] = "rdma"
    """Transport of the network, which sets the defaults of `share`, `flow` and `hop`."""
    share: float = Field(default=0.88, gt=0, le=1)
    """Share of the bandwidth that is left for data. By RDMA 0.88 (measurements of NCCL have 0.82 to 0.92), by TCP 0.9.
    """
    flow: Rate | None = None
    """Most bytes per second of a card. By RDMA no limit, by TCP 13 Gbit/s: a core sends 8 to 18."""
    hop: Seconds = 9.6e-6
    """Time of a message to another machine, in place of the link's latency. By RDMA 9.6 us (NCCL's tuning tables), by
    TCP 40 us (25 to 80).
    """

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_transport(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict) or values.get("transport") != "tcp":
            return make(values)
        given = {name: value for name, value in values.items() if name != "flow" or value is not None}
        return make({"share": 0.9, "flow": 13e9 / 8, "hop": 40e-6} | given).stating(given)

    def assumed(self) -> list[str]:
        """The values that nobody has stated, in words."""
        stated, found = self.model_fields_set, []
        if "count" not in stated:
            found.append("one network card for each machine")
        if "share" not in stated:
            found.append(f"{self.transport.upper()} uses {self.share:.0%} of a card".replace("%", " %"))
        if self.flow is not None and "flow" not in stated:
            found.append(f"at most {units.as_rate(self.flow)} of a card by TCP")
        return found

    def bandwidth(self, nominal: float) -> float:
        """Bytes per second of one card of `nominal` bandwidth."""
        return min(nominal * self.share, math.inf if self.flow is None else self.flow)


class Library(NamedTuple):
    """How a library sums gradients during backward.

    Bytes of the `first` bucket and of the others; seconds for each `tensor` during backward; seconds between two
    `cycle`s, in which the ranks agree on the tensors that are ready, `negotiation` seconds for each rank. Without a
    cycle, buckets are made of tensors in the order of backward.
    """

    first: float
    bucket: float
    tensor: float = 0.0
    cycle: float = 0.0
    negotiation: float = 0.0


LIBRARIES = {
    "ddp": Library(first=2**20, bucket=25 * 2**20, tensor=25e-6),
    "horovod": Library(first=64 * 2**20, bucket=64 * 2**20, cycle=5e-3, negotiation=10e-6),
    "at-end": Library(first=math.inf, bucket=math.inf),
}
"""PyTorch's DistributedDataParallel; Horovod with its cycle and fusion buffer; one message after backward.

The sizes and the cycle are the libraries' defaults. 25 us are three small kernels for each tensor. The negotiation is a
guess."""


class AcceleratorEngine(PartlyStated):
    """The engine of the accelerators' collectives, and the library that calls it."""

    library: Literal["ddp", "horovod", "at-end"] = "ddp"
    """Library whose buckets and costs count."""
    bucket: Size | None = None
    """Size of a bucket. Default: the library's."""
    overlap: bool = True
    """Whether buckets leave during backward."""
    start: Seconds = 40e-6
    """Time of the start of a collective, in which nothing is computed."""
    contention: float = Field(default=0.10, ge=0, le=10)
    """While a bucket is under way, computation takes 1 + so many times as long."""
    spread: float = Field(default=0.02, ge=0, le=1)
    """Standard deviation of the durations of equal steps, in shares of a step. It is left out if the machines'
    durations have a distribution.
    """
    intensity: float | None = Field(default=None, gt=0, le=1e6)
    """Operations that a device makes in the time in which it moves a byte of its memory. Default: those of `gpu`, else
    16.
    """

    @property
    def rules(self) -> Library:
        """The buckets and costs of the library, with this engine's size of a bucket."""
        found = LIBRARIES[self.library]
        return found if self.bucket is None else found._replace(first=min(found.first, self.bucket), bucket=self.bucket)


def slowest_of(ranks: int) -> float:
    """The expected maximum of so many standard normal values, by Blom's approximation.

    >>> round(slowest_of(2), 2), round(slowest_of(16), 2), round(slowest_of(512), 2)
    (0.59, 1.77, 3.03)
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
