"""The gradients of a worker that learns from replays.

for t = 0, 1, 2, ...                                at a worker
    every `target_every` updates: theta^- <- theta
    publish theta, version v                             v: t; over servers, the updates of all workers
    keys, weights, transitions    <- sample              `prefetch` batches ahead
    y                             <- targets by theta^-  in evaluation mode
    g, errors                     <- gradient of the loss at theta, in training mode
    update(keys, errors)                                 not waited for
    the method uses g

theta stands for the parameters and for the buffers that training changes, such as the running statistics of batch norm.
Schaul et al. (2016) take the errors of the loss as priorities. The errors of a network whose outputs depend on its mode
are those in evaluation mode, as in an actor: dropout would be noise of priorities.

Gorila's rule for outliers: the gradient of a loss far above the mean loss is dropped.

Nair et al., "Massively Parallel Methods for Deep Reinforcement Learning", 2015, section 5.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Address, EndOfWork, Node, Operation, TimedWork
from dure.errors import WorkOver
from dure.job.gradient import Gradient
from dure.job.gradient_engine import Isolated, seed_of
from dure.job.replica import Replica
from dure.rl.messages import FOREVER, SampleTensors

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.job.gradient import Requester
    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.services import ModelService
    from dure.rl.settings import RlSettings
    from dure.rl.transitions import Layout


PASSES = 5 / 3
"""Operations of a gradient, in those of forward and backward: the targets need two more forward passes."""


TARGET, TARGET_BUFFERS = "target", "target buffers"
"""The names under which a worker keeps the parameters and the buffers of the target network."""


class _Batch(NamedTuple):
    """A sample, which a replay may still be sending."""

    replay: Address
    arrives: Operation[Any]
    tensors: dict[str, torch.Tensor]


class ReplaySource:
    """Gradients of mini-batches from `replays`, which are asked in turn.

    `network` and `target` are replicas of the model. `flops` are the operations of forward and backward for a batch.
    Random layers draw from (`seed`, rank, step).
    """

    can_stop = False
    whole = False  # its time includes the wait for samples, so the source records its times itself

    def __init__(
        self,
        node: Node,
        algorithm: RlAlgorithm,
        network: Replica,
        target: Replica,
        settings: RlSettings,
        *,
        layout: Layout,
        replays: Sequence[Address],
        model: ModelService,
        batch_size: int,
        flops: float,
        meter: Meter,
        seed: int,
        outliers: OutlierFilter | None = None,
    ) -> None:
        self.node, self.algorithm, self.settings = node, algorithm, settings
        self.network, self.target = network, target
        target.module.eval()
        self._in_training = [each for each in network.module.modules() if each.training]
        self._mode_matters = network.is_stochastic or bool(network.buffers_flat().numel())
        self.seed = seed
        self.samples = SampleTensors(layout)
        self.replays, self.published = replays, model
        self.batch_size = batch_size
        self.flops = flops * PASSES
        self.meter = meter
        self.outliers = outliers
        self.asked = 0
        self.over: set[str] = set()
        self._batches: deque[_Batch] = deque()
        self._target: torch.Tensor | None = None

    # ---- for the worker

    def gradient(self, requester: Requester) -> Operation[Gradient]:
        return self.node.spawn(self._gradient(requester), "a gradient")

    def mean_gradient(self, requester: Requester) -> Operation[Gradient]:
        return self.node.spawn(self._mean_gradient(requester), "a mean gradient")

    def model(self, requester: Requester) -> torch.Tensor:
        return requester.params

    async def settled(self) -> None:
        """Wait for the samples that are on their way, and drop them: the next ones are drawn anew."""
        for batch in self._batches:
            with suppress(WorkOver):
                await batch.arrives
        self._batches.clear()

    def state(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"asked": self.asked, "over": sorted(self.over)}
        return plain if self.outliers is None else plain | {"outliers": self.outliers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.asked, self.over = int(state["asked"]), set(state["over"])
        if self.outliers is not None:
            self.outliers.restore(state["outliers"])

    # ---- gradients

    async def _gradient(self, requester: Requester) -> Gradient:
        self._copy_target(requester)
        version = _updates(requester)
        self.published.publish(_model(requester), requester.clock, version)
        while True:
            gradient = await self._gradient_of(await self._next(version), requester)
            if self.outliers is None or self.outliers.admits(gradient.loss):
                return gradient

    def _copy_target(self, requester: Requester) -> None:
        """Copy the model to the target after every so many updates."""
        copies = _updates(requester) // self.settings.target_every
        if TARGET not in requester.kept or copies > requester.kept_plain[TARGET]:
            requester.kept |= {
                name: each.clone() for name, each in zip((TARGET, TARGET_BUFFERS), _model(requester), strict=False)
            }
            requester.kept_plain[TARGET] = copies
        if self._target is not requester.kept[TARGET]:  # copied now, or restored from a checkpoint
            self._target = requester.kept[TARGET]
            self.target.load(self._target)
            if TARGET_BUFFERS in requester.kept:
                self.target.load_buffers(requester.kept[TARGET_BUFFERS])

    async def _mean_gradient(self, requester: Requester) -> Gradient:
        """The mean of all workers' gradients. All end their work in the step in which the first has no batch left."""
        gradient = None
        with suppress(EndOfWork):
            gradient = await self._gradient(requester)
        if self.settings.frames and not await requester.group.all_go_on(gradient is None):
            raise EndOfWork
        assert gradient is not None
        return gradient.with_values(await requester.group.mean(gradient.values))

    async def _gradient_of(self, batch: _Batch, requester: Requester) -> Gradient:
        seed = seed_of(self.seed, requester.rank, requester.clock)
        compute = partial(self._compute, batch.tensors, _model(requester), seed)
        work = TimedWork(compute, self.settings.update_seconds, self.flops)
        started = self.node.now()
        gradient, errors = await self.node.compute(work)
        self.meter.add("compute", started, self.node.now())
        if self.settings.alpha:
            self.node.call(batch.replay, "update", batch.tensors["keys"], errors)
        return gradient  # type: ignore[no-any-return]

    def _compute(
        self, tensors: Mapping[str, torch.Tensor], model: Sequence[torch.Tensor], seed: int
    ) -> tuple[Gradient, torch.Tensor]:
        """The gradient at `model`, and the absolute TD errors."""
        network, algorithm, device = self.network, self.algorithm, self.network.device
        network.load(model[0])
        for buffers in model[1:]:
            network.load_buffers(buffers)
        network.zero_grad()
        values = {name: tensor.to(device) for name, tensor in tensors.items()}
        with Isolated(False, seed, device):
            with self._evaluating():
                targets = algorithm.targets(network.module, self.target.module, values)
                evaluated = algorithm.errors(network.module, values, targets) if self._mode_matters else None
            loss, errors = algorithm.loss(network.module, values, targets, values["weights"])
            loss.backward()  # type: ignore[no-untyped-call]
        network.check()
        after = network.buffers_flat() if model[1:] else None
        gradient = Gradient(network.grads.clone(), float(loss.detach()), self.batch_size, after)
        return gradient, (errors if evaluated is None else evaluated).detach().float().cpu()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Run a block with the network in evaluation mode."""
        for part in self._in_training:
            part.training = False
        try:
            yield
        finally:
            for part in self._in_training:
                part.training = True

    # ---- samples

    async def _next(self, version: int) -> _Batch:
        """The next batch. Replays whose actors have ended are left out; the work ends with the last replay."""
        started = self.node.now()
        while True:
            while len(self._batches) < max(1, self.settings.prefetch) and len(self.over) < len(self.replays):
                self._batches.append(self._ask(version))
            if not self._batches:
                raise EndOfWork
            batch = self._batches.popleft()
            with suppress(WorkOver):
                await batch.arrives
                break
            self.over.add(batch.replay.node)
        self.meter.add("wait", started, self.node.now(), "sample")
        return batch

    def _ask(self, version: int) -> _Batch:
        while (replay := self.replays[self.asked % len(self.replays)]).node in self.over:
            self.asked += 1
        self.asked += 1
        into, tensors = self.samples.room(self.batch_size)
        fields: dict[str, Any] = {"count": self.batch_size, "beta": self.settings.beta, "version": version}
        return _Batch(replay, self.node.call(replay, "sample", into=into, timeout=FOREVER, **fields), tensors)


def _model(requester: Requester) -> Sequence[torch.Tensor]:
    """The parameters of the worker's model, and its buffers if training changes some."""
    return (requester.params,) if requester.buffers is None else (requester.params, requester.buffers)


def _updates(requester: Requester) -> int:
    """The updates that the model has had: the worker's steps; over servers, those of all workers."""
    versions = requester.versions
    return requester.clock if versions is None else min(versions)


WARM_UP = 100
"""Losses before the first that may be dropped."""

DECAY = 0.99
"""Weight of the past in the running mean and variance."""

IN_A_ROW = 10
"""Drops in a row after which a loss counts: larger losses have become the rule."""


class OutlierFilter:
    """Admits a loss up to `k` standard deviations above the running mean of those that were admitted.

    During the first `warm_up` losses mean and variance are those of all so far (population); afterwards they decay
    exponentially, or stay those of all if `decay` is 1.
    """

    def __init__(self, k: float, *, warm_up: int = WARM_UP, decay: float = DECAY) -> None:
        self.k, self.warm_up, self.decay = k, warm_up, decay
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0
        self.dropped = 0
        self._in_a_row = 0

    def admits(self, loss: float) -> bool:
        """Whether the gradient of `loss` counts; the loss then enters the mean."""
        limit = self.mean + self.k * math.sqrt(self.variance)
        if self.count >= self.warm_up and loss > limit and self._in_a_row < IN_A_ROW:
            self._in_a_row += 1
            self.dropped += 1
            return False
        self._in_a_row = 0
        self.count += 1
        weight = 1 / self.count if self.count <= self.warm_up or self.decay == 1 else 1 - self.decay
        difference = loss - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference**2)
        return True

    def state(self) -> dict[str, Any]:
        return {"seen": [self.count, self.mean, self.variance, self.dropped, self._in_a_row]}

    def restore(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.variance, self.dropped, self._in_a_row = state["seen"]
