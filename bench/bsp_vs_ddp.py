"""Synchronous SGD on `mnist-cnn`: dure's BSP over collectives against a plain DistributedDataParallel script.

    python bench/bsp_vs_ddp.py [--workers 2] [--steps 10] [--repeats 60] [--job mnist-cnn] [--json FILE]

The same processes, one thread each, hold both; each repeat trains so many steps with one, then with the other, from a
barrier to the last one's end. Same initial values, same samples in the same order, same batch size, same rate:
at the end both must have the same parameters. Data lie in memory; starting up and loading are not measured.

Medians of the alternating repeats, and the median of their ratios. Without MNIST under `DURE_DATA` (or --data) the
data are random numbers of its shape, which takes as long.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dure.config import TrainConfig
from dure.data.dataset import Data
from dure.data.location import data_root, find
from dure.job import Job, load_job
from dure.member import WorkerLife
from dure.models.mlp import top1
from dure.models.mnist import convnet
from dure.optim import OptimizerSpec
from dure.runtime.base import EndOfWork
from dure.runtime.gradients import Evaluator
from dure.runtime.process import ProcessNode
from dure.runtime.process_group import ProcessGroup
from dure.runtime.wire import Identity
from dure.task import Task
from dure.train import AtHand, resolve

WARM_UP = 2
"""Repeats that are not counted: DDP rebuilds its buckets after the first step, allocators settle."""


class Unheard(WorkerLife):
    """There is no hub here."""

    def _tell(self, method: str, **fields: Any) -> None:
        pass


class Dure:
    """A worker as a run's member has it: its node, its method, and `WorkerLife` told of each step."""

    def __init__(self, task: Task, rank: int) -> None:
        node = ProcessNode(Identity("bench", f"worker {rank}", rank), evaluator=Evaluator(task.job))
        node.collectives = lambda ranks: ProcessGroup(node, ranks, None)
        self.task, self.node = task, node
        life = Unheard(task, node)
        life.worker = self.worker = task.worker(node, rank, node.meter)
        self.worker.on_step = life._on_step

    def train(self, steps: int) -> None:
        self.worker.boundary.steps = self.worker.clock + steps
        self.node.loop.run_until(self.node.spawn(self._work(), "training"))

    async def _work(self) -> None:
        with contextlib.suppress(EndOfWork):
            await self.task.sync.work(self.worker)

    @property
    def params(self) -> torch.Tensor:
        return self.worker.params


class Ddp:
    """The loop of the tutorials."""

    def __init__(self, task: Task, rank: int) -> None:
        job = task.job
        self.model = DistributedDataParallel(job.build(task.config.seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.optimizer.lr)
        self.sampler = job.samplers(task.batch_sizes, seed=task.config.seed)[rank]
        self.data, self.loss = job.train, job.loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self.data.batch(self.sampler.next())
            self.optimizer.zero_grad()
            loss = self.loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    @property
    def params(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def measure(rank: int, port: int, given: argparse.Namespace, answer: Any) -> None:
    """One of the processes; the first puts seconds per repeat into `answer`."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, given.workers, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.workers, timeout=limit)
    config = TrainConfig(job=given.job, sync="bsp", on="local", workers=given.workers, steps=10**9)
    task, _ = resolve(config, AtHand(job=load(given.job, given.data)))
    arms: dict[str, Dure | Ddp] = {"ddp": Ddp(task, rank), "dure": Dure(task, rank)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(WARM_UP + given.repeats):
        order = list(arms) if repeat % 2 else list(reversed(arms))
        for name in order:
            seconds[name].append(timed(lambda train=arms[name].train: train(given.steps)))  # type: ignore[misc]
    if not torch.allclose(arms["dure"].params, arms["ddp"].params, atol=1e-4):
        raise SystemExit("the two trained different models: this is no fair comparison.")
    if rank == 0:
        samples = given.steps * sum(task.batch_sizes)
        answer.send((task.job.source, samples, {name: each[WARM_UP:] for name, each in seconds.items()}))
    dist.barrier()  # nobody tears the engine down under the other
    dist.destroy_process_group()


def timed(train: Callable[[], None]) -> float:
    """Seconds from a barrier to the end of the slowest process."""
    dist.barrier()
    began = time.perf_counter()
    train()
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def load(name: str, root: Path | None) -> Job:
    """The job, with random data of MNIST's shape where it is MNIST's and that is not here."""
    folder = data_root(root)
    folders = (folder / "mnist", folder / "MNIST" / "raw", folder)
    here = find(folders, ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"))
    if name != "mnist-cnn" or here is not None:
        return load_job(name, root)
    draw = torch.Generator().manual_seed(0)
    data = Data(torch.randn(6000, 1, 28, 28, generator=draw), torch.randint(0, 10, (6000,), generator=draw))
    return Job(
        convnet,
        torch.nn.functional.cross_entropy,
        data,
        batch_size=64,
        optimizer=OptimizerSpec(lr=0.03),
        accuracy=top1,
        name=name,
        source="random numbers of MNIST's shape",
    )


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def trained(given: argparse.Namespace) -> tuple[str, int, dict[str, list[float]]]:
    """What the data are, samples per repeat, and the seconds of all repeats."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    port = free_port()
    processes = [spawn.Process(target=measure, args=(rank, port, given, theirs)) for rank in range(given.workers)]
    for process in processes:
        process.start()
    theirs.close()
    source, samples, seconds = ours.recv()
    for process in processes:
        process.join()
    return source, samples, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--job", default="mnist-cnn")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load_before = os.getloadavg()[0]
    source, samples, seconds = trained(given)
    rates = {name: samples / statistics.median(each) for name, each in seconds.items()}
    ratios = sorted(ddp / dure for ddp, dure in zip(seconds["ddp"], seconds["dure"], strict=True))
    ratio = statistics.median(ratios)
    print(f"{source}; {given.workers} processes, {given.steps} steps a repeat")
    for name, rate in rates.items():
        print(f"{name:>6} {rate:10,.0f} samples/s")
    print(f"{ratio:.3f}x DDP (quartiles {ratios[len(ratios) // 4]:.3f} and {ratios[-1 - len(ratios) // 4]:.3f})")
    summary = {
        "benchmark": "bsp_vs_ddp",
        "job": given.job,
        "workers": given.workers,
        "repeats": given.repeats,
        "samples_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(ratio, 3),
        "load_before": load_before,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(summary)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
