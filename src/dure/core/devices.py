"""The catalogue of devices and links: figures of data sheets by name (`devices.yaml`), and shares that training gets.

A device alone is a roofline. In each operation it computes or moves bytes, whichever takes longer:

    seconds = k + max(FLOP / (u P), bytes / (v M))

P is the peak of matrix products at the precision, M the bandwidth of the memory. k, u and v are usual values, and not
those of a model: ratios of predictions hardly depend on them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dure.core.spec_text import names, nearest
from dure.core.units import Flops, MemoryRate, Rate, Size
from dure.core.validated import Validated, read_yaml_file
from dure.errors import UsageError

FILE = Path(__file__).with_name("devices.yaml")

KERNEL = 6e-6
"""k: seconds of the start of an operation on a device."""

PRODUCTS = {"fp32": 0.7, "tf32": 0.45, "fp16": 0.45, "bf16": 0.45, "fp8": 0.45}
"""u: the share of its peak that a device reaches in large matrix products, by their precision."""

MOVED = 0.75
"""v: the share of the bandwidth of its memory that a device reaches."""

SLOWER = {"tf32": "fp32", "bf16": "fp16", "fp16": "fp32", "fp8": "bf16"}
"""The precision in which a device computes that lacks the other one."""


class Device(Validated):
    """A device: `memory` in bytes, `bandwidth` of the memory, peak `flops` by precision, usual link `inside` a host.

    `from_memory` names figures that were not read in a source.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory: Size | None = None
    bandwidth: MemoryRate
    flops: dict[str, Flops] = Field(min_length=1)
    inside: dict[str, Any] | None = None
    source: str
    from_memory: tuple[str, ...] = ()

    def precision(self, wanted: str) -> str:
        """`wanted`, or the precision in which the device computes instead.

        >>> device("v100-sxm2-16gb").precision("tf32"), device("v100-sxm2-16gb").precision("bf16")
        ('fp32', 'fp16')
        """
        while wanted not in self.flops and wanted in SLOWER:
            wanted = SLOWER[wanted]
        return wanted if wanted in self.flops else next(iter(self.flops))

    def speed(self, precision: str) -> float:
        """Operations per second of large matrix products at a precision."""
        known = self.precision(precision)
        return PRODUCTS[known] * self.flops[known]

    def intensity(self, precision: str) -> float:
        """Operations of matrix products in the time in which the device moves a byte of its memory."""
        return self.speed(precision) / (MOVED * self.bandwidth)


class NamedLink(Validated):
    """A link: bytes per second in each direction."""

    name: str
    bandwidth: Rate
    source: str
    from_memory: tuple[str, ...] = ()


class Catalogue(Validated):
    """All devices and links."""

    devices: tuple[Device, ...]
    links: tuple[NamedLink, ...]


@cache
def catalogue() -> Catalogue:
    """The catalogue of `devices.yaml`."""
    found = read_yaml_file(FILE)
    devices = tuple(Device(**each) for each in found["devices"])
    return Catalogue(devices=devices, links=tuple(NamedLink(**each) for each in found["links"]))


def device(name: str) -> Device:
    """The device of this name. Raises `UsageError` for a name that the catalogue lacks."""
    known = {each.name: each for each in catalogue().devices}
    if name not in known:
        alike = [each for each in known if name in each]
        hint = f" There is {names(alike)}." if alike and name else nearest(name, known)
        raise UsageError(f"no device is called {name!r}.{hint} `dure devices` lists {len(known)}.")
    return known[name]


def found(text: str) -> tuple[list[Device], list[NamedLink]]:
    """The devices and links whose name contains `text`. Raises `UsageError` if there are none."""
    everything = catalogue()
    devices = [each for each in everything.devices if text in each.name]
    links = [each for each in everything.links if text in each.name]
    if not devices and not links:
        known = [*(each.name for each in everything.devices), *(each.name for each in everything.links)]
        some = names(["v100", "rtx-4090", "infiniband"])
        raise UsageError(f"no device and no link has {text!r} in its name.{nearest(text, known)} Try {some}.")
    return devices, links
