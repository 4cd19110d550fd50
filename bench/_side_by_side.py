"""Shared by the scripts that hold dure beside another library: processes, turns, and the table of the result.

The same processes, one thread each, hold every arm: a worker of dure, and the other library's training loop on the
same job. Each repeat trains so many steps with each of them in turn, in a rotating order, from a barrier to the last
process's end; what is told are medians, and the median of the repeats' ratios. Starting up is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _script import print_ratios, ratio_of

from dure.core.node import Suspend
from dure.job.data.dataset import Data
from dure.job.data.loaders import data_root
from dure.job.gradient_engine import GradientEngine
from dure.job.job import Job, load_job
from dure.job.models.mlp import mlp_maker, top1
from dure.job.optimizer import OptimizerSpec
from dure.run.process import WorkerProcess
from dure.run.setup import Setup
from dure.run.workers import build_worker, free_initial_values
from dure.runtime.process.group import ProcessGroup
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity
from dure.sync.worker import Worker
from dure_jobs.data.location import find
from dure_jobs.mnist import convnet

WARM_UP = 2

CREDENTIALS = Credentials(bytes(32))  # the processes of a benchmark know them

LIMIT = datetime.timedelta(seconds=120)


class Arm(Protocol):
    """One way of training the job in this process."""

    def train(self, steps: int) -> None: ...

    @property
    def params(self) -> torch.Tensor: ...


# ---- dure's arm


class Unheard(WorkerProcess):
    """There is no driver here."""

    def tell(self, method: str, **fields: Any) -> None:
        pass


class Dure:
    """A worker as a run's member has it: its node, its method, and `WorkerProcess` told of each step.

    Between repeats it stands still as it does for a checkpoint: at a step boundary, from which its method goes on.
    """

    def __init__(self, setup: Setup, rank: int) -> None:
        whole = setup.stages is None
        if setup.stages is not None:  # as a process of a run, it frees all parts but its own
            setup.stages.keep(rank % setup.parts)
        node = ProcessNode(
            Identity("bench", f"worker {rank}", rank),
            CREDENTIALS,
            gradient_engine=GradientEngine(setup.job, exact=True) if whole else None,
        )
        node.collectives = lambda ranks: ProcessGroup(node, ranks, None)
        self.setup, self.node, self.until = setup, node, 0
        life = Unheard(setup, node)
        life.worker = self.worker = build_worker(setup, node, rank, node.meter)
        self.worker.on_step = life.on_step
        if setup.zero is not None:
            free_initial_values(setup, self.worker, node.gradient_engine)
        if setup.topology.needs_everybody and node.gradient_engine is not None:
            node.gradient_engine.read_in_place(self.worker.params)
        self.worker.boundary.suspend = lambda worker: worker.clock >= self.until

    def train(self, steps: int) -> None:
        self.until = self.worker.clock + steps
        self.node.loop.run_until(self.node.spawn(self._work(), "training"))

    async def _work(self) -> None:
        with contextlib.suppress(Suspend):
            await self.setup.sync.work(Worker(self.worker))

    @property
    def params(self) -> torch.Tensor:
        """The whole model; all processes ask for it at once."""
        setup, own = self.setup, self.worker.params
        if not setup.keeps_shards:
            return own
        models = [own] * setup.workers
        dist.all_gather_object(models, own)
        return setup.of_worker(0).joined(models)


# ---- the others'


class Loop:
    """The loop of the tutorials; `after_step` is what a library has it call after each step of the optimizer."""

    def __init__(self, setup: Setup, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.sampler = setup.job.samplers(setup.batch_sizes, seed=setup.config.seeded)[rank]
        self.data, self.loss = setup.job.train, setup.job.loss
        self.after_step: Callable[[], Any] | None = None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self.data.batch(self.sampler.next())
            self.optimizer.zero_grad()
            loss = self.loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.after_step is not None:
                self.after_step()

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


# ---- taking turns


def take_turns(arms: Mapping[str, Arm], steps: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each arm, the same in all processes."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(timed(lambda train=arms[name].train: train(steps)))  # type: ignore[misc]
    return seconds


def warm_up(arms: Mapping[str, Arm], steps: int) -> None:
    """Repeats that are not counted: buckets are rebuilt after a first step, allocators settle."""
    take_turns(arms, steps, WARM_UP)


def timed(train: Callable[[], None]) -> float:
    """Seconds from a barrier to the end of the slowest process."""
    dist.barrier()
    began = time.perf_counter()
    train()
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def must_agree(arms: Mapping[str, Arm], one: str, other: str, atol: float = 1e-4) -> None:
    """Both have trained as long: where the algorithms are the same, so are the parameters."""
    apart = float((arms[one].params - arms[other].params).abs().max())
    if not apart <= atol:
        raise SystemExit(
            f"{one} and {other} trained different models (apart by {apart:g}): this is no fair comparison."
        )


@dataclass(frozen=True)
class Measured:
    """What the data were, samples per repeat, and the seconds of all repeats of each arm."""

    source: str
    samples: int
    seconds: dict[str, list[float]]

    def rate(self, arm: str) -> float:
        """Samples a second."""
        return self.samples / statistics.median(self.seconds[arm])

    def ratios(self, pairs: Sequence[tuple[str, str]], job: str) -> list[dict[str, Any]]:
        """By how much the first arm of each pair is faster on the job: rows of `ratios`."""
        return [
            ratio_of(", ".join(filter(None, (ours, job))), theirs, self.seconds[ours], self.seconds[theirs])
            for ours, theirs in pairs
        ]


# ---- processes

Measure = Callable[[int, argparse.Namespace], Any]


def in_processes(measure: Measure, given: argparse.Namespace) -> Any:
    """Call `measure(rank, given)` in so many processes, which form a Gloo group; what it returns in the first."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    port = free_port()
    processes = [
        context.Process(target=_be, args=(measure, rank, port, given, theirs)) for rank in range(given.workers)
    ]
    for process in processes:
        process.start()
    theirs.close()
    sentinels = [process.sentinel for process in processes]
    answer = None
    try:
        while answer is None:
            if ours in wait([ours, *sentinels]):
                answer = ours.recv()
            elif any(process.exitcode for process in processes):
                raise SystemExit("a process failed; its message is above.")
    except EOFError:
        raise SystemExit("all processes ended without an answer.") from None
    finally:
        if answer is None:
            for process in processes:
                process.terminate()
        for process in processes:
            process.join()
    return answer


def _be(measure: Measure, rank: int, port: int, given: argparse.Namespace, answer: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, given.workers, rank == 0, timeout=LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.workers, timeout=LIMIT)
    measured = measure(rank, given)
    if rank == 0:
        answer.send(measured)
    dist.barrier()  # nobody tears the engine down under the other
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# ---- the job


def load(name: str, root: Path | None) -> Job:
    """The job, with random data of MNIST's shape where it is MNIST's and that is not here."""
    folder = data_root(root)
    folders = (folder / "mnist", folder / "MNIST" / "raw", folder)
    here = find(folders, ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"))
    if not name.startswith("mnist-") or here is not None:
        return load_job(name, root)
    shape, model, size = {"mnist-cnn": ((1, 28, 28), convnet, 64), "mnist-mlp": ((784,), mlp_maker(784, 32, 10), 32)}[
        name
    ]
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(6000, *shape, generator=draw), torch.randint(0, 10, (6000,), generator=draw))
    return Job(
        model,
        torch.nn.functional.cross_entropy,
        data,
        batch_size=size,
        optimizer=OptimizerSpec(lr=0.03),
        accuracy=top1,
        name=name,
        source="random numbers of MNIST's shape",
    )


# ---- the command line


def options(
    description: str | None, *, job: str = "mnist-mlp", workers: int = 2, steps: int, repeats: int
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--steps", type=int, default=steps, help="mini-batches of a worker in a repeat")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--job", default=job)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    return parser


def print_table(measured: Measured, pairs: Sequence[tuple[str, str]], given: argparse.Namespace) -> None:
    """Each arm's rate, then each pair's ratio."""
    print(f"{measured.source}; {given.workers} processes, {given.steps} steps a repeat, {given.repeats} repeats")
    width = max(map(len, measured.seconds))
    for name in measured.seconds:
        print(f"{name:>{width}} {measured.rate(name):10,.0f} samples/s")
    print_ratios(measured.ratios(pairs, given.job))


def summary(measured: Measured, pairs: Sequence[tuple[str, str]], given: argparse.Namespace) -> dict[str, Any]:
    """The same as plain values, and the other options of the script."""
    return {
        **{name: value for name, value in vars(given).items() if name not in ("json", "data", "smoke")},
        "samples_per_second": {name: round(measured.rate(name), 1) for name in measured.seconds},
        "ratios": measured.ratios(pairs, given.job),
    }
