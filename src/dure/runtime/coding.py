"""What codecs cost in virtual time: a line for each thing that they do.

    encode     start + value * values of the slice
    decode     start + value * values of the slice
    combine    start + value * values of the slice, for each message that is added to a mean; where there is a vote,
               start + value * values of all messages, once

`MEASURED` has them for the library's codecs on one machine; a cluster file's `codecs` has those of `dure probe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dure.runtime.base import Coding
from dure.runtime.compute import Seconds
from dure.runtime.described import Described


class Line(Described):
    """Seconds of a call, and of each value in it."""

    start: Seconds = 0.0
    value: Seconds = 0.0


class CodecCost(Described):
    """What a codec's coder takes of a core, on a machine of speed 1."""

    encode: Line = Line()
    decode: Line = Line()
    combine: Line = Line()

    def seconds(self, codings: Iterable[Coding]) -> float:
        """All of `codings`, one after another."""
        total = 0.0
        for coding in codings:
            line: Line = getattr(self, coding.operation)
            total += coding.calls * (line.start + coding.numel * line.value)
        return total


def cost_of(name: str, given: Mapping[str, CodecCost]) -> CodecCost:
    """That of a codec and what joins it, such as "sign+momentum": as `given`, else as MEASURED.

    Where neither has it, what the codec costs alone; a codec that is not known costs nothing.
    """
    alone = name.partition("+")[0]
    for key in (name, alone):
        for table in (given, MEASURED):
            if key in table:
                return table[key]
    return CodecCost()


def _cost(*lines: float) -> CodecCost:
    """From microseconds of a call and nanoseconds of a value, for encode, decode, combine."""
    starts, values = lines[::2], lines[1::2]
    each = [Line(start=start * 1e-6, value=value * 1e-9) for start, value in zip(starts, values, strict=True)]
    return CodecCost(encode=each[0], decode=each[1], combine=each[2])


MEASURED: Mapping[str, CodecCost] = MappingProxyType(
    {
        "fp16": _cost(0, 1.5, 0, 6.7, 24, 7.2),
        "bf16": _cost(0, 1.5, 0, 7.1, 0, 8.4),
        "int8": _cost(0, 7, 0, 2.5, 0, 3.3),
        "1bit": _cost(530, 35, 170, 16, 58, 17),
        "strom": _cost(1100, 7.1, 460, 0.8, 390, 0.55),
        "top-k": _cost(720, 23, 310, 1.5, 310, 1.2),
        "sign": _cost(130, 0.88, 30, 0.39, 340, 0.073),
        "ternary": _cost(160, 11, 33, 33, 94, 34),
        "it-sign": _cost(380, 11, 310, 29, 0, 48),
        "fp16+ef": _cost(54, 8.8, 51, 6.1, 56, 6.6),
        "bf16+ef": _cost(0, 10, 0, 6.9, 6, 6.4),
        "int8+ef": _cost(0, 8.8, 11, 2.3, 0, 3),
        "sign+ef": _cost(130, 3.3, 25, 0.33, 17, 0.99),
        "sign+momentum": _cost(30, 1.5, 10, 0.32, 190, 1.7),
        "ternary+momentum": _cost(130, 11, 0, 30, 2500, 32),
        "it-sign+momentum": _cost(0, 14, 0, 31, 3200, 36),
    }
)
"""By `python bench/codecs.py --costs`, on a machine of two cores, with one thread: of two runs the faster line each."""
