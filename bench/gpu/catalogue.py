"""The figures of the device that virtual time assumes, against measurements of it (check 17).

    python bench/gpu/catalogue.py [--json FILE]

The device's entry in the catalogue is the first whose kind is in the name that the driver gives. Two ranks measure
all-reduces. The bar is for the memory and for large products in the precisions of the data sheet: other figures are
reported. `dure probe --gpu NAME` prints the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _check import Finding, Setting, Unavailable, main, target
from _ranks import on_ranks

from dure.core.devices import Device, catalogue, device
from dure.planner.probe.device import COPIED, REDUCED, SHAPES, DeviceFigure, figures_of, reduced

LOW, HIGH = 0.75, 1.35
"""Measured over assumed: usual shares of a data sheet differ by so much between devices."""


def figures(setting: Setting) -> Iterator[Finding]:
    entry = entry_of(setting)
    target.prepare()
    shapes = SHAPES[: setting.size(len(SHAPES), 0)] or ((8, 8),)
    found = list(
        figures_of(torch.device(target.of_rank(0)), entry, copied=setting.size(COPIED, 1 << 10), shapes=shapes)
    )
    for each in found:
        asked = each.what.startswith("memory") or f"({SHAPES[0][0]}," in each.what
        yield finding(each, asked=asked)
    if setting.rehearse or torch.accelerator.device_count() > 1:
        for each in on_ranks(all_reduces, setting, entry.name)[0]:
            yield finding(DeviceFigure(*each), asked=False)


def all_reduces(rank: int, setting: Setting, name: str) -> list[tuple[str, str, float, float | None]]:
    sizes = REDUCED if not setting.rehearse else [1 << 10]
    return [tuple(each) for each in reduced(torch.device(target.of_rank(rank)), device(name), 2, sizes=sizes)]


def entry_of(setting: Setting) -> Device:
    """The catalogue's entry of the device."""
    told = "a100" if setting.rehearse else torch.cuda.get_device_name(0).lower()
    for each in catalogue().devices:
        if each.kind == "gpu" and each.name.partition("-")[0] in told.replace("-", " ").split():
            return each
    raise Unavailable(f"the catalogue has no device of this name: {told}")


def finding(figure: DeviceFigure, *, asked: bool) -> Finding:
    ratio = figure.ratio
    measured = f"{figure.measured:.4g} {figure.unit}" + ("" if ratio is None else f", {ratio:.2f} of the assumed")
    if not asked or ratio is None:
        return Finding(figure.what, measured, "none", None)
    return Finding(figure.what, measured, f"{LOW} to {HIGH} of the assumed", LOW <= ratio <= HIGH)


CHECKS = {17: figures}

if __name__ == "__main__":
    main(__doc__, CHECKS)
