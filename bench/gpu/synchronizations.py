"""How often the host waits for the device while it encodes a message and makes a step (check 3).

    python bench/gpu/synchronizations.py [--json FILE]
    python bench/gpu/synchronizations.py --device standin --table

CUDA reports each synchronizing operation (`torch.cuda.set_sync_debug_mode`); the report has its place in the code. The
stand-in counts its own, so that `--device standin` needs no GPU; the tables of `docs/research/gpu.md` have its counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from _check import ROOT, Finding, Setting, main, target
from _ranks import on_ranks
from _training import WithAttach

from dure.codec.coder import SliceLayout
from dure.run.strategy import make

CODECS = (
    *("fp32", "fp16", "bf16", "int8", "1bit", "sign", "sign:scaled=true+ef", "sign+momentum", "ternary"),
    *("ternary:coding=planes", "it-sign", "strom:threshold=2", "top-k:share=0.01"),
)
TWICE = ("strom",)
"""Codecs whose messages have a length that only the device knows: the host asks once more to encode."""

OVER_NCCL = ("bsp", "averaging:period=1")
STRATEGIES = (
    *OVER_NCCL,
    "bsp collective:algorithm=ring",
    "bsp ps",
    "ssp:bound=3 ps",
    "downpour",
    "averaging:period=1 ps",
)
NUMEL = 1 << 14
WARM_UP, MEASURED = 3, 4


def most(text: str) -> int:
    """How many synchronizations the encoding of a message may have."""
    return 2 if text.startswith(TWICE) else 1


def coding(text: str) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """The synchronizations of encoding and of decoding each message after the first ones."""
    coder = make(text, "codec").coder(SliceLayout.plain(NUMEL))
    draw = torch.Generator().manual_seed(0)
    for message in range(WARM_UP + MEASURED):
        values = torch.randn(NUMEL, generator=draw).to(target.of_rank(0))
        with target.synchronizations() as encoding:
            encoded = coder.encode(values)
        with target.synchronizations() as decoding:
            coder.decode(encoded, values)
        if message >= WARM_UP:
            yield encoding, decoding


def steps(rank: int, setting: Setting, strategies: Sequence[str]) -> dict[str, list[Counter[str]]]:
    """The synchronizations of each step after the first ones, backward included, by strategy."""
    small = replace(setting, rehearse=True)  # a count does not depend on the size of the model
    return {strategy: list(_steps(WithAttach(rank, small, strategy))) for strategy in strategies}


def _steps(arm: WithAttach) -> Iterator[Counter[str]]:
    for number in range(WARM_UP + MEASURED):
        with target.synchronizations() as found:
            arm.step()
        if number >= WARM_UP:
            yield found
    arm.replica.close()


def by_strategy(setting: Setting) -> dict[str, list[Counter[str]]]:
    over_nccl = not target.absent(2)
    strategies = STRATEGIES if over_nccl else [each for each in STRATEGIES if each not in OVER_NCCL]
    found: dict[str, list[Counter[str]]] = on_ranks(steps, setting, strategies, group=over_nccl)[0]
    return found


def check(setting: Setting) -> Iterator[Finding]:
    for text in CODECS:
        encoding, decoding = zip(*coding(text), strict=True)
        yield _finding(f"encoding a message by {text}", encoding, most(text))
        yield _finding(f"decoding a message by {text}", decoding, 1)
    for strategy, found in by_strategy(setting).items():
        yield _finding(f"a step of {strategy}, backward included", found, 1)


def _finding(what: str, found: Sequence[Counter[str]], bar: int) -> Finding:
    count = max(each.total() for each in found)
    places = sorted(place.removeprefix(f"{ROOT}/") for place in found[-1])
    where = f" ({', '.join(places)})" if count else ""
    return Finding(f"synchronizations in {what}", f"{count}{where}", f"at most {bar}", count <= bar)


def table(setting: Setting) -> Iterator[str]:
    """Two tables in Markdown: by codec and by strategy."""
    yield from ("| codec | waits to encode a message | at most | to decode it | at most |", "|---|---|---|---|---|")
    for text in CODECS:
        encode, decode = (max(each.total() for each in found) for found in zip(*coding(text), strict=True))
        yield f"| `{text}` | {encode} | {most(text)} | {decode} | 1 |"
    yield from ("", "| strategy | waits of a step |", "|---|---|")
    for strategy, found in by_strategy(setting).items():
        yield f"| `{strategy}` | {max(each.total() for each in found)} |"


CHECKS = {3: check}

if __name__ == "__main__":
    main(__doc__, CHECKS, table)
