"""The catalogue of devices and links: its figures are possible ones, and names are found."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.wording import raising

from dure.core.devices import PRODUCTS, catalogue, device, found
from dure.errors import UsageError


def test_names_are_there_once() -> None:
    names = [each.name for each in (*catalogue().devices, *catalogue().links)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("entry", catalogue().devices, ids=lambda each: each.name)
def test_figures_of_a_device_are_possible(entry) -> None:
    assert set(entry.flops) <= set(PRODUCTS)
    assert set(entry.from_memory) <= {"memory", "bandwidth", *entry.flops}
    assert 5e10 <= entry.bandwidth <= 1e13
    assert entry.kind == "cpu" or 4e9 <= entry.memory <= 6e11
    in_order = [entry.flops[name] for name in ("fp32", "tf32", "fp16", "fp8") if name in entry.flops]
    assert all(after >= 0.99 * before for before, after in pairwise(in_order))
    assert 1e12 <= max(entry.flops.values()) <= 1e16
    assert entry.source


def test_published_figures() -> None:
    v100, a100 = device("v100-sxm2-16gb"), device("a100-sxm4-80gb")
    assert (v100.memory, v100.bandwidth, v100.flops["fp32"], v100.flops["fp16"]) == (16 * 2**30, 900e9, 15.7e12, 125e12)
    assert (a100.bandwidth, a100.flops["tf32"], a100.flops["bf16"]) == (2039e9, 156e12, 312e12)


def test_a_device_computes_in_another_precision_where_it_lacks_one() -> None:
    pascal = device("p40")
    assert [pascal.precision(name) for name in PRODUCTS] == ["fp32"] * 5
    assert device("a100-sxm4-40gb").precision("fp8") == "bf16"
    assert device("tpu-v3").precision("fp32") == "bf16"


def test_intensity_is_the_ratio_of_reached_speeds() -> None:
    assert device("v100-sxm2-16gb").intensity("fp32") == pytest.approx(0.7 * 15.7e12 / (0.75 * 900e9))


def test_a_part_of_a_name_finds_devices_and_links() -> None:
    devices, links = found("nvlink-2")
    assert (devices, [each.name for each in links]) == ([], ["nvlink-2"])
    assert {each.name for each in found("v100")[0]} > {"v100-sxm2-16gb", "v100-sxm2-32gb"}
    assert len(found("")[0]) == len(catalogue().devices)


def test_unknown_names_are_explained() -> None:
    with raising(UsageError, "There is v100-sxm2-16gb."):
        device("v100-sxm2-16")
    with raising(UsageError, 'Did you mean "rtx-4090"?'):
        device("rtx4090")
    with raising(UsageError, "has 'warp-drive' in its name"):
        found("warp-drive")


def test_a_p100_has_no_products_of_fp16_with_sums_in_fp32() -> None:
    assert device("p100-sxm2-16gb").precision("fp16") == "fp32"


@pytest.mark.parametrize(("lanes", "gbit"), [("sdr", 8), ("ddr", 16), ("qdr", 32), ("fdr", 54.5), ("edr", 100)])
def test_infiniband_moves_its_bits_after_the_line_code(lanes: str, gbit: float) -> None:
    (link,) = found(f"infiniband-{lanes}")[1]
    assert link.bandwidth == gbit * 1e9 / 8
