"""Seconds of the passes and messages of a pipeline's stages, from the profile of a model.

forward, backward    the stage's share of the mini-batch's seconds at its slowest worker; where W workers share its
                     layers, the slowest one's part of that, and the collectives among them
collective           exchanges: a request, then a message from each of the W workers to each other. An all-reduce of
                     n bytes is two exchanges of n / W, or for two workers one exchange of n
outputs, gradients   a message each of the border behind the stage
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from oracles.forms.messages import Flow, Transfers
from oracles.forms.steps import StageSeconds

from dure.core.vectors import equal_ranges, size
from dure.run.stages import Stages


@dataclass(frozen=True)
class StageFigures:
    """Figures of `stages` on a cluster whose workers need `seconds` each for a mini-batch of the whole model."""

    stages: Stages
    transfers: Transfers
    workers: Sequence[str]
    seconds: Sequence[float]

    @property
    def layout(self):
        return self.stages.layout

    @cached_property
    def batch(self):
        """Samples of the largest mini-batch."""
        return max(self.stages.batch_sizes)

    @cached_property
    def rows(self):
        """Samples of the largest micro-batch."""
        return self.layout.rows(self.batch, 0)

    @cached_property
    def ask(self):
        """Seconds of a request between two workers of a copy of the model."""
        first, *others = self.workers[: self.stages.count]
        return max((self.transfers.message(Flow(first, other, 0)) for other in others), default=0.0)

    def passes(self):
        """The passes of each worker of a pipeline; with several chunks, of all together, and one chunk's messages."""
        found = []
        for rank in self.layout.ranks:
            (forward, backward), (outputs, gradients) = self._both_passes(rank), self._messages(rank)
            again = forward if self.layout.pipeline.remat else 0.0
            if rank == self.layout.ranks[-1]:  # it never waits
                backward, again = backward + again, 0.0
            found.append(StageSeconds(forward, backward, outputs=outputs, gradients=gradients, again=again))
        return found

    def passes_of_chunks(self):
        """The forward and the backward of each chunk at the slowest worker, where one worker has all."""
        seconds, of_backward = max(self.seconds), self.transfers.cluster.backward
        shares = [self.layout.pass_shares(stage, self.rows, self.batch) for stage in self.layout.stages_of(0)]
        return [
            (seconds * (1 - of_backward) * ahead.total, seconds * of_backward * back.total) for ahead, back in shares
        ]

    def summed_over_ways(self, rank):
        """Seconds in which the workers that share a stage's layers sum the gradients of parameters that all have."""
        ways, layout = self.layout.ways, self.layout
        near = tuple(range(rank * ways, (rank + 1) * ways))
        numel = sum(each.stop - each.start for each in layout.held[near[0]] if each.tied == near and ways > 1)
        return self._all_reduce(rank, numel * layout.whole.params.element_size()) if numel else 0.0

    def crossing(self):
        """Seconds of all messages of a micro-batch of each copy of the model at the busiest card."""
        flows = [flow for rank in self.layout.ranks for both in self._flows(rank) for flow in both]
        return self.layout.pipeline.chunks * self.transfers.busiest(flows, 0.0)

    def _both_passes(self, rank):
        """The forward and the backward of the slowest worker of a stage."""
        ways = self.layout.ways
        return max((self._passes_of(part) for part in range(rank * ways, (rank + 1) * ways)), key=sum)

    def _passes_of(self, part):
        layout, rank = self.layout, part // self.layout.ways
        seconds, of_backward = max(self.seconds[part :: self.stages.count]), self.transfers.cluster.backward
        forward = backward = 0.0
        for chunk, stage in enumerate(layout.stages_of(rank)):
            ahead, back = layout.pass_shares(stage, self.rows, self.batch)
            shares, called = (ahead.total, back.total), (0.0, 0.0)
            if layout.shared is not None:
                cost = self.stages.modules[layout.alike(part)].cost(chunk, self.rows)
                of_ahead, of_back = layout.factors(part, chunk, cost, self.rows, self.batch)
                shares = ahead.total * of_ahead, back.total * of_back
                called = self._called(rank, cost.forward), self._called(rank, cost.backward)
            forward += seconds * (1 - of_backward) * shares[0] + called[0]
            backward += seconds * of_backward * shares[1] + called[1]
        return forward, backward

    def _messages(self, rank):
        """The messages of the border behind the first chunk of a stage; none behind the last stage."""
        return (max(map(self.transfers.message, flows), default=0.0) for flows in self._flows(rank))

    def _flows(self, rank):
        """The messages of `_messages` in each copy of the model, to the next stage and back."""
        layout, ways = self.layout, self.layout.ways
        if rank == layout.ranks[-1]:
            return [], []
        border = layout.border(layout.stages_of(rank)[0], self.rows)
        back = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in border.tensors if each.gradient)
        here, there = (self.workers[each * ways :: self.stages.count] for each in (rank, rank + 1))
        ends = list(zip(here, there, strict=True))
        return [Flow(*pair, border.nbytes) for pair in ends], [Flow(other, one, back) for one, other in ends]

    # ---- collectives among the workers that share layers

    def _called(self, rank, pieces):
        """Seconds of the collectives between the pieces of a pass."""
        return sum(self._collective(rank, piece.call) for piece in pieces if piece.call is not None)

    def _collective(self, rank, call):
        if call.kind == "all_reduce":
            return self._all_reduce(rank, call.sends[0].nbytes)
        sizes = [each.nbytes for each in call.sends]
        return self._exchange(rank, sizes * self.layout.ways if call.kind == "all_gather" else sizes)

    def _all_reduce(self, rank, nbytes):
        ways = self.layout.ways
        parts = [size([each]) for each in equal_ranges(nbytes, ways)]
        return self._exchange(rank, [nbytes] * 2) if ways == 2 else 2 * self._exchange(rank, parts)

    def _exchange(self, rank, sizes):
        """Seconds in which each worker of a stage sends a message of each of `sizes` to the worker of that number."""
        ways, count = self.layout.ways, self.stages.count
        groups = [self.workers[first + rank * ways :][:ways] for first in range(0, len(self.workers), count)]
        flows = [
            Flow(source, target, nbytes)
            for group in groups
            for source in group
            for target, nbytes in zip(group, sizes, strict=True)
            if nbytes
        ]
        return self.ask + self.transfers.seconds(flows)
