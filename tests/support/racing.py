"""A program of processes that race for one segment: `python racing.py EXPERIMENT`; prints what came of it as JSON.

A process of its own, because only one without threads may be forked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dure.runtime.memory import MappedMemory
from dure.topology.shared_memory.segment import Layout, Segment

WORKERS = 3
UPDATES = 2000


def segment(numel: int, dtype: torch.dtype = torch.float32) -> tuple[Segment, MappedMemory]:
    layout = Layout(numel, dtype, WORKERS)
    memory = MappedMemory(layout.nbytes)
    return Segment(layout, memory.bytes, memory), memory


def raced(work: Callable[[int], None]) -> None:
    """Have every worker do its `work` in a process of its own, all at once."""
    children = []
    for rank in range(WORKERS):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                work(rank)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * WORKERS


def mapped(memory: MappedMemory) -> Segment:
    """The same, found by its path as the workers of a run find it."""
    there = MappedMemory.of(memory.path)
    return Segment(Layout(1, torch.float32, WORKERS), there.bytes, there)


def count(locks: int, numel: int = 1, updates: int = UPDATES) -> dict[str, Any]:
    """Everybody adds 1 to a number, or to many, over and over."""
    shared, _ = segment(numel)
    one = torch.ones(numel)

    def work(rank: int) -> None:
        for _ in range(updates):
            shared.add(rank, one, 1.0, seen=shared.version, locks=locks)

    raced(work)
    values = {"least": float(shared.values.min()), "most": float(shared.values.max())}
    return {**values, "version": shared.version, "written": shared.written, "expected": WORKERS * updates}


def claims() -> dict[str, Any]:
    """Everybody draws 3 at a time from one counter; each writes down what it got."""
    shared, memory = segment(1)
    limit = 3 * WORKERS * UPDATES
    drawn = MappedMemory(8 * limit)
    got = drawn.bytes.view(torch.int64)

    def work(rank: int) -> None:
        own = mapped(memory)
        while (at := own.claim(2, 3, limit)) is not None:
            got[at] += 1

    raced(work)
    return {"each once": bool((got[::3] == 1).all()), "sum": int(got.sum()), "counter": int(shared.claims[2])}


def serial() -> dict[str, Any]:
    """Under one lock: who made which version is written down, replayed, and compared bit for bit."""
    numel = 257
    shared, _ = segment(numel)
    table = torch.randn(WORKERS, UPDATES, numel, generator=torch.Generator().manual_seed(1))
    notes = MappedMemory(8 * WORKERS * UPDATES)
    made = notes.bytes.view(torch.int64).view(WORKERS, UPDATES)

    def work(rank: int) -> None:
        for number in range(UPDATES):
            made[rank, number] = shared.add(rank, table[rank, number], -0.1, seen=shared.version, locks=1)

    raced(work)
    order = [divmod(index, UPDATES) for index in made.reshape(-1).argsort().tolist()]
    values, by_rank = torch.zeros(numel), torch.zeros(numel)
    for rank, number in order:
        values.add_(table[rank, number], alpha=-0.1)
    for rank, number in sorted(order):
        by_rank.add_(table[rank, number], alpha=-0.1)
    changes = sum(before[0] != after[0] for before, after in pairwise(order))
    return {
        "versions": sorted(made.reshape(-1).tolist()) == list(range(1, WORKERS * UPDATES + 1)),
        "replayed": torch.equal(values, shared.values),
        "by rank": torch.equal(by_rank, shared.values),
        "changes": changes,
    }


def disjoint() -> dict[str, Any]:
    """Everybody has numbers of its own, without locks: as if each had been alone."""
    numel = 8 * WORKERS
    shared, _ = segment(numel)
    steps = torch.randn(WORKERS, UPDATES, 8, generator=torch.Generator().manual_seed(1))

    def update(rank: int, number: int) -> torch.Tensor:
        indices = (torch.arange(8) * WORKERS + rank).unsqueeze(0)  # neighbors in memory
        return torch.sparse_coo_tensor(
            indices, steps[rank, number], (numel,), is_coalesced=True, check_invariants=False
        )

    def work(rank: int) -> None:
        for number in range(UPDATES):
            shared.add(rank, update(rank, number), 0.1, seen=0)

    raced(work)
    alone = Segment(Layout(numel, torch.float32, WORKERS))
    for rank in range(WORKERS):
        work_alone = [alone.add(rank, update(rank, number), 0.1, seen=0) for number in range(UPDATES)]
    assert len(work_alone) == UPDATES
    return {"equal": torch.equal(alone.values, shared.values), "written": shared.written}


def killed() -> dict[str, Any]:
    """A worker that is killed while it holds a lock holds it no more; the others' counts are as they were."""
    shared, memory = segment(4)
    pid = os.fork()
    if not pid:
        with memory.hold(0):
            shared.add(1, torch.ones(4), 1.0, seen=0)
            time.sleep(60)
    while shared.version == 0:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    began = time.monotonic()
    shared.add(0, torch.ones(4), 1.0, seen=1, locks=1)
    return {"seconds": time.monotonic() - began, "values": shared.values.tolist(), "version": shared.version}


def gone() -> dict[str, Any]:
    """The owner is killed: its path is gone at once, the memory with the last who has mapped it."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        _, memory = segment(1 << 20)
        os.write(tell, memory.path.encode())
        time.sleep(60)
    path = os.read(told, 100).decode()
    before = len(maps())
    there = MappedMemory.of(path)
    there.bytes[0] = 7
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    still = int(there.bytes[0])
    during = len(maps())
    after_path = Path(path).exists()
    there.bytes = torch.empty(0)
    there._mapped.close()
    os.close(there._file)
    return {"before": before, "still": still, "during": during, "path": after_path, "after": len(maps())}


def maps() -> list[str]:
    """Mappings of our memory in this process, and descriptors of it."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:dure" in line]
    return lines + [path for path in os.listdir("/proc/self/fd") if "memfd:dure" in _target(path)]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "racy": lambda: count(0, numel=200_000, updates=100),
    "atomic": lambda: count(1, numel=200_000, updates=100),
    "striped": lambda: count(5, numel=13),
    "claims": claims,
    "serial": serial,
    "disjoint": disjoint,
    "killed": killed,
    "gone": gone,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps({name: EXPERIMENTS[name]() for name in sys.argv[1:]}) + "\n")
