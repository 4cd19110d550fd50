"""`dure probe --gpu`: measured figures of a device beside the catalogue's, here of a made-up device and of CPUs."""

import io

import pytest
import torch
from rich.console import Console
from support.wording import raising
from torch import distributed

from dure.cli.main import main
from dure.core.devices import Device, device
from dure.errors import UsageError
from dure.planner.probe.device import (
    DeviceFigure,
    figures_of,
    link_figure,
    probe_devices,
    reduced,
    table_of,
    values_of,
)
from dure.runtime.launch.rendezvous import RankEnvironment

CPU = torch.device("cpu")
MADE_UP = Device(
    name="made-up",
    bandwidth="100 GB/s",
    flops={"fp32": "1 TFLOP/s", "bf16": "4 TFLOP/s"},
    inside={"kind": "mesh", "bandwidth": "10 GB/s"},
    source="a test",
)


def test_memory_and_products_are_compared_with_what_virtual_time_assumes():
    memory, *products = figures_of(CPU, MADE_UP, copied=1 << 22, shapes=[(256, 256), (1, 256)])
    assert memory.assumed == pytest.approx(0.75 * 100e9)
    assert memory.ratio == memory.measured / memory.assumed
    assert 1e8 < memory.measured < 1e12
    large, narrow = products[:2]
    assert large.what == "fp32 (256, 256) @ (256, 256)"
    assert large.assumed == pytest.approx(0.7e12)
    # a row of 256 values: 131,072 operations for 264 kB of memory
    assert narrow.assumed == pytest.approx(2 * 256**2 / (4 * (2 * 256 + 256**2)) * 75e9)
    assert [each.what[:4] for each in products] == ["fp32", "fp32", "bf16", "bf16"]
    assert products[2].assumed == pytest.approx(0.45 * 4e12)
    assert all(1e6 < each.measured < 1e14 for each in products)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_link_between_two_devices_is_compared_with_a_ring_over_two():
    link = link_figure(CPU, CPU, MADE_UP, copied=1 << 22)
    assert link.assumed == 10e9
    alone = MADE_UP.changed(inside=None)
    assert link_figure(CPU, CPU, alone, copied=1 << 10).assumed is None


def test_all_reduces_of_a_machine_are_compared_with_a_ring_over_its_devices():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        (one,) = reduced(CPU, MADE_UP, 1, sizes=[1 << 10])
        (spread,) = reduced(CPU, MADE_UP, 0, sizes=[1 << 10])
    finally:
        distributed.destroy_process_group()
    assert (one.what, one.assumed, one.measured) == ("all-reduce of 1 ranks, 1 KiB", 10e9, 0.0)
    assert spread.assumed is None


def test_the_table_has_the_ratio_of_each_figure_that_the_catalogue_has():
    found = [DeviceFigure("memory", "B/s", 50e9, 75e9), DeviceFigure("fp32", "FLOP/s", 2e12, None)]
    values = values_of(MADE_UP, found)
    assert [each["ratio"] for each in values["figures"]] == [pytest.approx(2 / 3), None]
    console = Console(width=120, file=io.StringIO())
    console.print(table_of(values))
    text = console.file.getvalue()
    assert "assumed of made-up" in text
    line = next(part for part in text.splitlines() if "memory" in part)
    assert line.split() == ["memory", "50", "GB/s", "75", "GB/s", "0.67"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_accelerators_is_told_so(capsys):
    with raising(UsageError, "a100-sxm4-80gb"):
        probe_devices(RankEnvironment(), device("a100-sxm4-80gb"))
    assert main(["probe", "digits-mlp", "--gpu", "a100-sxm4-80gb"]) == 2
    assert "leave the job and --codec out" in capsys.readouterr().err
    assert main(["probe", "--gpu", "a100"]) == 2
