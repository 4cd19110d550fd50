"""Sharded data parallelism beside PyTorch's: steps per second, memory, and bytes on the network.

    python bench/zero.py [--speed]      zero:stage=1 beside DistributedDataParallel, zero:stage=3 beside fully_shard
    python bench/zero.py --memory       memory of each stage, beside the formula and fully_shard
    sudo python bench/zero.py --bytes   bytes of a step at a network interface, beside the formula and both peers

The model is `char-gpt` with about 5 or 50 million parameters, whose blocks are the children of an `nn.Sequential`;
AdamW, windows of 64 characters. `fully_shard` wraps each block and the root and else has its defaults. Gloo, one
thread for each process.

**Speed.** The same processes hold all arms and take turns (`_side_by_side.py`): same initial values, same mini-batches,
same optimizer; at the end both sides of a pair must have the same parameters. First over loopback. Then stage 3 and
fully_shard between two network namespaces whose cards carry `--mbit`, if this is root and has `ip` and `tc`.

**Memory.** Fresh processes for each line. `tensors` is the largest sum of the bytes of all storages that exist at once,
taken after each operation of the steps, those of backward and of the optimizer included; `built` is the same while the
model is built. `resident` is the growth of resident memory of a worker of `dure train` at its highest, over that of a
worker with a tiny model; `share` divides each page by the number of processes that have it, such as the fork server.
Of the peer, it is the growth over the moment before the model was built, after a tiny model has trained. The formula,
for P bytes of parameters, V vectors of the optimizer, N ranks, the largest block b and activations a:

    stage 1   P + P (1 + 1/N)      + V P / N + a
    stage 2   P + P / N            + V P / N + a     and the slices of the gradient that are under way
    stage 3   P / N + 2 b + P / N + b + V P / N + a

`declared` is what dure itself holds against the memory of a machine (`dure.run.memory`); the percentages are over it.

**Bytes.** Two processes or more, each in a namespace of its own. A step is charged the bytes that leave its interface,
less 66 for each frame: 14 of Ethernet, 20 of IP, 32 of TCP with time stamps. Formula: (N - 1) / N P times 2, 2 and
3 - b_last / P for the three stages, with b_last the bytes of the last block.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from _live_storage import LiveStorage, Resident, peak_of
from _script import PATH, parse, print_ratios, told
from _side_by_side import (
    LIMIT,
    Arm,
    Dure,
    Loop,
    Measure,
    Measured,
    in_processes,
    must_agree,
    options,
    take_turns,
    warm_up,
)
from _zero_job import SIZES, sized
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dure.job.job import Job
from dure.job.optimizer import vectors_of
from dure.partition.blocks import blocks_of
from dure.run.config import TrainConfig
from dure.run.memory import memory_use
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure.run.train import run
from dure.runtime.launch.fork_server import ForkServer
from dure_studies import namespaces

DDP, FULLY_SHARD = "DistributedDataParallel", "fully_shard"

PEERS = {0: DDP, 1: DDP, 2: FULLY_SHARD, 3: FULLY_SHARD}
"""The peer of each stage, which keeps as much; 0 is `bsp` without shards."""

HEADERS = 66
"""Bytes of a frame before its payload: Ethernet 14, IP 20, TCP 20 and its time stamps 12."""

JOB_FILE = Path(__file__).with_name("_zero_job.py")

STATISTICS = Path("/sys/class/net/eth0/statistics")


# ---- the job, and the two sides


def make_job(size: str, batch: int) -> Job:
    return sized(size).adjusted(batch_size=batch)


def setup_of(job: Job, stage: int, workers: int) -> Setup:
    """A run of `workers` processes, with `zero` at that stage; 0 is `bsp` without shards."""
    config = TrainConfig(
        job=job.name,
        sync="bsp",
        topology="collective",
        partition=partition_of(stage),
        on="local",
        workers=workers,
        steps=10**9,
    )
    return resolve(config, Prebuilt(job=job))[0]


def partition_of(stage: int) -> str:
    return f"zero:stage={stage}" if stage else "none"


def name_of(stage: int) -> str:
    return f"dure zero:stage={stage}" if stage else "dure bsp"


class Shards(Loop):
    """A loop over a model whose parameters may be `DTensor`s."""

    @property
    def params(self) -> torch.Tensor:
        whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in self.model.parameters())
        return torch.cat([each.detach().reshape(-1) for each in whole])


def peer(name: str, setup: Setup, rank: int) -> Loop:
    """The loop of a peer on the same job."""
    model = setup.job.build(setup.config.seeded)
    if name == DDP:
        model = DistributedDataParallel(model)
    else:
        for block in blocks_of(setup.job, model):
            fully_shard(block)
        fully_shard(model)
    spec = setup.job.optimizer
    return Shards(setup, rank, model, torch.optim.AdamW(model.parameters(), spec.lr, weight_decay=spec.weight_decay))


def arm(name: str, job: Job, rank: int, workers: int) -> Arm:
    """The arm of that name; the loop of a peer has the data and the initial values of plain `bsp`."""
    for stage in range(4):
        if name == name_of(stage):
            setup = setup_of(job, stage, workers)
            setup.prepare()
            return Dure(setup, rank)
    return peer(name, setup_of(job, 0, workers), rank)


# ---- speed


def measure_speed(rank: int, given: argparse.Namespace) -> Measured:
    """One of the processes: all arms of one size, which take turns."""
    job = make_job(given.size, given.batch)
    pairs = [(name_of(stage), PEERS[stage]) for stage in given.stages]
    arms = {name: arm(name, job, rank, given.workers) for name in dict.fromkeys(sum(pairs, ()))}
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    for ours, theirs in pairs:
        must_agree(arms, ours, theirs, atol=1e-3)
    return Measured(job.source, given.steps * given.workers * given.batch, seconds)


def speed(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of `ratios`: each size over loopback, then between namespaces."""
    rows = []
    for size in given.sizes:
        here = with_size(given, size)
        rows += compared(in_processes(measure_speed, here), here, "loopback")
    slow = [stage for stage in given.stages if stage == 3] or given.stages[-1:]
    reason = namespaces.missing()
    if reason:
        print(f"left out: the pairs between namespaces. {reason}")
        return rows
    for size in given.sizes:
        here = with_size(given, size, stages=slow)
        found = Measured(**in_namespaces("speed", here))
        rows += compared(found, here, f"{given.mbit:g} Mbit/s")
    return rows


def compared(measured: Measured, given: argparse.Namespace, link: str) -> list[dict[str, Any]]:
    """Print the milliseconds of a step of each arm and the ratios; the rows."""
    medians = {name: 1e3 * statistics.median(taken) / given.steps for name, taken in measured.seconds.items()}
    told_each = ", ".join(f"{each:.0f} ms a step with {name}" for name, each in medians.items())
    print(f"{given.size} parameters, {link}, {given.workers} processes, {given.batch} windows each: {told_each}")
    pairs = [(name_of(stage), PEERS[stage]) for stage in given.stages]
    rows = measured.ratios(pairs, f"{given.size} parameters, {link}")
    print_ratios(rows)
    return rows


# ---- memory


@dataclasses.dataclass(frozen=True)
class Shape:
    """The figures of a run that the formulas take, in bytes."""

    parameters: int
    vectors: int
    largest: int
    last: int
    activations: int

    def tensors(self, stage: int, ranks: int) -> float:
        """The bytes of tensors that a rank keeps at once."""
        whole, state = self.parameters, self.vectors * self.parameters / ranks
        weights = whole / ranks + 2 * self.largest if stage == 3 else whole
        gradient = {0: whole, 1: whole * (1 + 1 / ranks), 2: whole / ranks, 3: whole / ranks + self.largest}[stage]
        return weights + gradient + (state if stage else self.vectors * whole) + self.activations

    def sent(self, stage: int, ranks: int) -> float:
        """The bytes that a rank sends in a step."""
        times = 3 - self.last / self.parameters if stage == 3 else 2
        return times * (ranks - 1) / ranks * self.parameters


def shape_of(setup: Setup) -> Shape:
    """The figures of a run."""
    sizes = [sum(each.nbytes for each in block.parameters()) for block in blocks_of(setup.job, setup.replica.module)]
    activations = memory_use(setup, 0).activations
    vectors = vectors_of(setup.job.optimizer)
    return Shape(setup.replica.params.nbytes, vectors, max(sizes), sizes[-1], activations)


def measure_tensors(rank: int, given: argparse.Namespace) -> dict[str, Any]:
    """Live bytes of the arm `given.name`, and the storages that are the largest at the peak."""
    job, live, made = make_job(given.size, given.batch), LiveStorage(), list[Arm]()
    with live:
        built = peak_of(live, lambda: made.append(arm(given.name, job, rank, given.workers)))
        peak = peak_of(live, lambda: made[0].train(given.steps))
        return {"built": built, "peak": peak, "largest": live.largest(given.explain)}


def measure_resident(rank: int, given: argparse.Namespace) -> dict[str, int]:
    """Growth of resident memory under the peer `given.name` over the moment before its model was built."""
    job, resident = make_job(given.size, given.batch), Resident()
    arm(given.name, make_job("tiny", given.batch), rank, given.workers).train(2)
    gc.collect()
    before = resident.now
    resident.begin()
    made = arm(given.name, job, rank, given.workers)
    built = resident.peak
    resident.begin()
    made.train(given.steps)
    return {"built": built - before, "peak": resident.peak - before}


def resident_of_run(given: argparse.Namespace) -> dict[str, int]:
    """Growth of resident memory of the workers of a run of `given.stage` over those of a run of a tiny model.

    `peak` is that of the largest worker; `share` divides each page by the processes that have it.
    """
    large, small = (watched_run(given, size) for size in (given.size, "tiny"))
    return {kind: large[kind] - small[kind] for kind in large}


def watched_run(given: argparse.Namespace, size: str) -> dict[str, int]:
    """Train as `dure train` does, and watch the workers; the largest figures of a worker."""
    config = TrainConfig(
        job=f"{JOB_FILE}:sized:size={size}",
        strategy=f"bsp collective {partition_of(given.stage)}",
        batch_size=given.batch,
        on="local",
        workers=given.workers,
        steps=given.steps,
    )
    found, over = {"peak": 0, "share": 0}, Event()
    with ForkServer() as server, redirect_stdout(None):

        def watch() -> None:
            while not over.wait(LOOK_SECONDS):
                for pid in [pid for name, pid in list(server.pids.items()) if name.startswith("worker")]:
                    with suppress(OSError, IndexError):  # it has ended
                        seen = Resident(pid)
                        found["peak"] = max(found["peak"], seen.peak)
                        found["share"] = max(found["share"], seen.share)

        watcher = Thread(target=watch)
        watcher.start()
        try:
            run(config, Prebuilt(fork_server=server))
        finally:
            over.set()
            watcher.join()
    return found


LOOK_SECONDS = 0.02
"""Seconds between two looks at the memory of workers. The peak is kept by the system; the share is not."""


def memory(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each size, number of processes and arm."""
    rows = []
    for size in given.sizes:
        for workers in given.ranks:
            here = with_size(given, size, workers=workers)
            shape = shape_of(setup_of(make_job(size, here.batch), 0, workers))
            figures = f"P {mb(shape.parameters)}, b {mb(shape.largest)}, a {mb(shape.activations)}"
            print(f"{size}: {figures}; {workers} processes, windows of a mini-batch: {here.batch}")
            print(LINE.format("", "formula", "declared", "tensors", "", "resident", "", "share", "built"))
            for name, stage in [*((name_of(each), each) for each in given.stages), (FULLY_SHARD, None)]:
                rows.append(line_of_memory(name, stage, shape, here))
    return rows


LINE = "{:>20}{:>11}{:>11}{:>11}{:>8}{:>11}{:>8}{:>11}{:>11}"


def line_of_memory(name: str, stage: int | None, shape: Shape, given: argparse.Namespace) -> dict[str, Any]:
    """Measure an arm twice, and print its line; the same as plain values."""
    here = argparse.Namespace(**{**vars(given), "name": name})
    here.stage, tensors = stage, in_processes(measure_tensors, here)
    resident = in_processes(measure_resident, here) if stage is None else resident_of_run(here)
    formula = declared = None
    if stage is not None:
        formula = shape.tensors(stage, given.workers)
        declared = memory_use(setup_of(make_job(given.size, given.batch), stage, given.workers), 0).total
    over = ["" if declared is None else f"{each['peak'] / declared - 1:+.1%}" for each in (tensors, resident)]
    last = [mb(resident["share"]) if "share" in resident else "", mb(tensors["built"])]
    expected = ["" if each is None else mb(each) for each in (formula, declared)]
    cells = [mb(tensors["peak"]), over[0], mb(resident["peak"]), over[1], *last]
    print(LINE.format(name, *expected, *cells), flush=True)
    for nbytes, origin in tensors.pop("largest"):
        print(f"{mb(nbytes):>34}  {origin}")
    return {"what": name, "size": given.size, "processes": given.workers, "formula": formula, "declared": declared} | {
        "tensors": tensors,
        "resident": resident,
    }


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


# ---- bytes


def measure_bytes(rank: int, given: argparse.Namespace) -> dict[str, list[float]]:
    """Bytes of payload that leave each rank in a step of each arm."""
    job, found = make_job(given.size, given.batch), dict[str, list[float]]()
    for name in given.names:
        made = arm(name, job, rank, given.workers)
        made.train(1)  # connections are made, and buckets of DDP are formed anew
        made.train(1)
        dist.barrier()
        before = counted()
        made.train(given.steps)
        dist.barrier()
        frames, nbytes = (now - then for now, then in zip(counted(), before, strict=True))
        mine = torch.tensor((nbytes - HEADERS * frames) / given.steps, dtype=torch.float64)
        each = [torch.zeros_like(mine) for _ in range(given.workers)]
        dist.all_gather(each, mine)
        found[name] = [float(number) for number in each]
        del made
    return found


def counted() -> tuple[int, int]:
    """Frames and bytes that have left the interface of this namespace."""
    packets, nbytes = (int((STATISTICS / f"tx_{name}").read_text(encoding="ascii")) for name in ("packets", "bytes"))
    return packets, nbytes


def count_bytes(given: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each size, number of processes and arm."""
    reason = namespaces.missing()
    if reason:
        print(f"skipped: {reason}")
        raise SystemExit(0)
    rows = []
    for size in given.sizes:
        for workers in given.ranks:
            names = [*(name_of(stage) for stage in given.stages), DDP, FULLY_SHARD]
            here = with_size(given, size, workers=workers, names=names)
            found, shape = in_namespaces("bytes", here), shape_of(setup_of(make_job(size, here.batch), 0, workers))
            print(f"{size}: P {mb(shape.parameters)}, {workers} processes; sent by a rank in a step")
            for name, stage in zip(names, [*given.stages, None, None], strict=True):
                formula = None if stage is None else shape.sent(stage, workers)
                rows.append({"what": name, "size": size, "processes": workers, "formula": formula, "sent": found[name]})
                print_bytes(name, formula, found[name], shape)
    return rows


def print_bytes(name: str, formula: float | None, sent: Sequence[float], shape: Shape) -> None:
    """The bytes of the ranks' mean, in P, beside the formula."""
    mean = statistics.mean(sent)
    beside = "" if formula is None else f", formula {mb(formula)} ({mean / formula - 1:+.2%})"
    ranks = ", ".join(map(mb, sent))
    print(f"{name:>24} {mb(mean)} = {mean / shape.parameters:.3f} P{beside}; each: {ranks}")


# ---- processes in namespaces

TASKS: dict[str, Measure] = {"speed": measure_speed, "bytes": measure_bytes}
"""The measurements that run between namespaces, by name."""


def in_namespaces(task: str, given: argparse.Namespace) -> Any:
    """`in_processes` for one of TASKS, each process in a namespace of its own; values that JSON has."""
    plain = {name: value for name, value in vars(given).items() if name not in ("json", "data")}
    command = [sys.executable, __file__, "--inside", task, json.dumps(plain)]
    environ = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    with namespaces.hosts(given.workers, bandwidth=given.mbit * 1e6 / 8) as hosts:
        first, *_ = hosts.run(command, seconds=given.limit, environ=environ)
    return json.loads(first.out.splitlines()[-1])


def be_inside(task: str, given: argparse.Namespace) -> None:
    """Be one of the processes of `in_namespaces`: the first prints what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found = TASKS[task](dist.get_rank(), given)
    if dist.get_rank() == 0:
        print(json.dumps(dataclasses.asdict(found) if isinstance(found, Measured) else found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def with_size(given: argparse.Namespace, size: str, **changed: Any) -> argparse.Namespace:
    """The options of a measurement of one size of model."""
    own = {"size": size, "batch": given.batch or BATCHES[given.kind].get(size, 1)}
    return argparse.Namespace(**{**vars(given), **own, **changed})


# ---- the command line

STAGES = {"speed": [1, 3], "memory": [1, 2, 3], "bytes": [1, 2, 3]}
RANKS = {"memory": [2, 4], "bytes": [2]}
BATCHES = {"speed": {"tiny": 2, "5M": 8, "50M": 4}, "memory": {}, "bytes": {}}
"""Defaults of each measurement: stages, numbers of processes, windows of a mini-batch (else 1)."""

MEASUREMENTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "speed": speed,
    "memory": memory,
    "bytes": count_bytes,
}


def options_of_zero() -> argparse.ArgumentParser:
    parser = options(__doc__, job="char-gpt", steps=2, repeats=15)
    kind = parser.add_mutually_exclusive_group()
    for name in MEASUREMENTS:
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name)
    parser.set_defaults(kind="speed")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="all but tiny; with --memory and --bytes 50M")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), help="0: bsp without shards")
    parser.add_argument("--ranks", nargs="+", type=int, help="processes, with --memory and --bytes")
    parser.add_argument("--batch", type=int, help="windows in a mini-batch of a process")
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s of the cards of namespaces")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the processes in namespaces")
    parser.add_argument("--explain", type=int, default=0, help="with --memory: so many largest storages at the peak")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        be_inside(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
        return
    given = parse(options_of_zero(), steps=1, repeats=2, sizes=["tiny"], ranks=[2])
    given.sizes = given.sizes or (["5M", "50M"] if given.kind == "speed" else ["50M"])
    given.stages = given.stages or STAGES[given.kind]
    given.ranks = given.ranks or RANKS.get(given.kind)
    with told("zero", given) as facts:
        rows = MEASUREMENTS[given.kind](given)
        facts |= {"kind": given.kind, "steps": given.steps, "ratios" if given.kind == "speed" else "rows": rows}


if __name__ == "__main__":
    main()
