"""Codecs on 25 million float32 values, on one core, beside a plain copy of the same array in the same run.

    python bench/codecs.py [--numel 25000000] [--repeats 9]
    python bench/codecs.py --costs

Each repeat times the copy and then every codec once; figures are medians, and ratios to the copy's median.

`--costs` draws lines through what encoding, decoding and combining take for slices of a thousand to 4 million values:
microseconds of a call and nanoseconds of a value, as the codecs state them for virtual time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _script import parse, ratio_of, told

from dure.codec import bits
from dure.codec.coder import Coder, FeedbackCoder, SliceLayout
from dure.codec.cost import random_slices, timed
from dure.codec.floats import BFloat16, Float16, Int8
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.codec.strom import Strom
from dure.codec.ternary import Ternary
from dure.codec.top_k import TopK
from dure.codec.vote import Majority
from dure.core.cost import codec_cost
from dure.run.strategy import codec_name, make

VOTERS = 15
COLUMN = 1000  # elements

COSTED = (
    *("fp16", "bf16", "int8", "1bit", "strom:threshold=10", "top-k:share=0.01", "sign", "ternary", "it-sign"),
    *("fp16+ef", "bf16+ef", "int8+ef", "sign:scaled=true+ef", "sign+momentum", "ternary+momentum", "it-sign+momentum"),
)
"""What `--costs` is for. After STEADY messages of normally distributed values about one in a hundred is beyond 10."""

STEADY = 40

BARS = {"sign encode": 1.5, "sign decode": 4.0, "majority of 15": 4.0, "strom encode, 1 %": 6.0}
"""What is asked for, in times of the copy."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--numel", type=int, default=25_000_000)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--costs", action="store_true")
    arguments.add_argument("--json", type=Path)
    given = parse(arguments, numel=1_000_000, repeats=2)
    torch.set_num_threads(1)
    if given.costs:
        print_costs()
        return
    with told("codecs", given) as facts:
        facts |= {"numel": given.numel, **compare(given)}


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Time all in turn, and print a line for each."""
    values = torch.randn(given.numel, generator=torch.Generator().manual_seed(0))
    steady = Strom(2.576).coder(SliceLayout.plain(given.numel))
    steady.encode(values)  # its residual is there from the first message on
    work = setups(values, steady)
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(given.repeats + 1):  # the first warms up
        for name, setup in work.items():
            assert steady.residual is not None
            steady.residual.zero_()  # as before a message of which one element in a hundred is sent
            started = time.perf_counter()
            setup()
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    for name, seconds in medians.items():
        bar = f"  (at most {BARS[name]})" if name in BARS else ""
        print(f"{name:24} {seconds * 1e3:9.1f} ms {seconds / medians['copy']:7.2f}x{bar}")
    ratios = [ratio_of(name, "a copy", each[1:], times["copy"][1:]) for name, each in times.items() if name != "copy"]
    return {"ratio_to_copy": {name: seconds / medians["copy"] for name, seconds in medians.items()}, "ratios": ratios}


def print_costs() -> None:
    """A row for each codec and for what may join it."""
    for text in COSTED:
        codec = make(text, "codec")
        cost = codec_cost(timed(codec, random_slices(messages=STEADY if text.startswith("strom") else VOTERS)))
        pairs = [f"({line.start * 1e6:.3g}, {line.value * 1e9:.3g})" for _, line in cost]
        print(f'    "{codec_name(codec)}": CodecCost.measured({", ".join(pairs)}),', flush=True)


def setups(values: torch.Tensor, steady: FeedbackCoder) -> dict[str, Callable[[], object]]:
    """What is timed, by name; the copy first."""
    numel = values.numel()
    out, layout = torch.empty_like(values), SliceLayout.plain(numel)
    matrix = SliceLayout(numel, tuple(range(0, numel + 1, COLUMN)), (True,) * (numel // COLUMN))
    coders: dict[str, Coder] = {
        "sign": Sign().coder(layout),
        "fp16": Float16().coder(layout),
        "bf16": BFloat16().coder(layout),
        "int8": Int8().coder(layout),
        "one bit": OneBit(feedback=False).coder(matrix),
        "ternary": Ternary().coder(layout),
        "ternary planes": Ternary("planes").coder(layout),
        "top-k, 1 %": TopK(0.01, feedback=False).coder(layout),
    }
    work: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(values)}
    for name, coder in coders.items():
        message = coder.encode(values)
        work[f"{name} encode"] = lambda coder=coder: coder.encode(values)
        work[f"{name} decode"] = lambda coder=coder, message=message: coder.decode(message, out)
    message = Strom(2.576).coder(layout).encode(values)
    work["strom encode, 1 %"] = lambda: steady.encode(values)
    work["strom accumulate, 1 %"] = lambda: steady.accumulate(message, out)
    votes = {voter: bits.pack_signs(values.roll(voter)) for voter in range(VOTERS)}
    work["majority of 15"] = lambda: Majority().decide(votes, coders["sign"])
    return work


if __name__ == "__main__":
    main()
