"""What codecs cost in virtual time: a line for each thing that they do.

    encode     start + value * values of the slice
    decode     start + value * values of the slice
    combine    start + value * values of the slice, for each message that is added to a mean; where there is a vote,
               start + value * values of all messages, once

`MEASURED` has them for the library's codecs on one machine; a cluster file's `codecs` has those of `dure probe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dure.core.cost import CodecCost, Line


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
        "fp16": _cost(35, 0.95, 37, 0.81, 60, 1.2),
        "bf16": _cost(32, 1, 35, 0.73, 54, 1.1),
        "int8": _cost(110, 2.1, 80, 0.74, 100, 1.1),
        "1bit": _cost(690, 10, 150, 1.7, 210, 2.1),
        "strom": _cost(470, 4.1, 180, 1.1, 170, 0.75),
        "top-k": _cost(690, 5.4, 300, 1.1, 280, 0.74),
        "sign": _cost(24, 0.82, 22, 0.44, 180, 0.047),
        "ternary": _cost(130, 4.7, 98, 12, 2200, 14),
        "it-sign": _cost(130, 4.6, 98, 12, 3200, 15),
        "fp16+ef": _cost(130, 3.1, 37, 0.77, 63, 1.1),
        "bf16+ef": _cost(110, 3, 36, 0.7, 56, 1.1),
        "int8+ef": _cost(250, 4, 80, 0.74, 100, 1.1),
        "sign+ef": _cost(210, 3.6, 30, 0.45, 55, 0.93),
        "sign+momentum": _cost(54, 1.7, 22, 0.43, 170, 0.045),
        "ternary+momentum": _cost(180, 5.6, 98, 12, 2200, 14),
        "it-sign+momentum": _cost(180, 6, 98, 12, 3400, 15),
    }
)
"""By `python bench/codecs.py --costs`, on a machine of two cores, with one thread."""
