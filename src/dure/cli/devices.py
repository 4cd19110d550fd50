"""The catalogue of devices and links as rows and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dure.core import units
from dure.core.devices import PRODUCTS, Device, NamedLink

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

TERA = 1e12

NOTE = (
    "TFLOP/s are peaks of matrix products, without sparsity; fp16 with sums in fp32. * from memory: not read in a "
    "source. A cluster file names a device by `gpu`."
)


def rows(devices: Sequence[Device], links: Sequence[NamedLink]) -> dict[str, Any]:
    """The entries of the catalogue, in bytes, bytes per second and operations per second."""
    return {"devices": [each.model_dump() for each in devices], "links": [each.model_dump() for each in links]}


def tables(devices: Sequence[Device], links: Sequence[NamedLink]) -> list[RenderableType]:
    """A line for each device and for each link, with its source."""
    shown: list[RenderableType] = []
    if devices:
        shown.append(_devices_table(devices))
    if links:
        shown.append(_links_table(links))
    return [*shown, NOTE]


def _devices_table(devices: Sequence[Device]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("device", no_wrap=True)
    for heading in ("memory", "GB/s", *PRODUCTS):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("inside a host", no_wrap=True)
    table.add_column("source", overflow="fold")
    for each in devices:
        memory = "" if each.memory is None else units.as_size(each.memory)
        figures = [_marked(each, "memory", memory), _marked(each, "bandwidth", f"{each.bandwidth / 1e9:,.0f}")]
        figures += [
            _marked(each, name, f"{each.flops[name] / TERA:,.4g}") if name in each.flops else "" for name in PRODUCTS
        ]
        inside = "" if each.inside is None else f"{each.inside['kind']}, {each.inside['bandwidth']}"
        table.add_row(each.name, *figures, inside, each.source)
    return table


def _links_table(links: Sequence[NamedLink]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column("link", no_wrap=True)
    table.add_column("in each direction", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for each in links:
        table.add_row(each.name, _marked(each, "bandwidth", units.as_rate(each.bandwidth)), each.source)
    return table


def _marked(entry: Device | NamedLink, figure: str, text: str) -> str:
    return f"{text}*" if figure in entry.from_memory else text
