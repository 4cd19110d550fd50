"""DNI: a module updates at once by a predicted gradient; there is no backward lock and no update lock.

Jaderberg et al., "Decoupled Neural Interfaces using Synthetic Gradients", ICML 2017, section 2.1.

    for t = 1, 2, ...:                                    at every module k = 1 .. K
        receive h_{k-1};  h_k <- F(h_{k-1}; W_k);  send h_k
        d_k <- S_k(h_k [, y])                             at the last module the gradient of its loss
        W_k <- W_k - lr (dh_k / dW_k)^T d_k
        send the target (dh_k / dh_{k-1})^T d_k           at the weights before the update
        receive the target d of mini-batch t - 1;  S_k <- a step on || S_k(h_k) - d ||^2      not at the last module

The target of a module is predicted too, by the synthesizer of the next module. A synthesizer S_k is linear or has
`hidden` layers, begins at zero, and has its own optimizer with the constant `rate` (`GradientModel`). With `labels`
it reads the targets y (cDNI). It learns the target of mini-batch t - 1 between the backward and the update of t, when
the target has come; at a drain also that of the last mini-batch. Its step never reaches W_k. Each replica has
synthesizers of its own.

The weights are never stale, and one graph is kept; the prediction is biased instead. A mini-batch takes f + b and the
time of the synthesizer, whatever K is; no stage waits for a backward of the others. One module is SGD.

Features grow along a wrong prediction, and the next prediction grows with them, so synthesizers must learn faster than
modules move: a high `rate`, and a lower learning rate than SGD needs. With the defaults `digits-mlp:depth=7` over four
stages reached an accuracy of 0.96 to 0.98 after 2,500 steps at lr=0.03 and lr=0.05 (three seeds each); at lr=0.1 one of
two seeds diverged, and so did all runs in which synthesizers used Adam.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.job.optimizer import OptimizerSpec
from dure.partition.orders import Action
from dure.partition.pipeline import Pipeline
from dure.partition.synthesizer import Predictor, Synthesizer, check, share_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dure.job.gradient import Gradient
    from dure.partition.layout import StageLayout
    from dure.partition.stage import Stage


@dataclass(frozen=True)
class DNI(Pipeline):
    """Pipeline without a backward wave, in which each module predicts the gradient of its outputs."""

    paper: ClassVar[str] = "Jaderberg et al., Decoupled Neural Interfaces using Synthetic Gradients, ICML 2017"
    flushes: ClassVar[bool] = False

    hidden: int = parameter(0, "hidden layers of a synthesizer; 0: it is linear", range=">= 0")
    labels: bool = parameter(True, "a synthesizer reads the targets too (cDNI)")
    optimizer: Literal["sgd", "adam"] = parameter("sgd", "optimizer of a synthesizer")
    rate: float = parameter(
        0.9, "rate of this optimizer; sgd is stable below 1, adam needs about 0.001; 0: no step", range=">= 0, < inf"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 0:
            raise ValueError(f"hidden counts layers and must be at least 0, got {self.hidden}")
        if not 0 <= self.rate < float("inf"):
            raise ValueError(f"rate must be a number >= 0, got {self.rate}. Try 0.9 for sgd, 0.001 for adam.")
        if self.remat:
            raise ValueError(
                "remat=true saves nothing: each backward of dni follows its forward at once. Leave it out."
            )

    def check_layout(self, layout: StageLayout) -> None:
        """Raise `UsageError` for borders or targets that a synthesizer cannot read."""
        check(layout, labels=self.labels)

    async def run(self, stage: Stage, batches: range) -> AsyncIterator[Gradient]:
        """Play F, B and S of each mini-batch, S of the mini-batch before; give the gradient of each update."""
        is_last = stage.rank == self.stages - 1
        synthesizer = None if is_last or stage.module is None else self.synthesizer(stage)
        share = 0.0 if is_last else share_of(stage, self.hidden, self.labels)
        stage.begun = batches.start
        stage.messages.expect(Action("F", batches.start))
        for batch in batches:
            goes_on = batch + 1 < stage.requester.drained_at  # which is never set to a mini-batch that has begun
            if goes_on:
                stage.begun = batch + 1
                stage.messages.expect(Action("F", batch + 1))
            stage.messages.expect(Action("B", batch))
            await stage.forward(Action("F", batch))
            await stage.node.sleep(0.0)  # messages leave now, not after the next computation
            predict = None if is_last else partial(self._predicted, stage, synthesizer, batch)
            await stage.backward(Action("B", batch), predict=predict, forward=share)
            await stage.node.sleep(0.0)
            for done in () if is_last else range(max(batch - 1, batches.start), batch + (not goes_on)):
                target = await stage.messages.gradients(Action("B", done))
                learn = partial(_learn, synthesizer, target)
                await stage.compute(Action("S", batch), learn, forward=share, backward=share)
            yield stage.update(batch)
            if not goes_on:
                return

    def synthesizer(self, stage: Stage) -> Predictor:
        """The synthesizer behind `stage`."""
        spec = OptimizerSpec(self.optimizer, lr=self.rate)
        return Synthesizer(stage, hidden=self.hidden, labels=self.labels, optimizer=spec)

    def _predicted(
        self, stage: Stage, synthesizer: Predictor | None, batch: int, outputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        assert synthesizer is not None
        targets = stage.batches.targets(batch, 0) if self.labels else None
        return synthesizer.predict(outputs, targets)


def _learn(synthesizer: Predictor | None, gradients: Sequence[Tensor]) -> None:
    """Make a step of a synthesizer; a timing-only run has none."""
    if synthesizer is not None:
        synthesizer.learn(gradients)
