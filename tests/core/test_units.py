"""Quantities read and written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wording import raising

from dure.core import units

PAIRS: dict[str, tuple[Callable[[object], float], Callable[[float], str]]] = {
    "seconds": (units.seconds, units.as_seconds),
    "rate": (units.rate, units.as_rate),
    "memory rate": (units.rate, units.as_memory_rate),
    "per byte": (units.per_byte, units.as_per_byte),
    "flops": (units.flops, units.as_flops),
}


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.seconds, "0.1 ms", 1e-4),
        (units.seconds, "100us", 1e-4),
        (units.seconds, "2 min", 120.0),
        (units.seconds, 3, 3.0),
        (units.seconds, "1e-3", 1e-3),
        (units.rate, "10 Gbit/s", 1.25e9),
        (units.rate, "100 Mbit/s", 1.25e7),
        (units.rate, "1.2 GB/s", 1.2e9),
        (units.rate, "1 MiB/s", 2.0**20),
        (units.rate, 5e6, 5e6),
        (units.per_byte, "0.1 ns/B", 1e-10),
        (units.flops, "20 GFLOP/s", 2e10),
        (units.size, "11 GB", 11 * 10**9),
        (units.size, "0.5 KiB", 512),
        (units.size, 7, 7),
    ],
)
def test_reads(read: Callable[[object], float], text: object, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "given_"),
    [
        (units.seconds, "-1 s"),
        (units.seconds, "1 Gbit/s"),
        (units.seconds, "s"),
        (units.seconds, None),
        (units.seconds, True),
        (units.seconds, float("nan")),
        (units.rate, "10 gbit"),
        (units.rate, "0 Gbit/s"),
        (units.rate, 0),
        (units.rate, float("inf")),
        (units.flops, "0"),
        (units.per_byte, "1 ns"),
        (units.size, "0"),
        (units.size, "1 GB/s"),
        (units.size, "0.5 B"),
    ],
)
def test_refuses_and_says_what_it_was_given(read: Callable[[object], float], given_: object) -> None:
    with raising(ValueError) as caught:
        read(given_)
    assert repr(given_) in str(caught.value)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PAIRS)
@given(value=st.floats(1e-15, 1e18))
def test_what_is_written_reads_back_exactly(name: str, value: float) -> None:
    read, write = PAIRS[name]
    assert read(write(value)) == value


@given(value=st.integers(1, 2**50))
def test_a_written_size_reads_back_exactly(value: int) -> None:
    assert units.size(units.as_size(value)) == value


def test_a_size_is_written_short() -> None:
    sizes = {11 * 10**9: "11 GB", 24 * 2**30: "24 GiB", 1536: "1536 B"}
    assert [units.as_size(value) for value in sizes] == list(sizes.values())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("seconds", 1e-4, "100 us"),
        ("seconds", 30.0, "30 s"),
        ("seconds", 0.0, "0.0 s"),
        ("rate", 1.25e9, "10 Gbit/s"),
        ("memory rate", 1e10, "10 GB/s"),
        ("per byte", 1e-10, "100 ps/B"),
        ("flops", 2e10, "20 GFLOP/s"),
    ],
)
def test_writes_short(name: str, value: float, text: str) -> None:
    assert PAIRS[name][1](value) == text
