"""Hogwild! on `mnist-mlp`: dure's against PyTorch's own example of it.

    python bench/hogwild.py [--job mnist-mlp] [--steps 200] [--repeats 40] [--json FILE]

The example (`mnist_hogwild` of pytorch/examples) has a model in shared memory (`share_memory()`), and in each process
an SGD of its own that writes to it, without locks. Here is its training loop, on the same job: same initial values,
same samples in the same order at each process, same batch size and rate. Data lie in memory on both sides, without the
example's loader; starting up is not measured. Two processes, one thread each, hold both arms and train with each
in turn. They race, so that no two runs have the same parameters: both models must be as good as each other in the end.
"""

from __future__ import annotations

import argparse
import io
import math
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _script import parse, told
from _side_by_side import (
    Arm,
    Dure,
    Loop,
    Measured,
    in_processes,
    load,
    options,
    print_table,
    summary,
    take_turns,
    warm_up,
)

from dure.job.evaluation import Evaluator
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure.runtime.memory import MappedMemory
from dure.topology.shared_memory.segment import Segment, SharedShard

OURS, THEIRS = "dure hogwild", "PyTorch's example"
PAIRS = [(OURS, THEIRS)]


def from_first(rank: int, made: Any) -> Any:
    """What the first process has made."""
    box = [made if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


class Shared(Dure):
    """A worker on the memory that the first one owns."""

    def __init__(self, setup: Setup, rank: int) -> None:
        super().__init__(setup, rank)
        self.owner = self.mapped(rank)
        setup.topology.attach(self.worker, [self.owner])
        assert self.node.gradient_engine is not None
        self.node.gradient_engine.read_in_place(self.owner.segment.values)

    def mapped(self, rank: int) -> SharedShard:
        """The owner of the memory; at other ranks one of the same memory, which writes the same initial values."""
        if rank == 0:
            made = self.setup.topology.shard(self.node, 0)
            assert isinstance(made, SharedShard)
            from_first(rank, (made.path, made.segment.layout))
            return made
        path, layout = from_first(rank, None)
        memory = MappedMemory.of(path)
        return SharedShard(self.node, Segment(layout, memory.bytes, memory), self.setup.model.params, path=path)


def example(setup: Setup, rank: int) -> Loop:
    """The example's model and optimizer; the model travels to the others as `torch.multiprocessing` sends it."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    model = setup.job.build(setup.config.seeded)
    model.share_memory()
    parameters = list(model.parameters())
    sent = io.BytesIO()
    if rank == 0:
        ForkingPickler(sent).dump([parameter.data for parameter in parameters])
    for parameter, values in zip(parameters, ForkingPickler.loads(from_first(rank, sent.getvalue())), strict=True):
        parameter.data = values
        assert values.is_shared()
    return Loop(setup, rank, model, torch.optim.SGD(model.parameters(), lr=setup.job.optimizer.lr))


def measure(rank: int, given: argparse.Namespace) -> Measured:
    config = TrainConfig(job=given.job, sync="hogwild", on="local", workers=given.workers, steps=10**9)
    setup, _ = resolve(config, Prebuilt(job=load(given.job, given.data)))
    arms: dict[str, Arm] = {OURS: Shared(setup, rank), THEIRS: example(setup, rank)}
    warm_up(arms, given.steps)
    seconds = take_turns(arms, given.steps, given.repeats)
    dist.barrier()
    grades = {name: Evaluator(setup.job).grade(arm.params.clone(), None) for name, arm in arms.items()}
    losses = [math.inf if grade.loss is None else grade.loss for grade in grades.values()]
    if not given.smoke and not max(losses) < 1.25 * min(losses) + 0.02:
        raise SystemExit(f"one model is better than the other ({grades}): this is no fair comparison.")
    return Measured(setup.job.source, given.steps * sum(setup.batch_sizes), seconds)


def main() -> None:
    given = parse(options(__doc__, steps=200, repeats=40), steps=10, repeats=2)
    with told("hogwild", given) as facts:
        measured = in_processes(measure, given)
        print_table(measured, PAIRS, given)
        facts |= summary(measured, PAIRS, given)


if __name__ == "__main__":
    main()
