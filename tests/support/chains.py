"""A chain of four dense layers in float64 that any pipeline splits, and probes of its stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from support.runs import Cycle, Finished, resolved
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.partition.stage import Stage
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant

CUTS = {1: "", 2: "cuts=4", 3: "cuts=2/4", 4: "cuts=2/4/6", 6: "cuts=1/2/3/4/5"}
"""The text that splits the chain into so many stages."""

BATCH = 3
LR = 0.3
WIDTH = 5


class InOrder:
    """The samples in order, over and over; the same at every worker."""

    def samplers(self, targets: Tensor, batch_sizes: Any, *, seed: int) -> list[Any]:
        return [Cycle(torch.arange(len(targets)), size) for size in batch_sizes]


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).double()


def with_dropout() -> nn.Module:
    layers = list(model())
    layers[1] = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))
    return nn.Sequential(*layers)


def linear() -> nn.Module:
    """A chain without nonlinearities, whose layers keep lengths."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(7)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers).double()


def data() -> Data:
    draws = torch.Generator().manual_seed(5)
    return Data(
        torch.randn(21, WIDTH, generator=draws, dtype=torch.float64),
        torch.randn(21, WIDTH, generator=draws, dtype=torch.float64),
    )


def chain(module: Callable[[], nn.Module] = model) -> Job:
    return Job(
        name="chain",
        model=module,
        loss=mse_loss,
        train=data(),
        batch_size=BATCH,
        optimizer=OptimizerSpec(lr=LR),
        split=InOrder(),
    )


def dense() -> Job:
    """The chain, for the processes of a real run."""
    return chain()


def samples(batch: int) -> tuple[Tensor, Tensor]:
    """The inputs and the targets of a mini-batch."""
    taken = (torch.arange(BATCH) + batch * BATCH) % 21
    inputs, targets = data().batch(taken)
    return inputs, targets


def drained(steps: int, every: int) -> list[range]:
    """The mini-batches between two drains of a run with a checkpoint after `every`; without (0) all of them."""
    starts = range(0, steps, every or steps)
    return [range(start, min(start + (every or steps), steps)) for start in starts]


def stage_modules(stages: int, seed: int = 0, module: Callable[[], nn.Module] = model) -> list[nn.Module]:
    """The stages of the chain at their initial values."""
    whole = list(chain(module).build(seed))
    cuts = [int(each) for each in CUTS[stages].removeprefix("cuts=").split("/") if each]
    return [nn.Sequential(*copy.deepcopy(whole[start:stop])) for start, stop in pairwise((0, *cuts, len(whole)))]


def flat(modules: list[nn.Module]) -> Tensor:
    """All parameters of the stages."""
    return torch.cat([each.detach().reshape(-1) for module in modules for each in module.parameters()])


@dataclass
class Played:
    """A pipeline's run in virtual time: its result, its stages by rank, and their gradients in the order of updates."""

    finished: Finished
    stages: list[Stage]
    gradients: list[list[Tensor]]

    @property
    def params(self) -> Tensor:
        return self.finished.params


@contextmanager
def _recorded() -> Iterator[dict[int, tuple[Stage, list[Tensor]]]]:
    found: dict[int, tuple[Stage, list[Tensor]]] = {}
    update = Stage.update

    def recording(stage: Stage, batch: int) -> Any:
        gradient = update(stage, batch)
        earlier = found[stage.rank][1] if stage.rank in found else []
        found[stage.rank] = stage, [*earlier, gradient.values.clone()]  # another stage after a checkpoint
        return gradient

    Stage.update = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Stage.update = update  # type: ignore[method-assign]


def play(
    strategy: str,
    stages: int,
    *,
    depth: int | None = None,
    sync: str = "bsp",
    replicas: int = 1,
    cluster: Cluster | None = None,
    job: Job | None = None,
    during: Any = None,
    **options: Any,
) -> Played:
    """Run a partition over the chain; `strategy` names it, with its parameters but without stages and cuts.

    The gradients of all `replicas` of a stage are in one list.

    The training, not its preparation, is inside of `during`.
    """
    setup, cluster = resolved(
        job or chain(), f"{sync} {split(strategy, stages, depth)}", cluster, workers=replicas * stages, on="virtual",
        dtype="float64", **{"eval_every": 1000, "steps": 9, "out": "unwritten"} | options,
    )  # fmt: skip
    assert cluster is not None
    virtual = VirtualRun(setup, cluster, Callbacks())
    _ = setup.job.flops_per_sample  # one pass through the model, kept
    with _recorded() as found, during or nullcontext():
        finished = Finished(setup, virtual.run(), [])
    return Played(finished, [found[rank][0] for rank in range(stages)], [found[rank][1] for rank in range(stages)])


def split(strategy: str, stages: int, depth: int | None = None) -> str:
    """The text of a partition of the chain; `depth` counts the stages of all chunks."""
    name, _, rest = strategy.partition(":")
    return f"{name}:" + ",".join(filter(None, (f"stages={stages}", CUTS[depth or stages], rest)))


def free_network(workers: int, **rest: Any) -> Cluster:
    """A cluster whose messages and calls take no time, and whose forward takes as long as its backward."""
    rest = {"compute": Constant(call=0.0)} | rest
    return Cluster.uniform(
        workers, link=Link(bandwidth=1e18, latency=0.0), alpha=0.0, beta=0.0, backward=0.5, **rest
    )  # fmt: skip
