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
        "fp16": _cost(64, 1, 40, 0.94, 99, 1.2),
        "bf16": _cost(0, 1.6, 0, 1.3, 0, 2),
        "int8": _cost(250, 2.6, 76, 1.1, 14, 1.8),
        "1bit": _cost(380, 11, 500, 1.7, 520, 2.2),
        "strom": _cost(390, 4.3, 130, 1.2, 160, 0.71),
        "top-k": _cost(0, 23, 33, 1.6, 110, 1),
        "sign": _cost(35, 1.3, 0, 0.97, 130, 0.083),
        "ternary": _cost(840, 5.3, 1000, 13, 20000, 14),
        "it-sign": _cost(920, 4.5, 570, 12, 4800, 19),
        "fp16+ef": _cost(0, 3.7, 0, 1.2, 0, 1.6),
        "bf16+ef": _cost(260, 3.4, 27, 0.84, 0, 1.4),
        "int8+ef": _cost(0, 5.4, 0, 1.2, 0, 1.5),
        "sign+ef": _cost(0, 5.1, 0, 0.92, 0, 1.8),
        "sign+momentum": _cost(140, 2.2, 64, 0.51, 330, 0.042),
        "ternary+momentum": _cost(0, 6.4, 0, 13, 610, 16),
        "it-sign+momentum": _cost(380, 9, 460, 14, 14000, 19),
    }
)
"""By `python bench/codecs.py --costs`, on a machine of two cores, with one thread."""
