"""All-reduce written from sends, beside the engine's; `dure reproduce collectives` has them in virtual time.

    python bench/collectives.py [--workers 4] [--repeats 15] [--json FILE]

The same processes, one thread each and over loopback, all-reduce a tensor by each algorithm in turn, in a rotating
order, so many times from a barrier to the last process's end; medians. The engine is Gloo, as dure calls it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _side_by_side as side
import torch
import torch.distributed as dist
from _script import parse, print_ratios, ratio_of, told

from dure.core.node import Group
from dure.run.strategy import make
from dure.runtime.process.group import ProcessGroup
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity
from dure.topology.collective.message_group import SentGroup, algorithm_of

SENT = ("ring", "tree", "halving-doubling", "all-to-all")
SIZES = {"1 kB": (1_000, 40), "1 MB": (1_000_000, 8), "16 MB": (16_000_000, 2)}
"""Bytes, and all-reduces per turn."""


@dataclass
class AllReduces:
    """One group, and the tensor that it reduces over and over: zeros, so that it stays as it is."""

    node: ProcessNode
    group: Group
    tensor: torch.Tensor

    def train(self, steps: int) -> None:
        async def work() -> None:
            for _ in range(steps):
                await self.group.all_reduce(self.tensor)

        self.node.loop.run_until(self.node.spawn(work(), self.node.name))

    @property
    def params(self) -> torch.Tensor:
        return self.tensor


def connected(rank: int, workers: int) -> ProcessNode:
    """A node that knows where the others are."""
    node = ProcessNode(Identity("bench", f"worker {rank}", rank), side.CREDENTIALS)
    ports: list[Any] = [None] * workers
    dist.all_gather_object(ports, node.wire.listen())
    node.directory.update({f"worker {other}": ("127.0.0.1", port) for other, port in enumerate(ports)})
    return node


def measure(rank: int, given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of one all-reduce in each turn, by size and algorithm."""
    node, ranks = connected(rank, given.workers), range(given.workers)
    groups: dict[str, Group] = {"engine": ProcessGroup(node, ranks, None)}
    for name in given.algorithms:
        groups[name] = SentGroup(node, ranks, algorithm_of(make(f"collective:algorithm={name}")), node.meter)
    found = {}
    for size in given.sizes:
        nbytes, steps = SIZES[size]
        arms: dict[str, side.Arm] = {
            name: AllReduces(node, group, torch.zeros(nbytes // 4)) for name, group in groups.items()
        }
        side.warm_up(arms, steps)
        seconds = side.take_turns(arms, steps, given.repeats)
        found[size] = {name: [taken / steps for taken in each] for name, each in seconds.items()}
    dist.barrier()
    node.services.clear()
    node.wire.close(1.0)
    return found


def show(rows: dict[str, dict[str, float]]) -> None:
    """A row per size, in milliseconds; the fastest of those written from sends is marked."""
    names = list(next(iter(rows.values())))
    print(" " * 16 + "".join(f"{name:>26}" for name in names))
    for row, seconds in rows.items():
        best = min((each, name) for name, each in seconds.items() if name != "engine")[1]
        cells = [f"{seconds[name] * 1e3:.3f} ms{'*' if name == best else ' '}" for name in names]
        print(f"{row:>16}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--algorithms", nargs="+", default=SENT, choices=SENT)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--json", type=Path)
    given = parse(parser, workers=2, repeats=2, sizes=["1 kB", "1 MB"])
    with told("collectives", given) as facts:
        found = side.in_processes(measure, given)
        rows = {
            size: {name: statistics.median(each) for name, each in seconds.items()} for size, seconds in found.items()
        }
        show(rows)
        ratios = [
            ratio_of(f"all_reduce of {size}, {name}, {given.workers} processes", "Gloo", each, seconds["engine"])
            for size, seconds in found.items()
            for name, each in seconds.items()
            if name != "engine"
        ]
        print_ratios(ratios)
        facts |= {"workers": given.workers, "seconds": rows, "ratios": ratios}


if __name__ == "__main__":
    main()
