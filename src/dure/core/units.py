"""Reading and writing of quantities with units: "20 ms", "10 Gbit/s", "0.1 ns/B", "20 GFLOP/s", "11 GB".

A number without unit is in the base unit: seconds, bytes per second, seconds per byte, operations per second, bytes.
Readers raise `ValueError`. A writer's text reads back as exactly the same number.

>>> seconds("20 ms"), rate("10 Gbit/s"), per_byte("0.5 ns/B"), flops("20 GFLOP/s")
(0.02, 1250000000.0, 5e-10, 20000000000.0)
>>> as_rate(1.25e9), as_seconds(2e-5)
('10 Gbit/s', '20 us')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from dure.core.text import quoted

_SECONDS = {"s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60", "h": "3600"}
_RATES = {
    "Tbit/s": "125e9", "Gbit/s": "125e6", "Mbit/s": "125e3", "kbit/s": "125", "bit/s": "0.125",
    "TB/s": "1e12", "GB/s": "1e9", "MB/s": "1e6", "kB/s": "1e3", "B/s": "1",
    "GiB/s": "1073741824", "MiB/s": "1048576", "KiB/s": "1024",
}  # fmt: skip
_PER_BYTE = {"s/B": "1", "ms/B": "1e-3", "us/B": "1e-6", "µs/B": "1e-6", "ns/B": "1e-9", "ps/B": "1e-12"}
_SIZES = {
    "TB": "1e12", "GB": "1e9", "MB": "1e6", "kB": "1e3", "B": "1",
    "TiB": "1099511627776", "GiB": "1073741824", "MiB": "1048576", "KiB": "1024",
}  # fmt: skip
_SAMPLES = {"samples/s": "1"}
_FLOPS = {"PFLOP/s": "1e15", "TFLOP/s": "1e12", "GFLOP/s": "1e9", "MFLOP/s": "1e6", "FLOP/s": "1"}

_HELD = 1e-30, 1e30
"""Smallest and largest quantity: products and quotients of some of them are still finite."""

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def _read(given: object, units: Mapping[str, str], what: str, example: str) -> float:
    """Read `given`, a number or a text, in the base unit. It must be finite, and zero or of a size that `_HELD` has."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        value = _times(given, "1")
    else:
        match = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
        if match is None:
            raise ValueError(f"{quoted(given)} is not {what}: write a number and a unit, such as {example!r}")
        number, unit = match.groups()
        if unit and unit not in units:
            raise ValueError(
                f"{quoted(given)} has no unit of {what}: write one of {', '.join(units)}, as in {example!r}"
            )
        value = _times(number, units.get(unit, "1"))
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{quoted(given)} is not {what}: it must be finite and not negative, such as {example!r}")
    if value and not _HELD[0] <= value <= _HELD[1]:
        bounds = "zero, or from {:g} to {:g} in the base unit".format(*_HELD)
        raise ValueError(f"{quoted(given)} is not {what}: it must be {bounds}, such as {example!r}")
    return value


def above_zero(given: object) -> object:
    """Return `given`. Raises `ValueError` for zero, as a number or as a text."""
    match = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if given == 0 or (match is not None and float(match[1]) == 0):
        raise ValueError(f"{quoted(given)} must be above zero")
    return given


def seconds(given: object) -> float:
    """Read a time in seconds, at least 0."""
    return _read(given, _SECONDS, "a time", "20 ms")


def rate(given: object) -> float:
    """Read a bandwidth in bytes per second, above 0."""
    return _read(above_zero(given), _RATES, "a bandwidth", "10 Gbit/s")


def per_byte(given: object) -> float:
    """Read a cost in seconds per byte, at least 0."""
    return _read(given, _PER_BYTE, "a cost per byte", "0.1 ns/B")


def flops(given: object) -> float:
    """Read a speed in floating-point operations per second, above 0."""
    return _read(above_zero(given), _FLOPS, "a speed", "20 GFLOP/s")


def samples_per_second(given: object) -> float:
    """Read a number of samples per second, above 0.

    >>> samples_per_second("3000 samples/s")
    3000.0
    """
    return _read(above_zero(given), _SAMPLES, "a number of samples per second", "3000 samples/s")


def size(given: object) -> int:
    """Read a size in whole bytes, above 0.

    >>> size("11 GB"), size("0.5 KiB")
    (11000000000, 512)
    """
    value = _read(above_zero(given), _SIZES, "a size", "11 GB")
    if not value.is_integer():
        raise ValueError(f"{quoted(given)} is not a size: it must be a whole number of bytes, such as '11 GB'")
    return int(value)


def _times(number: float | str, unit: str) -> float:
    """The product, rounded once, so that "100 us" and "0.1 ms" are the same float; infinity for one out of range."""
    try:
        return float(Decimal(number) * Decimal(unit))
    except ArithmeticError:
        return math.inf


def _write(value: float, units: Mapping[str, str], *names: str) -> str:
    """Write `value` in the first unit of `names` in which it is at least 1 and exact; else in the last one."""
    for name in names:
        text = f"{value / float(units[name]):.12g}"
        if float(text) >= 1 and "e" not in text and _times(text, units[name]) == value:
            return f"{text} {name}"
    return f"{value!r} {names[-1]}"


def as_seconds(value: float) -> str:
    """Write a time in seconds."""
    return _write(value, _SECONDS, "s", "ms", "us", "ns", "s")


def as_rate(value: float) -> str:
    """Write the bandwidth of a link, given in bytes per second, in bits per second."""
    return _write(value, _RATES, "Gbit/s", "Mbit/s", "kbit/s", "B/s")


def as_memory_rate(value: float) -> str:
    """Write the bandwidth of memory in bytes per second."""
    return _write(value, _RATES, "GB/s", "MB/s", "B/s")


def as_per_byte(value: float) -> str:
    """Write a cost in seconds per byte."""
    return _write(value, _PER_BYTE, "us/B", "ns/B", "ps/B", "s/B")


def as_size(value: int) -> str:
    """Write a size in bytes."""
    return _write(value, _SIZES, "GiB", "GB", "MiB", "MB", "B")


def as_samples_per_second(value: float) -> str:
    """Write a number of samples per second."""
    return _write(value, _SAMPLES, "samples/s")


def as_flops(value: float) -> str:
    """Write a speed in floating-point operations per second."""
    return _write(value, _FLOPS, "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s")


Seconds = Annotated[float, BeforeValidator(seconds), PlainSerializer(as_seconds, when_used="json")]
PositiveSeconds = Annotated[Seconds, BeforeValidator(above_zero)]
Rate = Annotated[float, BeforeValidator(rate), PlainSerializer(as_rate, when_used="json")]
MemoryRate = Annotated[float, BeforeValidator(rate), PlainSerializer(as_memory_rate, when_used="json")]
Size = Annotated[int, BeforeValidator(size), PlainSerializer(as_size, when_used="json")]
Flops = Annotated[float, BeforeValidator(flops), PlainSerializer(as_flops, when_used="json")]
