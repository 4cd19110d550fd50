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
        "fp16": _cost(62, 1.7, 43, 12, 0, 13),
        "bf16": _cost(24, 1.9, 21, 11, 0, 12),
        "int8": _cost(0, 9.3, 56, 2.9, 48, 3.8),
        "1bit": _cost(530, 35, 170, 16, 58, 17),
        "strom": _cost(860, 5.6, 210, 0.61, 230, 0.025),
        "top-k": _cost(720, 23, 330, 1.5, 350, 1),
        "sign": _cost(91, 1.3, 36, 0.46, 340, 0.073),
        "ternary": _cost(2.4, 16, 33, 33, 94, 34),
        "it-sign": _cost(380, 11, 310, 29, 12000, 35),
        "fp16+ef": _cost(0, 10, 0, 8.2, 0, 9.2),
        "bf16+ef": _cost(370, 10, 180, 6.7, 250, 6.5),
        "int8+ef": _cost(0, 10, 48, 2.3, 28, 2.9),
        "sign+ef": _cost(96, 4, 24, 0.36, 15, 1.1),
        "sign+momentum": _cost(30, 1.5, 10, 0.32, 190, 1.7),
        "ternary+momentum": _cost(94, 13, 0, 30, 2500, 32),
        "it-sign+momentum": _cost(0, 15, 0, 31, 3200, 36),
    }
)
"""By `python bench/codecs.py --costs`, on a machine of two cores without other work, with one thread."""
