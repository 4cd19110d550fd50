"""Scenes and candidates of a plan: a job on a cluster, and the strategies that are sensible for it.

    step 1    one choice differs from plain data parallelism: a method, a topology, a codec or a partition
    step 2    where a partition has no room in memory: the same, sharded (`sharded_more`)
    step 3    other methods on servers, laid out as is best for synchronous or asynchronous SGD (`on_servers`)
    step 4    the best partitions with the best methods, and the best methods with the best codecs (`crossed`)
    step 5    only if nothing fits into memory: pipelines of small micro-batches (`narrow`), and layers that are split
              over machines, in pipelines or with sharded parameters (`wide`)

The candidates come in the order of their simplicity. Every member of a catalogue has a row here or a reason in
`LEFT_OUT`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dure.errors import DureError
from dure.job.initial_model import InitialModel
from dure.partition.mesh import ONE_STAGE, Mesh, pipeline_of, shared_of, zero_of
from dure.run.strategy import Strategy
from dure.sync.base import traits_of

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.partition.profile import BlockTimes
    from dure.runtime.virtual.cluster import Cluster


@dataclass(frozen=True)
class Scene:
    """`batch` samples of `job` in each step of all workers of `cluster`.

    `times` are the seconds of the model's blocks at a worker of speed 1, if they have been measured. `steps` are those
    of a run of each worker; the job's if None. A job that `has_values` can be trained.
    """

    job: Job
    cluster: Cluster
    batch: int
    times: BlockTimes | None = None
    steps: int | None = None
    has_values: bool = True

    @property
    def run(self) -> int:
        """The steps of each worker in a run: those asked for, else the job's."""
        return self.steps or self.job.steps

    @cached_property
    def alone(self) -> Scene:
        """The fastest machine alone with its workers; one worker where the cluster is one machine."""
        flops = self.job.flops_per_sample * self.batch / self.workers
        return self.on(one_machine(self.cluster, flops))

    @property
    def workers(self) -> int:
        """The workers of the cluster."""
        return self.cluster.workers

    @cached_property
    def model(self) -> InitialModel:
        """The sizes of the job's model, for all timings of the scene."""
        return InitialModel(self.job, 0, timing_only=True)

    def on(self, cluster: Cluster) -> Scene:
        """This scene on another cluster, with as many samples per worker."""
        return self._with(cluster, self.batch * cluster.workers // self.workers)

    def of(self, batch: int) -> Scene:
        """This scene with another number of samples in a step."""
        return self._with(self.cluster, batch)

    def _with(self, cluster: Cluster, batch: int) -> Scene:
        other = replace(self, cluster=cluster, batch=max(1, batch))
        other.__dict__["model"] = self.model
        return other


def one_machine(cluster: Cluster, flops: float) -> Cluster:
    """The machine of `cluster` whose slowest worker is the fastest at mini-batches of so many `flops`, alone."""
    found, first = [], 0
    for kind in cluster.machines:
        several = 1 if isinstance(kind.speed, float) else kind.count
        for machine in range(several):
            ranks = range(first + machine * kind.workers, first + (machine + 1) * kind.workers)
            speeds = tuple(cluster.durations(rank, 0).speed for rank in ranks)
            found.append((kind.compute.mean(flops) / min(speeds), kind, speeds))
        first += kind.count * kind.workers
    _, kind, speeds = min(found, key=lambda each: each[0])
    workers = 1 if sum(each.count for each in cluster.machines) == 1 else kind.workers
    size = {"gpus" if kind.gpus else "workers": workers}
    alone = kind.changed(count=1, speed=speeds[:workers], **size)
    return cluster.changed(machines=(alone,), events=(), racks=None, sites=(), between=None)


ONE = "one machine"
"""The fastest machine alone with its workers, under plain data parallelism; no other machine takes part."""

PLAIN = "bsp"
"""Plain data parallelism, as PyTorch's DistributedDataParallel."""


def placed(scene: Scene, strategy: str) -> tuple[Scene, str]:
    """The scene in which a strategy runs, and its text as a strategy: `ONE` runs on one machine."""
    return (scene.alone, PLAIN) if strategy == ONE else (scene, strategy)


LEFT_OUT: Mapping[str, str] = {
    "one-shot": "it has no common model before the end",
    "hogbatch": "its seconds are those of hogwild with smaller mini-batches",
    "eamsgd": "its seconds are those of easgd",
    "k-batch-sync": "its seconds are those of k-sync with the restarts of k-batch-async",
    "asysvrg": "a pass over all data belongs to each of its epochs, so its steps are no steps of the others",
    "lbfgs": "its steps are line searches over large batches",
    "gpipe": "1f1b has its seconds and needs less memory",
    "petrowski": "its gradients mix versions of the weights; dure compare shows the effect",
    "chen": "its gradients mix versions of the weights; dure compare shows the effect",
    "spectrain": "its seconds are those of pipedream, with momentum",
    "multi-version": "it trains one version of the model per mini-batch in flight; dure compare shows the effect",
    "ddg": "its seconds are those of pipedream",
    "features-replay": "its gradients come from replayed inputs; dure compare shows the effect",
    "dni": "its gradients are predictions; dure compare shows the effect",
    "neurons": "its messages are single units, for machines without matrix libraries",
    "bf16": "its bytes are those of fp16",
    "ternary": "its vote needs a rate of its own",
    "it-sign": "its vote needs a rate of its own",
    "sign": "its vote needs a rate of its own",
    "fp32": "the default",
    "none": "the default",
}
"""Members that a plan does not propose, with the reason."""

OF_GRADIENTS = f"{PLAIN} strom"
"""The codec whose threshold is for gradients: the bytes of changes of models are not known from those of gradients."""

PERIODS = (4, 8, 16, 32)
CODECS = ("fp16", "int8", "1bit", "top-k", "strom")
MOST_WAYS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a scene on which candidates depend. `per_machine`: workers of a machine."""

    workers: int
    per_machine: int
    one_host: bool
    blocks: int
    batch: int
    has_rows: bool
    accelerated: bool = False


def shape_of(scene: Scene) -> Shape:
    """The shape of `scene`."""
    from dure.partition.blocks import blocks_of

    cluster, job = scene.cluster, scene.job
    try:
        blocks = sum(
            any(each.requires_grad for each in block.parameters())
            for block in blocks_of(job, scene.model.replica.module)
        )
    except DureError:  # a model that cannot be cut
        blocks = 1
    per_machine = min(kind.workers for kind in cluster.machines)
    return Shape(
        scene.workers,
        per_machine,
        cluster.host is not None,
        blocks,
        scene.batch,
        has_rows=job.rows is not None,
        accelerated=cluster.accelerated,
    )


def plain(shape: Shape) -> Iterator[str]:
    """Plain data parallelism, by each all-reduce of the engine: that of accelerators takes a ring or a tree itself."""
    yield PLAIN
    if shape.accelerated and 1 < shape.per_machine < shape.workers:
        yield f"{PLAIN} collective:algorithm=hierarchical"


def sharded(shape: Shape, stages: Sequence[int] = (1, 3)) -> Iterator[str]:
    """Sharded data parallelism over all workers, and where hosts have several, inside each of them.

    Stage 2 has the seconds of stage 1 and needs less memory: `sharded_more` proposes it where stage 1 has no room.
    Stage 3 saves nothing of a model that is one block.
    """
    levels = ("", ",within=host") if 1 < shape.per_machine < shape.workers else ("",)
    for stage in stages:
        if shape.workers > 1 and (stage < 3 or shape.blocks > 1):
            yield from (f"{PLAIN} zero:stage={stage}{level}" for level in levels)


def sharded_more(refused: Sequence[str]) -> Iterator[str]:
    """The candidates of step 2: partitions that have no room, with more of their memory sharded."""
    for text in refused:
        partition = Strategy.parse(text).partition if text.startswith(f"{PLAIN} ") else None
        zero, pipeline, shared = zero_of(partition), pipeline_of(partition), shared_of(partition)
        if zero is not None:
            if zero.stage == 1 and not isinstance(partition, Mesh):
                yield text.replace("stage=1", "stage=2")
        elif shared is not None and pipeline is ONE_STAGE:
            yield from (f"{text}+zero:stage={stage}" for stage in ((1, 3) if shared.in_pipelines else (1,)))
        elif pipeline is not None and pipeline.flushes:
            yield f"{text}+zero:stage=1"


def single(shape: Shape) -> Iterator[str]:
    """The candidates of step 1, the simplest first."""
    yield from plain(shape)
    if shape.workers == 1:
        return
    yield from sharded(shape)
    yield from _topologies(shape)
    yield from _codecs()
    yield from _methods(shape)
    yield from _partitions(shape)


def on_servers(synchronous: str | None, asynchronous: str | None, shape: Shape) -> Iterator[str]:
    """The candidates of step 3, on servers laid out as in the best of `synchronous` and `asynchronous` SGD."""
    k = max(1, shape.workers // 2)
    for method in ("backup", "k-sync"):
        if synchronous is not None:
            yield f"{method} {synchronous}"
    for method in ("ssp:bound=3", f"k-async:k={k}", f"k-batch-async:k={k}", "easgd:period=8"):
        if asynchronous is not None:
            yield f"{method} {asynchronous}"


def crossed(partitions: Sequence[str], methods: Sequence[str], codecs: Sequence[str]) -> Iterator[str]:
    """The candidates of step 4: each partition with each method, each method with each codec."""
    for partition in partitions:
        for method in methods:
            yield f"{method} {partition.removeprefix(PLAIN).strip()}"
    for method in methods:
        for codec in codecs:
            if not (codec == OF_GRADIENTS and traits_of(Strategy.parse(method).sync).messages.changes):
                yield f"{method} {codec.removeprefix(PLAIN).strip()}"


CUTS = ("profile", "parameters", "even")


def narrow(shape: Shape) -> Iterator[str]:
    """The candidates where no other fits into memory: pipelines down to micro-batches of a sample, cut by each rule.

    Those that need least come first: many stages, small micro-batches, activations that are computed again.
    """
    for stages in reversed([*_divisors(shape.workers, shape.blocks)]):
        copy = shape.batch * stages // shape.workers
        doubled = (stages << doubling for doubling in range(copy.bit_length()))
        for micro in (copy, *reversed([each for each in doubled if each < copy])):
            for remat in (",remat=true", ""):
                for cuts in CUTS:
                    yield f"{PLAIN} 1f1b:stages={stages},micro={micro},cuts={cuts}{remat}"


def roomy(shape: Shape) -> Iterator[str]:
    """The candidates where no worker has memory for a whole model: its parameters are sharded, or its layers are split.

    Layers are split inside machines, and their parts are sharded, or pipelines go over the machines. Micro-batches of
    these have one sample. Those that compute activations again come first, as they need least.
    """
    yield from sharded(shape, stages=(3,))
    ways = max(_divisors(shape.per_machine, MOST_WAYS), default=1)
    if 1 < ways < shape.workers:
        yield f"{PLAIN} tensor:ways={ways}+zero:stage=3"
    for remat in (",remat=true", "") if ways > 1 else ():
        for stages in reversed([*_divisors(shape.workers // ways, shape.blocks)]):
            copy = shape.batch * stages * ways // shape.workers
            yield f"{PLAIN} 1f1b:stages={stages},micro={copy},cuts=profile{remat}+tensor:ways={ways}"


def wide(shape: Shape) -> Iterator[str]:
    """The candidates where no other fits into memory: layers split over machines, sharded or in pipelines."""
    for ways in _divisors(shape.workers, MOST_WAYS):
        if ways < shape.workers:
            yield from (f"{PLAIN} tensor:ways={ways}+zero:stage={stage}" for stage in (1, 3))
        if ways > shape.per_machine:
            yield from _both(shape, ways)


def _topologies(shape: Shape) -> Iterator[str]:
    # Of accelerators, `plain` has the engine's collectives, and the others are messages over cores.
    if not shape.accelerated:
        levels = ("hierarchical", "torus") if 1 < shape.per_machine < shape.workers else ()
        for algorithm in ("halving-doubling", "tree", *levels):
            yield f"{PLAIN} collective:algorithm={algorithm}"
    for servers in _servers(shape):
        yield f"{PLAIN} {servers}"
    if shape.has_rows:
        yield f"{PLAIN} hybrid"


def _servers(shape: Shape) -> Iterator[str]:
    yield "ps"
    if shape.workers >= 4:
        yield f"ps:shards={shape.workers // 2}"
    if not shape.one_host:
        yield f"ps:shards={shape.workers},colocated=true"


def _codecs() -> Iterator[str]:
    for codec in CODECS:
        yield f"{PLAIN} {codec}"


def _methods(shape: Shape) -> Iterator[str]:
    for period in PERIODS:
        yield f"averaging:period={period}"
    yield "bmuf:period=16"
    for period in (30, 100):
        yield f"diloco:period={period}"
    for servers in _servers(shape):
        yield f"downpour {servers}"
    yield "ad-psgd"
    if shape.one_host:
        yield "hogwild"


def _partitions(shape: Shape) -> Iterator[str]:
    """One pipeline of each depth and one split of each width first, so that little time suffices for an outline."""
    depths = [(stages, shape.batch * stages // shape.workers) for stages in _divisors(shape.workers, shape.blocks)]
    for stages, copy in depths:
        if 2 * stages <= copy:
            yield _one_f_one_b(stages, 2 * stages)
    for ways in _divisors(shape.workers, MOST_WAYS):
        yield f"{PLAIN} tensor:ways={ways}"
        if ways <= shape.per_machine:
            yield from _both(shape, ways)
    yield f"{PLAIN} one-weird-trick:ways={shape.workers}"
    for stages, copy in depths:
        for micro in (stages, 4 * stages):
            if micro <= copy:
                yield _one_f_one_b(stages, micro)
        yield from _other_pipelines(shape, stages, copy)


def _one_f_one_b(stages: int, micro: int) -> str:
    return f"{PLAIN} 1f1b:stages={stages},micro={micro},cuts=profile"


def _other_pipelines(shape: Shape, stages: int, copy: int) -> Iterator[str]:
    if 2 * stages <= copy:
        yield f"{PLAIN} zero-bubble:stages={stages},micro={2 * stages},cuts=profile"
        if shape.blocks >= 2 * stages:
            yield f"{PLAIN} interleaved:stages={stages},micro={2 * stages},cuts=profile"
        yield f"{PLAIN} pipedream-2bw:stages={stages},micro={2 * stages},cuts=profile"
    yield f"{PLAIN} pipedream:stages={stages},cuts=profile"


def _both(shape: Shape, ways: int) -> Iterator[str]:
    """Pipelines whose layers are split."""
    for stages in _divisors(shape.workers // ways, shape.blocks):
        micro = 2 * stages
        if micro <= shape.batch * stages * ways // shape.workers:
            yield f"{_one_f_one_b(stages, micro)}+tensor:ways={ways}"


def _divisors(number: int, most: int) -> Iterator[int]:
    """The divisors of `number` from 2 to `most`."""
    return (each for each in range(2, min(number, most) + 1) if number % each == 0)
