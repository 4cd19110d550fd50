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
        "fp16": _cost(0, 0.98, 0, 1.1, 0, 1.4),
        "bf16": _cost(0, 1.3, 0, 0.97, 0, 1.4),
        "int8": _cost(360, 2.3, 85, 1, 140, 1.3),
        "1bit": _cost(0, 12, 0, 3, 0, 3),
        "strom": _cost(820, 6, 260, 1.6, 300, 0.97),
        "top-k": _cost(0, 26, 0, 1.9, 91, 1.1),
        "sign": _cost(37, 1.2, 0, 0.89, 300, 0.08),
        "ternary": _cost(0, 11, 0, 19, 0, 30),
        "it-sign": _cost(0, 17, 0, 33, 3800, 41),
        "fp16+ef": _cost(0, 10, 0, 1.9, 0, 2.5),
        "bf16+ef": _cost(0, 10, 0, 0.98, 19, 1.5),
        "int8+ef": _cost(0, 15, 0, 1.6, 43, 2.1),
        "sign+ef": _cost(0, 8.4, 0, 0.88, 0, 1.3),
        "sign+momentum": _cost(0, 3.1, 0, 0.64, 0, 5.1),
        "ternary+momentum": _cost(0, 15, 1500, 25, 6500, 28),
        "it-sign+momentum": _cost(96, 6.4, 490, 12, 17000, 22),
    }
)
"""By `python bench/codecs.py --costs`, on a machine of two cores, with one thread."""
