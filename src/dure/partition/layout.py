"""The layout of a pipeline in one run: the blocks of each stage, the flat ranges of each worker, borders and costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from dure.errors import UsageError
from dure.job.job import refusal, trial_rows
from dure.partition.backward import costs_of
from dure.partition.blocks import (
    blocks_of,
    call_of,
    check_composition,
    first_samples,
    is_one_block,
    refuse_hooks,
    refuse_ties,
    stated_seconds,
    tied,
    tied_stages,
)
from dure.partition.borders import Border, KeptMemory, MeasuredPass, measure, whole_borders
from dure.partition.cut import ANY, Speeds, cut_of
from dure.partition.profile import PassShare, counted, share

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dure.job.job import Job
    from dure.job.replica import Replica
    from dure.partition.backward import BlockCosts, DeviceSpeed
    from dure.partition.pipeline import Pipeline
    from dure.partition.profile import Profile
    from dure.partition.shared_layers import SharedLayers
    from dure.partition.tensor.plan import ParameterShard, SplitPlan
    from dure.partition.tensor.ways import Activations, PassCost


Known = TypeVar("Known")


class Held(NamedTuple):
    """A parameter of the whole model, or a shard of it, as the slice [start, stop) of the vector of a worker.

    `tied`: the workers, this one included, whose gradients of it are summed. `first`: this worker is the first of those
    that hold the same values.
    """

    number: int
    name: str
    shard: ParameterShard | None
    start: int
    stop: int
    tied: tuple[int, ...]
    first: bool


class StageLayout:
    """A job's model, of which `whole` is a replica, cut into the stages of `pipeline` for machines of these `speeds`.

    Several workers hold the layers of a stage if they are `shared`. A worker updates the share `updated` of its part.
    Raises `UsageError` for a model that cannot be cut.
    """

    def __init__(
        self,
        job: Job,
        pipeline: Pipeline,
        whole: Replica,
        speeds: Speeds = ANY,
        shared: SharedLayers | None = None,
        updated: float = 1.0,
    ) -> None:
        self.job = job
        self.pipeline = pipeline
        self.whole = whole
        self.shared = shared
        self.updated = updated
        self.ways = 1 if shared is None else shared.ways
        self.blocks = self.blocks_of(whole.module)
        self.call = call_of(job, whole=self._is_one_block(whole.module))
        self.depth = pipeline.stages * pipeline.chunks
        refuse_hooks(whole.module, self.blocks)
        if job.stages is not None and len(self.blocks) > 1:
            self._known(
                ("composition", len(self.blocks)), lambda: check_composition(job, whole.module, self.blocks, self._rows)
            )
        cuts = cut_of(
            pipeline.cuts,
            self.blocks,
            self.depth,
            self._counted,
            speeds,
            self._whole_borders() if self.depth > 1 else None,
        )
        self.bounds = (0, *cuts, len(self.blocks))
        self._speeds = speeds
        self._measured: dict[int, MeasuredPass] = {}
        self._activations: dict[tuple[int, int], Activations] = {}
        self._pass_shares: dict[tuple[int, int, int], tuple[PassShare, PassShare]] = {}
        if not pipeline.flushes:
            refuse_ties("a pipeline without a flush", self.tied)

    def blocks_of(self, module: nn.Module) -> list[nn.Module]:
        """The blocks of a model of the job. One stage needs none, unless the job recomputes: the model is its block."""
        return [module] if self._is_one_block(module) else blocks_of(self.job, module)

    def _is_one_block(self, module: nn.Module) -> bool:
        alone = self.pipeline.stages * self.pipeline.chunks == 1
        return alone and ((self.shared is not None and not self.job.recompute) or is_one_block(self.job, module))

    def _whole_borders(self) -> list[int] | None:
        """The numbers of the blocks before which the model may be cut; None for all."""
        if self.plan is None:
            return None
        plan = self.plan

        def borders() -> list[int]:
            return whole_borders(self.job, plan, self.ways, self.call, self.blocks_of, self._rows)

        if not isinstance(self.shared, Hashable):  # a class of the user's
            return borders()
        return self._known(("borders", self.shared, len(self.blocks)), borders)

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages hold, by name, with these stages."""
        return tied_stages(tied(self.whole.module, self.blocks), self.bounds[1:-1])

    @property
    def ranks(self) -> range:
        """The workers of one pipeline."""
        return range(self.pipeline.stages)

    @property
    def parts(self) -> range:
        """The workers that hold one copy of the model: each `rank` of the pipeline has `ways` of them."""
        return range(self.pipeline.stages * self.ways)

    def alike(self, part: int) -> int:
        """The first worker whose layers, and parts of layers, have the shapes of those of worker `part`.

        Its passes have the same operations and collectives. A plan that is not for pipelines may give each worker
        collectives of its own.
        """
        assert self.shared is not None
        first = part - part % self.ways
        if not self.shared.in_pipelines:
            return part
        return next(each for each in range(first, part + 1) if self._shapes[each] == self._shapes[part])

    @cached_property
    def _shapes(self) -> list[list[tuple[int, int]]]:
        """For each worker of a copy of the model, the numbers of its parameters, and their sizes there."""
        return [[(each.number, each.stop - each.start) for each in held] for held in self.held]

    def stages_of(self, rank: int) -> list[int]:
        """The stages at worker `rank` of the pipeline, by chunk."""
        return [self.pipeline.stage_of(rank, chunk) for chunk in range(self.pipeline.chunks)]

    def place_of(self, stage: int) -> tuple[int, int]:
        """The worker of the pipeline that holds a stage, and the number of its chunk there."""
        return self._places[stage]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {stage: (rank, chunk) for rank in self.ranks for chunk, stage in enumerate(self.stages_of(rank))}

    def blocks_in(self, stage: int) -> range:
        """The numbers of the blocks of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    # ---- parameters

    @cached_property
    def layers(self) -> list[list[int]]:
        """For each worker of a pipeline, the layers of the whole model that it holds, in the model's order."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.whole.parameters)}
        found = []
        for rank in self.ranks:
            held = [self.blocks[i] for stage in self.stages_of(rank) for i in self.blocks_in(stage)]
            own = {numbers[id(each)] for block in held for each in block.parameters() if id(each) in numbers}
            found.append(sorted(own))
        return found

    @cached_property
    def plan(self) -> SplitPlan | None:
        """The split of the layers, where they are shared."""
        return None if self.shared is None else self.shared.plan(self.job, self.whole.module)

    @cached_property
    def shards(self) -> dict[str, Sequence[ParameterShard]]:
        """The shards of the parameters and buffers that are split, by name."""
        return {} if self.plan is None else self.plan.shards(self.whole.module, self.ways)

    @cached_property
    def held(self) -> list[list[Held]]:
        """For each worker of a copy of the model, its parameters, in the model's order."""
        return [self._held_by(*divmod(part, self.ways)) for part in self.parts]

    @property
    def partial(self) -> frozenset[str]:
        """The names of the parameters whose gradients are summed over the workers that share layers."""
        return frozenset() if self.plan is None else self.plan.partial

    def _held_by(self, rank: int, way: int) -> list[Held]:
        place, found = 0, []
        for number in self.layers[rank]:
            layer = self.whole.layers[number]
            shards = self.shards.get(layer.name)
            ranks = [each for each in self.ranks if number in self.layers[each]]
            ways = range(self.ways) if layer.name in self.partial else (way,)
            tied = tuple(each * self.ways + other for each in ranks for other in ways)
            shard = None if shards is None else shards[way]
            numel = layer.numel if shard is None else layer.numel // layer.shape[shard.dim] * shard.index.numel()
            first = rank == ranks[0] and (shard is not None or way == 0)
            found.append(Held(number, layer.name, shard, place, place + numel, tied if len(tied) > 1 else (), first))
            place += numel
        return found

    def part(self, part: int, values: Tensor) -> Tensor:
        """The parameters of a worker of a copy of the model, from those of the whole model; a copy."""
        return torch.cat([_of_whole(self.whole, each, values) for each in self.held[part]])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The parameters of the whole model, from those of the workers of one copy of it."""
        values = self.whole.params.detach().clone().to(parts[0].device)
        for own, part in zip(self.held, parts, strict=True):
            for each in own:
                layer = self.whole.layers[each.number]
                if each.shard is not None:
                    whole = values[layer.start : layer.stop].view(layer.shape)
                    each.shard.put(whole, part[each.start : each.stop].view(each.shard.shape(layer.shape)))
                elif each.first:
                    values[layer.start : layer.stop] = part[each.start : each.stop]
        return values

    # ---- borders and costs

    def rows(self, batch_size: int, micro: int) -> int:
        """The number of samples of a micro-batch."""
        size, larger = divmod(batch_size, self.pipeline.micro_batches)  # as `equal_ranges`, for one of them
        return size + (micro < larger)

    def border(self, stage: int, rows: int) -> Border:
        """The border behind a stage, for a micro-batch of `rows` samples."""
        return self.measured(rows).border(self.bounds[stage + 1])

    def activations(self, stage: int, rows: int) -> Activations:
        """The memory that autograd keeps for the backward of a stage, for a micro-batch of `rows` samples."""
        if (stage, rows) not in self._activations:
            self._activations[stage, rows] = self.measured(rows).activations(self.blocks_in(stage))
        return self._activations[stage, rows]

    def kept(self, stage: int, rows: int, own: Activations) -> KeptMemory:
        """The memory of a micro-batch at a worker with a stage, or a part of it, which has `own` activations.

        A pipeline that re-materialises keeps the inputs of a stage, and a job that recomputes those of each block.
        """
        if self.pipeline.remat:
            inputs = self.border(stage - 1, rows).nbytes if stage else 0
            return KeptMemory(inputs, max(0, own.nbytes - inputs))
        if self.job.recompute:
            return self.measured(rows).recomputed(self.blocks_in(stage), own)
        return KeptMemory(own.nbytes)

    @cached_property
    def shares(self) -> list[float]:
        """The share of each stage in the operations of the model; where none are counted, in its parameters."""
        return [total / sum(self._totals) for total in self._totals]

    def pass_shares(self, stage: int, rows: int, batch: int) -> tuple[PassShare, PassShare]:
        """The shares of a micro-batch of `rows` samples at a stage in the forward and the backward of a mini-batch.

        On accelerators they are those of the operations of a pass of so many samples: starts of kernels and moves of
        weights do not get shorter with it.
        """
        key = stage, rows, batch
        if key not in self._pass_shares:
            self._pass_shares[key] = self._shares_of(*key)
        return self._pass_shares[key]

    def _shares_of(self, stage: int, rows: int, batch: int) -> tuple[PassShare, PassShare]:
        times, blocks = self._speeds.times, self.blocks_in(stage)
        if times is not None and len(times.forward) == len(self.blocks) and self.job.block_seconds is None:
            return share(times.forward, blocks, rows, batch), share(times.backward, blocks, rows, batch)
        costs = None if self.costs is None else self._costs_of(rows)
        if costs is not None:
            held = self._numel(stage) / sum(self._numel(each) for each in range(self.depth))
            forward, backward = self._in_shares(*self._of_stage(costs, stage), held, rows, batch)
            return PassShare(0.0, forward), PassShare(0.0, backward)
        call = self._speeds.call
        ahead, back = (
            PassShare(call * self._call_shares[stage], (1 - call) * (work[stage] * rows / batch))
            for work in self._work_shares
        )
        return ahead, back

    @cached_property
    def _work_shares(self) -> tuple[list[float], list[float]]:
        """The share of each stage in the forward and the backward: of the stated seconds, or else of the operations."""
        if self.job.block_seconds is None:
            return self.shares, self.shares
        seconds = stated_seconds(self.job, len(self.blocks))
        stages = [self.blocks_in(stage) for stage in range(self.depth)]
        ahead, back = (
            [sum(passes[number] for number in blocks) / sum(passes) for blocks in stages]
            for passes in zip(*seconds, strict=True)
        )
        return ahead, back

    @cached_property
    def _call_shares(self) -> list[float]:
        """The share of each stage in the modules without children, which stand for calls of the machine's kernels."""
        counts = [sum(1 for each in block.modules() if next(each.children(), None) is None) for block in self.blocks]
        return [sum(counts[number] for number in self.blocks_in(stage)) / sum(counts) for stage in range(self.depth)]

    @cached_property
    def costs(self) -> BlockCosts | None:
        """The costs of a step of the job's own mini-batch on the accelerators of this run; None on other machines.

        None also where the model cannot be counted so (`costs_of`), and where the job states seconds.
        """
        return None if self.job.block_seconds is not None else self._costs_of(self.job.own_batch_size)

    def _costs_of(self, samples: int) -> BlockCosts | None:
        """The costs of a step of so many samples on the accelerators of this run."""
        if self._speeds.device is None:
            return None
        speed = self._speeds.device(self.whole.params.dtype)
        return self._known(("costs", speed, samples), lambda: costs_of(self.job, self.whole.module, samples, speed))

    def _of_stage(self, costs: BlockCosts, stage: int) -> tuple[float, float]:
        """The operations of a stage's forward and backward; where the whole model is one block, those of all."""
        one = len(costs.passes) != len(self.blocks)
        own = costs.passes if one else [costs.passes[number] for number in self.blocks_in(stage)]
        return sum(ahead for ahead, _ in own), sum(back for _, back in own)

    def _in_shares(self, ahead: float, back: float, held: float, rows: int, batch: int) -> tuple[float, float]:
        """The operations of passes of `rows` samples, in shares of those of a mini-batch of `batch`.

        The seconds of a mini-batch are in proportion to those of a step of the job's own, whose forward has the update.
        A backward has the update of the part `held` of the parameters, as much of it as it has of the mini-batch.
        """
        assert self.costs is not None
        update, steps = self.costs.update, batch / self.job.own_batch_size
        whole_ahead, whole_back = (sum(each[way] for each in self.costs.passes) for way in range(2))
        updated = update * self.updated * held * rows / batch
        return ahead / ((whole_ahead + update) * steps), (back + updated) / (whole_back * steps)

    @property
    def speed(self) -> DeviceSpeed | None:
        """The speed of the accelerators whose operations are counted; None where FLOPs are."""
        device = self._speeds.device
        return None if device is None or self.costs is None else device(self.whole.params.dtype)

    def factors(self, part: int, chunk: int, cost: PassCost, rows: int, batch: int) -> tuple[float, float]:
        """The forward and the backward of a worker, over those of its stage without a split, for the same samples.

        Where the operations of accelerators are counted, seconds are in proportion to those of the step that the
        cluster's seconds are for. Backward takes as many times a forward as in the whole model, and has the update.
        """
        stage = self.pipeline.stage_of(part // self.ways, chunk)
        shares = self.pass_shares(stage, rows, batch)
        if self.costs is None:
            fraction = self._fraction(part, stage, cost, rows)
            return shares[0].split(fraction), shares[1].split(fraction)
        stage_ahead, stage_back = self._of_stage(self.costs, stage)
        forward, held = sum(piece.flops for piece in cost.forward), self.held[part]
        updated = held[-1].stop / self.whole.numel if held else 0.0
        ahead, back = self._in_shares(forward, forward * stage_back / stage_ahead, updated, rows, batch)
        return ahead / shares[0].total, back / shares[1].total

    def _fraction(self, part: int, stage: int, cost: PassCost, rows: int) -> float:
        """The part of a worker in the FLOPs of a stage; where none are counted, in its parameters."""
        whole = sum(self.measured(rows).costs[number].flops for number in self.blocks_in(stage))
        if whole:
            return sum(piece.flops for piece in cost.forward) / whole
        held = self.held[part]
        return held[-1].stop / sum(self.whole.layers[each.number].numel for each in held) if held else 0.0

    def share_of_dense(self, weights: int) -> float:
        """The forward of dense layers with so many `weights`, in shares of the model's forward."""
        return weights * (self._rows * 2.0 if self._is_counted else 1.0) / sum(self._totals)

    @cached_property
    def _totals(self) -> list[float]:
        """The operations of each stage for a trial batch; where none are counted, its parameters."""
        if self._is_counted:
            costs = self.measured(self._rows).costs
            return [sum(costs[number].flops for number in self.blocks_in(stage)) for stage in range(self.depth)]
        return [float(self._numel(stage)) for stage in range(self.depth)]

    @property
    def _is_counted(self) -> bool:
        return any(cost.flops for cost in self.measured(self._rows).costs)

    def _numel(self, stage: int) -> int:
        return sum(each.numel() for number in self.blocks_in(stage) for each in self.blocks[number].parameters())

    def measured(self, rows: int) -> MeasuredPass:
        """The borders and the costs of all blocks for `rows` samples. Raises `UsageError` for unsuitable blocks."""
        if rows not in self._measured:
            try:
                found = self._known(("pass", len(self.blocks), rows), lambda: self._measure(rows))
            except UsageError as error:
                raise UsageError(f"{error}{self._advice(rows)}") from error.__cause__
            self._check_rows(rows)
            found.check(self.bounds)
            self._measured[rows] = found
        return self._measured[rows]

    @property
    def _rows(self) -> int:
        """The samples of a trial batch."""
        return self._known(("trial",), lambda: trial_rows(self.job, self.whole.module))

    def _check_rows(self, rows: int) -> None:
        """Raise `UsageError` where the loss does not take a micro-batch of `rows` samples, but takes a trial batch."""
        if rows not in (self._rows, self.job.batch_size):
            found = self._known(("refusal", rows), lambda: refusal(self.job, self.whole.module, rows))
            if found is not None and (advice := self._advice(rows)):
                raise UsageError(f"{found}{advice}")

    def _advice(self, rows: int) -> str:
        """A sentence for an error with `rows` samples; empty if a trial batch has an error too."""
        trial = self._rows
        if rows == trial or refusal(self.job, self.whole.module, trial) is not None:
            return ""
        return (
            f" A batch of {trial} samples works, and micro-batches of {self.pipeline.micro_batches} in a mini-batch "
            f"have {rows}: write fewer micro-batches (micro=), or a larger --batch-size."
        )

    @property
    def outputs(self) -> Border:
        """The outputs of the model for a trial batch."""
        return self.measured(self._rows).border(self.bounds[-1])

    def _measure(self, rows: int) -> MeasuredPass:
        before = self.whole.buffers_flat()
        inputs, _ = first_samples(self.job, rows, self.whole.device)
        found = measure(self.blocks, self.call, inputs)
        if before.numel():
            self.whole.load_buffers(before)
        return found

    def _counted(self) -> Profile:
        """The profile of the blocks by the seconds that the job states, or else by their operations."""
        size = self.job.batch_size
        found = self._known(("profile", len(self.blocks), size), lambda: counted(self.job, self.blocks, size))
        if self.job.block_seconds is None:
            return found
        return found.taking([ahead + back for ahead, back in stated_seconds(self.job, len(self.blocks))])

    def _known(self, key: tuple[object, ...], measure: Callable[[], Known]) -> Known:
        """The figures of the whole model under `key`, which are measured once."""
        known = self.whole.figures
        if key not in known:
            known[key] = measure()
        found: Known = known[key]
        return found

    # ---- buffers

    def joined_buffers(self, replicas: Mapping[int, Replica], parts: Mapping[int, Tensor]) -> Tensor:
        """The buffers of the whole model, from those of the workers of a pipeline by rank.

        `replicas` are the workers' own, whose modules have the buffers under the whole model's names.
        """
        whole = self.whole
        before = whole.buffers_flat()
        named = dict(whole.module.named_buffers())
        for number, part in parts.items():
            replica = replicas[number]
            replica.load_buffers(part)
            for name, buffer in replica.module.named_buffers():
                if name in self.shards:
                    self.shards[name][number % self.ways].put(named[name], buffer)
                elif number % self.ways == 0:
                    named[name].copy_(buffer)
        joined = whole.buffers_flat()
        whole.load_buffers(before)
        return joined

    def part_of_buffers(self, replica: Replica, part: int, buffers: Tensor) -> Tensor:
        """The buffers of a worker of a copy of the model, whose `replica` has them, from those of the whole model."""
        whole, before, own = self.whole, self.whole.buffers_flat(), replica.buffers_flat()
        whole.load_buffers(buffers)
        named = dict(whole.module.named_buffers())
        for name, buffer in replica.module.named_buffers():
            shards = self.shards.get(name)
            buffer.copy_(named[name] if shards is None else shards[part % self.ways].of(named[name]))
        found = replica.buffers_flat()
        replica.load_buffers(own)
        whole.load_buffers(before)
        return found


def _of_whole(whole: Replica, held: Held, values: Tensor) -> Tensor:
    """The values of a parameter of a worker, flat."""
    layer = whole.layers[held.number]
    own = values[layer.start : layer.stop]
    return own if held.shard is None else held.shard.of(own.view(layer.shape)).reshape(-1)
