"""The profile of a job on this machine: seconds of its steps and blocks, for the mini-batches of a plan.

    step of n samples             =  overhead + n * sample         data, gradient and optimizer, as a worker does them
    pass of n samples, each block =  call + n * sample             forward and backward apart

Each line is fitted to the least seconds of several repeats: other work on the machine only adds time. The sum of the
blocks' calls is the part of a step that a pipeline pays for each micro-batch.

A plan for this machine divides the seconds that `dure probe` measures into overhead, calls and samples by the profile.
For a cluster file that states seconds, a plan measures nothing (`compute`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dure.core.cost import fit
from dure.errors import DureError
from dure.job.job import refusal
from dure.partition.blocks import blocks_of, call_of, first_samples
from dure.partition.profile import BlockTimes, PassTime
from dure.planner.probe.measure import begin_steps
from dure.runtime.virtual.compute import Trace

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Compute


SIZES = 4
"""Most numbers of samples that are measured: those of a mini-batch, and halves of it."""

FEWEST, MOST, SPENT = 3, 15, 0.25
"""Repeats of a measurement at least and at most, and seconds after which it is not repeated."""

BAD_FIT = 0.15
"""Residual from which on a line describes the steps badly."""


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Seconds of a job's steps and blocks on this machine. `backward` is the share of backward in the passes.

    `residual` is the root mean square of the relative errors of the steps' line.
    """

    overhead: float
    sample: float
    call: float
    backward: float
    times: BlockTimes | None
    residual: float

    def seconds(self, samples: int) -> float:
        """Seconds of a step of so many samples."""
        return self.overhead + samples * self.sample

    def advice(self) -> str:
        """A sentence about a bad fit; empty if the fit is good."""
        if self.residual <= BAD_FIT:
            return ""
        return (
            f"The line of the job's steps is off by {self.residual:.0%}: its steps are not in proportion to their "
            "samples, or other programs used the machine. Plan again when the machine is idle, and give more weight to "
            "strategies whose batches are those of the job."
        )


def profile_job(job: Job) -> JobProfile:
    """Measure `job` on one thread of this process, for its mini-batch and smaller ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers compute
    try:
        return _profiled(job)
    finally:
        torch.set_num_threads(threads)


def _profiled(job: Job) -> JobProfile:
    sizes = _sizes(job)
    steps = [(float(size), _least(begin_steps(replace(job, batch_size=size)))) for size in sizes]
    line = fit(steps) if len(steps) > 1 else None
    overhead = 0.0 if line is None else max(0.0, line.start)
    sample = steps[0][1] / sizes[0] if line is None else line.slopes[0]
    times = _block_times(job, sizes)
    if times is None:
        return JobProfile(overhead, sample, overhead, 2 / 3, None, 0.0 if line is None else line.residual)
    calls = sum(each.call for each in (*times.forward, *times.backward))
    ahead, back = (sum(each.call + job.batch_size * each.sample for each in passes) for passes in times)
    share = back / (ahead + back)
    return JobProfile(overhead, sample, min(calls, overhead), share, times, 0.0 if line is None else line.residual)


def _sizes(job: Job) -> list[int]:
    """The numbers of samples to measure, descending: a mini-batch, and its halves that the job takes.

    A job that takes no half is measured with two mini-batches in one, if it takes that.
    """
    module, size = job.build(0), job.batch_size
    halves = list(dict.fromkeys(max(1, size >> halving) for halving in range(1, SIZES)))
    smaller = [each for each in halves if each < size and refusal(job, module, each) is None]
    larger = [2 * size] if not smaller and refusal(job, module, 2 * size) is None else []
    return [*larger, size, *smaller]


def _least(function: Callable[[], object]) -> float:
    """The least seconds of several calls, after one that is not counted."""
    function()
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < SPENT):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def _block_times(job: Job, sizes: Sequence[int]) -> BlockTimes | None:
    """The seconds of each block; None for a model that is not given as blocks."""
    module = job.build(0)
    try:
        blocks = blocks_of(job, module)
    except DureError:
        return None
    measured = {size: list(_passes(job, blocks, size)) for size in sizes}
    passes = [[(float(size), seconds[number]) for size, seconds in measured.items()] for number in range(len(blocks))]
    lines = [[_line([(size, pair[way]) for size, pair in points]) for points in passes] for way in range(2)]
    return BlockTimes(lines[0], lines[1])


def _passes(job: Job, blocks: Sequence[nn.Module], size: int) -> Iterator[tuple[float, float]]:
    """Seconds of the forward and the backward of each block."""
    call, value = call_of(job), first_samples(job, size, torch.device("cpu"))[0]
    for number, block in enumerate(blocks):
        inputs = tree_map(partial(_leaf, needed=number > 0), value)
        forward = partial(call, block, inputs)
        ahead = _least(forward)
        yield ahead, max(_least(partial(_both_ways, block, inputs, forward)) - ahead, 0.0)
        value = tree_map(_detached, forward())


def _both_ways(block: nn.Module, inputs: Any, forward: Callable[[], Any]) -> None:
    """A forward, and the backward from all its outputs."""
    roots = [each for each in tree_leaves(forward()) if isinstance(each, Tensor) and each.requires_grad]
    wanted = [each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.requires_grad]
    wanted += [each for each in block.parameters() if each.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(each) for each in roots], allow_unused=True)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _leaf(value: Any, *, needed: bool) -> Any:
    """A tensor without its graph; one between blocks needs a gradient."""
    if not isinstance(value, Tensor):
        return value
    found = value.detach()
    return found.requires_grad_() if needed and found.is_floating_point() else found


def _line(points: Sequence[tuple[float, float]]) -> PassTime:
    """The line through (samples, seconds), with no part below 0."""
    if len(points) < 2 or min(seconds for _, seconds in points) <= 0:
        size, seconds = points[0]
        return PassTime(0.0, seconds / size)
    line = fit(points)
    if line.start < 0:
        return PassTime(0.0, math.fsum(seconds for _, seconds in points) / math.fsum(size for size, _ in points))
    return PassTime(line.start, line.slopes[0])


SMALLEST = 1e-6
"""Least share of a sample in a step: steps that samples do not make longer have no speed."""


def calibrated(cluster: Cluster, job: Job, profile: JobProfile) -> Cluster:
    """`cluster` with the seconds of steps divided by `profile`, so that they hold for other mini-batches."""
    kinds = tuple(
        kind.changed(compute=_divided(kind.compute, job, profile)) if kind.compute.seconds is not None else kind
        for kind in cluster.machines
    )
    return cluster.changed(machines=kinds, backward=profile.backward)


def _divided(compute: Compute, job: Job, profile: JobProfile) -> Compute:
    """Divide the seconds of `compute`, those of the job's mini-batch, into overhead and operations."""
    assert compute.seconds is not None
    assert not isinstance(compute, Trace)  # which has no seconds
    factor = compute.seconds / profile.seconds(job.batch_size)
    sample = max(profile.sample, SMALLEST * profile.seconds(job.batch_size))
    return compute.changed(
        seconds=None,
        flops=None,
        overhead=profile.overhead * factor,
        call=min(compute.call if compute.call is not None else profile.call * factor, profile.overhead * factor),
        flops_per_second=job.flops_per_sample / (sample * factor),
    )
