"""The accelerators of this machine, beside what virtual time assumes of one in the catalogue (`core/devices.py`).

    figure      measured                                                assumed
    memory      bytes read and written in a second by copies            `MOVED` of the bandwidth of its memory
    products    operations in a second of (rows, width) @ (width,       the roofline of `core/devices.py`, without the
                width), by precision; few rows: a narrow slice          start of an operation
    link        bytes in a second of a copy to the next device          a ring over two of the usual link
    all-reduce  2 (N - 1) / N times the bytes of each of N ranks        a ring over all devices of the machine
                in a second, by the size of a tensor

A figure is the median of several repeats; the device has ended its work before the clock is read. Nothing here is of
CUDA alone, so tests measure CPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from dure.core.devices import MOVED, Device
from dure.errors import UsageError
from dure.runtime.virtual.accelerators import InsideLink

if TYPE_CHECKING:
    from rich.table import Table

    from dure.runtime.launch.rendezvous import RankEnvironment

REPEATS = 7

COPIED = 1 << 28
"""Bytes of a tensor that is copied: more than any cache has."""

SHAPES = ((4096, 4096), (512, 4096), (32, 4096))
"""Rows and width of the matrices of a product: a large one, a slice, and a narrow one."""

REDUCED = tuple(1 << power for power in range(20, 29, 2))
"""Bytes of a rank's tensor in all-reduces: 1 to 256 MiB."""

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class DeviceFigure(NamedTuple):
    """A figure: bytes or operations in a second, measured and assumed (None: the catalogue does not say)."""

    what: str
    unit: str
    measured: float
    assumed: float | None

    @property
    def ratio(self) -> float | None:
        """The measured figure over the assumed one."""
        return self.measured / self.assumed if self.assumed else None


def probe_devices(here: RankEnvironment, entry: Device) -> list[DeviceFigure]:
    """The figures of this process's accelerator, and of links and all-reduces where there are several.

    Under torchrun every rank measures all-reduces with the others. Raises `UsageError` on a machine without one.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        raise UsageError(
            f"--gpu {entry.name} compares accelerators, and PyTorch finds none on this machine. Leave --gpu out to "
            "measure its cores, its links and a job's steps."
        )
    count = torch.accelerator.device_count()
    devices = [torch.device(kind.type, (here.local_rank + each) % count) for each in range(count)]
    torch.accelerator.set_device_index(devices[0].index)
    found = [*figures_of(devices[0], entry)]
    if len(devices) > 1:
        found.append(link_figure(devices[0], devices[1], entry))
    if here.world_size > 1:
        distributed.init_process_group()
        try:
            found += reduced(devices[0], entry, here.local_size)
        finally:
            distributed.destroy_process_group()
    return found


def figures_of(
    device: torch.device, entry: Device, *, copied: int = COPIED, shapes: Sequence[tuple[int, int]] = SHAPES
) -> Iterator[DeviceFigure]:
    """The bandwidth of the memory, and the speeds of products in the precisions that `entry` has."""
    source, target = (torch.ones(copied, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * copied / _seconds(partial(target.copy_, source), device)
    yield DeviceFigure("memory, read and written", "B/s", rate, MOVED * entry.bandwidth)
    del source, target
    for precision in (each for each in PRECISIONS if each in entry.flops):
        for rows, width in shapes:
            what = f"{precision} ({rows}, {width}) @ ({width}, {width})"
            speed, assumed = _product(device, precision, rows, width), _assumed(entry, precision, rows, width)
            yield DeviceFigure(what, "FLOP/s", speed, assumed)


def _product(device: torch.device, precision: str, rows: int, width: int) -> float:
    """Operations in a second of a product of matrices."""
    one, other = (torch.ones(size, width, dtype=PRECISIONS[precision], device=device) for size in (rows, width))
    with _exactly(precision):
        return 2 * rows * width**2 / _seconds(lambda: one @ other, device)


@contextmanager
def _exactly(precision: str) -> Iterator[None]:
    """Products of float32 in TF32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _assumed(entry: Device, precision: str, rows: int, width: int) -> float:
    """Operations in a second of a product by the roofline of virtual time, without the start of a kernel."""
    nbytes = (2 * rows * width + width**2) * PRECISIONS[precision].itemsize
    return min(entry.speed(precision), 2 * rows * width**2 / nbytes * MOVED * entry.bandwidth)


def link_figure(one: torch.device, other: torch.device, entry: Device, *, copied: int = COPIED) -> DeviceFigure:
    """The bandwidth of copies from one device to another."""
    source = torch.ones(copied, dtype=torch.uint8, device=one)
    target = torch.ones(copied, dtype=torch.uint8, device=other)
    seconds = _seconds(partial(target.copy_, source), one, other)
    return DeviceFigure(f"link from {one} to {other}", "B/s", copied / seconds, _ring(entry, 2))


def reduced(
    device: torch.device, entry: Device, local: int, *, sizes: Sequence[int] = REDUCED
) -> Iterator[DeviceFigure]:
    """The bus bandwidth of all-reduces of all ranks, `local` of them on each machine. Each rank has to call it."""
    ranks = distributed.get_world_size()
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4, device=device)  # sums of zeros stay finite
        distributed.barrier()
        seconds = _seconds(partial(distributed.all_reduce, tensor), device)
        rate = 2 * (ranks - 1) / ranks * nbytes / seconds
        assumed = _ring(entry, ranks) if local == ranks else None  # else the cards count, which the catalogue lacks
        yield DeviceFigure(f"all-reduce of {ranks} ranks, {nbytes >> 10:,} KiB", "B/s", rate, assumed)


def _ring(entry: Device, gpus: int) -> float | None:
    return None if entry.inside is None else InsideLink(**entry.inside).ring(gpus)


def _seconds(step: Callable[[], Any], *devices: torch.device) -> float:
    """The median seconds of a step on the devices; two first ones are not counted."""
    times = []
    for _ in range(2 + REPEATS):
        _wait(devices)
        began = time.perf_counter()
        step()
        _wait(devices)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def values_of(entry: Device, found: Sequence[DeviceFigure]) -> dict[str, Any]:
    """The figures as values of JSON."""
    return {"gpu": entry.name, "figures": [{**each._asdict(), "ratio": each.ratio} for each in found]}


def table_of(values: Mapping[str, Any]) -> Table:
    """The figures, the assumed ones, and their ratio."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", caption="assumed: by virtual time, from the catalogue")
    table.add_column("figure")
    for heading in ("measured", f"assumed of {values['gpu']}", "measured / assumed"):
        table.add_column(heading, justify="right")
    for each in values["figures"]:
        giga, unit = (1e9, "GB/s") if each["unit"] == "B/s" else (1e12, "TFLOP/s")
        assumed = "" if each["assumed"] is None else f"{each['assumed'] / giga:,.4g} {unit}"
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}"
        table.add_row(each["what"], f"{each['measured'] / giga:,.4g} {unit}", assumed, ratio)
    return table
