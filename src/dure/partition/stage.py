"""A stage of a pipeline at one worker: the primitives that pipeline methods are written in.

    receive  ->  forward  ->  send  ...  receive  ->  backward  ->  send  ->  update

The same code runs in virtual time and on processes. A message leaves when its receiver has asked for it, so a worker
asks for the next few messages ahead of its actions. A worker may hold several stages (chunks); they share one flat
vector of parameters, and an update is that of all chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from dure.core.node import Ghost, StepPortion, StepTime
from dure.job.gradient import Gradient
from dure.partition.messages import StageMessages
from dure.partition.schedule import VersionLog
from dure.partition.stage_module import Leaves, Passed, StageModule
from dure.partition.stage_state import StageCounts, average_versions, begin_versions, use_version, version

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.gradient import Requester
    from dure.job.gradient_engine import RandomState
    from dure.job.optimizer import FlatOptimizer
    from dure.partition.borders import Border, KeptMemory
    from dure.partition.layout import StageLayout
    from dure.partition.messages import StageBatches
    from dure.partition.orders import Action
    from dure.partition.profile import PassShare
    from dure.partition.shared_stage import SharedStage

HALF = 0.5
"""The share of a backward pass in the gradient of the inputs, and in that of the weights."""

AGAIN = 1 / 3
"""The share of a backward pass in the forward that a job computes again, with the gradient of the inputs."""


Predict = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""The gradients of a stage's outputs from the outputs, without the next stage."""


class Stage:
    """The stages, or a part of them, at worker `part` of a copy of the model, on `node`; `holders` are its workers.

    `shared` computes layers that workers share. `module` is None in a timing-only run. `requester` is the worker
    whose parameters the stage reads. `version` counts its updates. `begun` is the last mini-batch of which it has asked
    for a message or computed anything.
    """

    requester: Requester

    def __init__(
        self,
        layout: StageLayout,
        module: StageModule | None,
        node: Node,
        meter: Meter,
        batches: StageBatches,
        *,
        part: int,
        holders: Sequence[str],
        aliases: bool,
        shared: SharedStage | None = None,
    ) -> None:
        rank, way = divmod(part, layout.ways)
        self.layout = layout
        self.part = part
        self.holders = holders
        self.pipeline = layout.pipeline
        self.module = module
        self.node = node
        self.meter = meter
        self.batches = batches
        self.rank = rank
        line, device = holders[way :: layout.ways], None if module is None else module.replica.device
        self.messages = StageMessages(
            layout, node, meter, rank=rank, peers=line, batch_size=batches.batch_size, device=device
        )
        self.shared = shared
        self.version = 0
        self.begun = -1
        self.counts = StageCounts() if shared is None else shared.counts
        self._held = 0
        self._log = None if meter.spans is None else VersionLog(layout.pipeline, rank)
        self._aliases = aliases
        self._mirror: Tensor | None = None
        self._ahead: Tensor | None = None
        self._mirrored = -1
        self._leaves: dict[int, Leaves] = {}
        self._stashed: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        self._updated: Counter[int] = Counter()
        self._passed: dict[tuple[int, int, int], Passed | None] = {}
        self._versions: dict[int, int] = {}
        self._times: dict[int, StepTime] = {}
        self._sums: dict[int, Tensor] = {}
        self._summed: dict[int, set[int]] = {}
        self._losses: dict[int, Tensor] = {}
        self._buffers: Tensor | None = None
        self._given_buffers: Tensor | None = None

    # ---- weights

    @property
    def newest(self) -> Tensor:
        """The newest weights. They change with each update, and a backward that reads them reads them as they are."""
        params = self.requester.params
        # in a group only `update` changes the parameters; over servers new ones arrive while mini-batches are in flight
        if self._aliases or isinstance(params, Ghost):
            return params
        if self._mirror is None:
            self._mirror = self._memory()
        return self._mirror.copy_(params)

    def fixed(self, batch: int) -> Tensor:
        """The newest weights at the first forward of a mini-batch, for all its actions."""
        if self._mirrored == batch and self._mirror is not None:
            return self._mirror
        self._mirrored = batch
        return self.newest

    def stash(self, batch: int) -> Tensor:
        """The newest weights at the first forward of a mini-batch, in memory that no update before its own changes."""
        if batch not in self._stashed:
            self._stashed[batch] = self.newest
            # the copy belongs to this mini-batch now, so `newest` takes other memory next time
            if self._stashed[batch] is self._mirror:
                self._mirror = None
        # several mini-batches may share one stash, and the parameters themselves are counted by the 1
        own = {id(each) for each in self._stashed.values()} - {id(self.requester.params)}
        self.counts.most_versions = max(self.counts.most_versions, 1 + len(own))
        return self._stashed[batch]

    def ahead(self, steps: Callable[[float], float]) -> Tensor:
        """The newest weights and the way that their velocity takes in `steps`, a function of the momentum."""
        newest = self.newest
        if isinstance(newest, Ghost):
            return newest
        if self._ahead is None:
            self._ahead = torch.empty_like(newest)
        optimizer = cast("FlatOptimizer", self.requester.optimizer)
        return optimizer.ahead(newest, steps, self._ahead, lr=self.requester.lr)

    def version_for(self, batch: int) -> Tensor:
        """The weights of the version that a mini-batch reads and updates."""
        versions = self.pipeline.versions
        return self.newest if versions == 1 else version(self.requester, batch % versions)

    def average(self) -> None:
        """Set all versions to their mean. No mini-batch may be in flight."""
        average_versions(self.requester, self.pipeline.versions)

    def begin(self, batches: range) -> None:
        """Begin with mini-batches of which the first finds nothing in flight."""
        self._batches = batches
        self._mirrored = -1
        versions = self.pipeline.versions
        if versions > 1:
            begin_versions(self.requester, versions)
            self.counts.most_versions = versions
        self.batches.begin(batches.start)
        if self._log is not None:
            self._log.begin(batches.start)
        for batch in list(self._stashed):
            self._unstash(batch)

    def _stash_ahead(self, batch: int) -> None:
        """Stash the weights before the update of a mini-batch for those that are to read them after it."""
        lag, first = self.pipeline.lag, self._batches.start
        # the first mini-batches after a drain read the weights at its start: no update is `lag` before them
        for later in range(first if batch == first else batch + lag, batch + lag + 1):
            if lag and batch < later < self._batches.stop:
                self._versions.setdefault(later, self.version)
                self.stash(later)

    def _unstash(self, batch: int) -> None:
        """Let go of the weights of a mini-batch. If others have the newest, updates go on in other memory."""
        freed, params = self._stashed.pop(batch, None), self.requester.params
        # memory is free again once no other mini-batch reads it
        if freed is not None and freed is not params and not any(each is freed for each in self._stashed.values()):
            self._free.append(freed)
        # The optimizer writes in place. Where a stash is the parameters' own memory, the stash keeps it and the update
        # goes on in other memory: no copy is made where no other mini-batch reads the old version.
        if any(each is params for each in self._stashed.values()):
            self.requester.params = self._memory().copy_(params)

    def _updates(self, batch: int) -> int:
        """The updates so far of the version that a mini-batch reads."""
        versions = self.pipeline.versions
        return self.version if versions == 1 else self._updated[batch % versions]

    def _count_update(self, batch: int) -> None:
        """Count an update; the worker makes it in the version of the mini-batch."""
        self.version += 1
        versions = self.pipeline.versions
        if versions > 1:
            self._updated[batch % versions] += 1
            use_version(self.requester, batch % versions, steps=batch // versions)
        if self._log is not None:
            self._log.updated(batch)

    def _memory(self) -> Tensor:
        params = self.requester.params
        return self._free.pop() if self._free else params.new_empty(params.numel())

    # ---- actions

    def rows(self, micro: int) -> int:
        """The number of samples of a micro-batch."""
        return self.layout.rows(self.batches.batch_size, micro)

    async def forward(self, action: Action) -> None:
        """Compute the forward of a micro-batch through a chunk, and send its outputs to the next stage."""
        stage = self.pipeline.stage_of(self.rank, action.chunk)
        inputs = await self.messages.outputs_before(action)
        self._versions.setdefault(action.batch, self._updates(action.batch))
        weights = self.pipeline.forward_reads(self, action.batch)
        passed = None if self.module is None else self._begun(stage, action, inputs, weights)
        share, _ = self._pass_shares(stage, action)
        await self.compute(action, lambda: self._forward(action, stage, passed), forward=share.total, passed=passed)
        self._passed[action.batch, action.micro, action.chunk] = passed
        # one forward stands for all in flight: a later one overwrites what backwards of earlier ones read
        if self.pipeline.overwrites:
            self._passed = dict.fromkeys(self._passed, passed)
        self._hold(stage, action)
        outputs = [] if passed is None else [each.detach().contiguous() for each in passed.outputs]
        self.messages.send_outputs(action, outputs)
        # only now: the outputs were needed for the message, and `_forward_again` makes them for the backward
        if passed is not None and self.pipeline.recomputes(action.micro):
            passed.outputs = ()

    async def backward(
        self,
        action: Action,
        *,
        inputs: bool = True,
        weights: bool = True,
        predict: Predict | None = None,
        forward: float = 0.0,
    ) -> None:
        """Compute the backward of a micro-batch through a chunk, and send the gradient of its inputs on.

        Without `weights` only the gradient of the `inputs` is computed, for the stage before; without `inputs` only
        that of the weights. The gradient of the outputs is that of the next stage; with `predict` it is predicted, in
        the share `forward` of the time of the model's forward.
        """
        stage = self.pipeline.stage_of(self.rank, action.chunk)
        key = action.batch, action.micro, action.chunk
        passed = self._passed[key]
        again = self.pipeline.recomputes(action.micro) and inputs
        if again:
            await self._recompute(stage, action, passed)
        gradients = await self.messages.gradients(action) if inputs and predict is None else ()
        # I (inputs alone) comes before W of the same micro-batch, which still needs the activations
        if weights:
            del self._passed[key]
            if not (self.pipeline.overwrites and self._passed):
                self._held -= self._kept(stage, action).between
        found: list[Tensor] = []
        if passed is not None:
            if inputs:
                passed.gradients = gradients
            if not again:
                self._place_weights(passed, self.pipeline.backward_reads(self, action.batch))

        def function() -> None:
            if passed is not None:
                if predict is not None:
                    passed.gradients = predict([each.detach() for each in passed.outputs if each.requires_grad])
                found.extend(self._backward(action, stage, passed, inputs=inputs, weights=weights))

        _, back = self._pass_shares(stage, action)
        part = back.total * (HALF * inputs + HALF * weights)
        if self.layout.job.recompute:
            part = back.total * AGAIN * inputs + (1 - AGAIN) * part
        await self.compute(action, function, forward=forward, backward=part, passed=passed)
        if inputs:
            self.messages.send_gradients(action, [each.contiguous() for each in found])

    async def _recompute(self, stage: int, action: Action, passed: Passed | None) -> None:
        """Compute a forward again, while its gradients travel, in the first action that reads the activations."""
        if passed is not None:
            self._place_weights(passed, self.pipeline.backward_reads(self, action.batch))

        def function() -> None:
            if passed is not None:
                self._forward_again(action, stage, passed)

        share, _ = self._pass_shares(stage, action)
        await self.compute(action, function, forward=share.total, passed=passed)

    def _hold(self, stage: int, action: Action) -> None:
        """Count what is kept between forwards and backwards, that of this forward included."""
        counts, sets = self.counts, 1 if self.pipeline.overwrites else len(self._passed)
        self._held += self._kept(stage, action).between if sets == len(self._passed) else 0
        counts.most_sets = max(counts.most_sets, sets)
        again = self._kept(stage, action).again  # what is computed again is that of one micro-batch at a time
        counts.most_activation_nbytes = max(counts.most_activation_nbytes, self._held + again)

    def _kept(self, stage: int, action: Action) -> KeptMemory:
        """The memory of a micro-batch at this worker."""
        rows, shared = self.rows(action.micro), self.shared
        own = self.layout.activations(stage, rows) if shared is None else shared.kept(action.chunk, rows)
        return self.layout.kept(stage, rows, own)

    def update(self, batch: int) -> Gradient:
        """The gradient of a mini-batch: the sum of its micro-batches'."""
        # The order matters: mini-batches that read the weights before this update stash them first. Then this one lets
        # go of its own, and only then may the optimizer write.
        behind = self._updates(batch) - self._versions.pop(batch)
        self.counts.staleness[behind] += 1
        self._stash_ahead(batch)
        self._unstash(batch)
        self._count_update(batch)
        self._times.pop(batch, None)
        self.batches.drop(batch)
        if self.module is None:
            return Gradient(self.requester.params, 0.0, 0)
        total = self._total(batch)
        loss = self._losses.pop(batch, None)
        self._given_buffers = self._buffers
        return Gradient(total, 0.0 if loss is None else float(loss), self.batches.batch_size, buffers=self._buffers)

    def _total(self, batch: int) -> Tensor:
        """The sum of the gradients of a mini-batch."""
        assert self.module is not None
        total, summed = self._sums.pop(batch), self._summed.pop(batch)
        # sums begin in uninitialized memory: a layer that no micro-batch has reached has no gradient
        for number, layer in enumerate(self.module.replica.layers):
            if number not in summed:
                total[layer.start : layer.stop].zero_()
        return total

    async def compute(
        self,
        action: Action,
        function: Any,
        *,
        forward: float = 0.0,
        backward: float = 0.0,
        passed: Passed | None = None,
    ) -> None:
        """Compute `function`, in these shares of the time of its mini-batch: of the model's forward and backward.

        `passed` is the forward whose weights it reads.
        """
        time = self._times.setdefault(action.batch, StepTime(self.batches.flops, samples=self.batches.batch_size))
        detail = self._detail(action)
        if self.shared is not None:
            rows, batch = self.rows(action.micro), self.batches.batch_size
            pieces = self.shared.pieces(action, rows, batch, forward, backward)
            await self.shared.compute(function, time, pieces, detail, lambda: self._place(action, passed))
            return
        started = self.node.now()
        await self.node.compute(StepPortion(function, time, forward, backward))
        self.meter.add("compute", started, self.node.now(), detail)

    def _place(self, action: Action, passed: Passed | None) -> None:
        """Set the module to the state of a computation that goes on."""
        if self.module is not None and passed is not None:
            self.module.place(action.chunk, passed)

    def _detail(self, action: Action) -> str:
        """The text of an action in a trace, with the version of the weights that it reads: "F3 w2"."""
        if self._log is None or action.kind not in ("F", "B", "I", "W"):
            return str(action)
        return f"{action} {self._log.read(action)}"

    # ---- computing

    def _pass_shares(self, stage: int, action: Action) -> tuple[PassShare, PassShare]:
        return self.layout.pass_shares(stage, self.rows(action.micro), self.batches.batch_size)

    def _begun(self, stage: int, action: Action, received: Sequence[Tensor], weights: Tensor) -> Passed:
        """A forward before its computation."""
        rows = self.rows(action.micro)
        share = self._scaled(rows / self.batches.batch_size)
        passed = Passed((), self._leaves_of(action, weights), rows, share=share)
        # inputs of the model need no gradient; those from the stage before are leaves, whose gradients go back to it
        if stage == 0:
            passed.batch = self.batches.inputs(action.batch, action.micro)
        else:
            specs = self.layout.border(stage - 1, rows).tensors
            passed.inputs = [each.requires_grad_(spec.gradient) for each, spec in zip(received, specs, strict=True)]
        if stage == self.layout.depth - 1:
            passed.targets = self.batches.targets(action.batch, action.micro)
        return passed

    def _forward(self, action: Action, stage: int, passed: Passed | None) -> None:
        if self.module is None or passed is None:
            return
        if self.module.has_buffers:
            self._use_buffers()
        draw, border = self._draw(stage, action), self._border_in(stage, action)
        self.module.forward(action.chunk, passed, draw, border, graph=not self.pipeline.recomputes(action.micro))
        if self.module.has_buffers:
            self._buffers = self.module.buffers()

    def _backward(self, action: Action, stage: int, passed: Passed, *, inputs: bool, weights: bool) -> list[Tensor]:
        assert self.module is not None
        # W of the same micro-batch would count the loss twice
        if inputs and stage == self.layout.depth - 1:
            loss = passed.outputs[0].detach()
            self._losses[action.batch] = self._losses[action.batch] + loss if action.batch in self._losses else loss
        of_inputs, of_layers = self.module.backward(
            action.chunk, passed, inputs=inputs and stage > 0, weights=weights, keep=not weights or self._shares(passed)
        )
        self._add(action.batch, of_layers)
        return of_inputs

    def _shares(self, passed: Passed) -> bool:
        """Whether another mini-batch goes backward through the same forward."""
        return self.pipeline.overwrites and any(each is passed for each in self._passed.values())

    def _forward_again(self, action: Action, stage: int, passed: Passed) -> None:
        """Compute a forward again, from the inputs that were kept, with the same random draws; buffers stay."""
        assert self.module is not None
        if self.module.has_buffers:
            self._use_buffers()
        self.module.forward(action.chunk, passed, self._draw(stage, action), self._border_in(stage, action))

    def _add(self, batch: int, gradients: list[tuple[int, Tensor]]) -> None:
        """Add the gradients of layers to the sum of a mini-batch."""
        assert self.module is not None
        replica = self.module.replica
        total = self._sums.setdefault(batch, torch.empty_like(replica.params))
        summed = self._summed.setdefault(batch, set())
        for number, gradient in gradients:
            layer = replica.layers[number]
            part = total[layer.start : layer.stop].view(layer.shape)
            if number in summed:
                part.add_(gradient)
            else:
                part.copy_(gradient)
                summed.add(number)

    def _scaled(self, share: float) -> float:
        """The factor of the loss of a micro-batch with a `share` of its mini-batch."""
        return share

    def _leaves_of(self, action: Action, weights: Tensor) -> Leaves:
        """The parameters of an action as leaves over the memory of `weights`."""
        return self._over(weights)

    def _over(self, memory: Tensor) -> Leaves:
        assert self.module is not None
        # memory of stashes is used again and again: leaves are made once for each, whatever tensor is a view of it
        found = self._leaves.get(memory.data_ptr())
        if found is None:
            found = self._leaves[memory.data_ptr()] = self.module.leaves(memory)
        return found

    def _place_weights(self, passed: Passed, weights: Tensor) -> None:
        """Have a backward read `weights`: its leaves are over memory of the mini-batch, or over the newest weights."""
        memory = passed.leaves.memory
        if memory.data_ptr() != weights.data_ptr():
            memory.copy_(weights)

    def _draw(self, stage: int, action: Action) -> Sequence[int] | RandomState:
        """The numbers, or the state, from which random layers draw."""
        return (self.batches.seed, self.batches.replica, action.batch, stage, action.micro)

    def _use_buffers(self) -> None:
        """Set the module's buffers to this worker's; a synchronization may have replaced those of the last update."""
        assert self.module is not None
        if self.requester.buffers is not self._given_buffers:
            self._buffers = self._given_buffers = self.requester.buffers
        self.module.use_buffers(self._buffers)

    def _border_in(self, stage: int, action: Action) -> Border | None:
        return self.layout.border(stage - 1, self.rows(action.micro)) if stage > 0 else None
