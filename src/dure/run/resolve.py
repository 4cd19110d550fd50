"""Resolves a configuration to the set-up of its run: once per run, in the process that checks it.

`resolve` fills in every option that was left out and checks the result. A process of the same run gets the resolved
values (`Setup.plain`); `rebuild` only builds the job and the strategy from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dure.core.accelerator_cost import ALL_REDUCES
from dure.core.text import quoted
from dure.errors import ClusterError, StrategyError, UsageError
from dure.job.companions import Companions
from dure.job.data.split import IID, Striped
from dure.job.job import Job, dtype_named, load_job
from dure.job.names import may_have_companions
from dure.job.rates import scaled
from dure.partition.blocks import refuse_ties
from dure.partition.cut import ANY, Speeds, is_by_profile
from dure.partition.mesh import parts_of, pipeline_of, shared_of, zero_of
from dure.partition.pipeline import Pipeline
from dure.partition.profile import BlockTimes
from dure.partition.programmed import Programmed
from dure.partition.schedule import Orders, check
from dure.partition.shared_layers import SharedLayers
from dure.partition.whole import Whole
from dure.run.config import TrainConfig, WorkerRange
from dure.run.devices import AUTO, CPU, check_use, devices_of, first_of
from dure.run.memory import check_worker_memory
from dure.run.places import is_started_outside, takes_address
from dure.run.prebuilt import Prebuilt
from dure.run.setup import BY_ENGINE, Setup, check_rates
from dure.run.step_shape import referred, speed_of
from dure.run.strategy import Strategy, check_codec_name, member_text
from dure.runtime.launch.rendezvous import RankEnvironment, place
from dure.runtime.virtual.cluster import Cluster
from dure.sync.base import OfEpochs, server_rule_of, traits_of

if TYPE_CHECKING:
    from dure.run.stages import Stages


EVALUATIONS = 20
"""Evaluations of a run without `eval_every`."""

ENDLESS = 10**9
"""Steps of a run that only `seconds` limits."""

EVALUATE_EVERY = 50
"""Steps between evaluations of a run that only `seconds` limits."""

EVALUATE_EPISODES_EVERY = 1000
"""The same for a job that is graded by whole episodes."""

CHECKED = 4
"""Mini-batches for each stage in which the orders of a pipeline are checked: they fill it, repeat, and drain it."""


def resolve(config: TrainConfig, prebuilt: Prebuilt = Prebuilt()) -> tuple[Setup, Cluster | None]:
    """Make the set-up that `config` describes, and the virtual cluster if it asks for one. Raises `UsageError`."""
    _check_place(config)
    strategy = prebuilt.strategy or config.chosen()
    loaded = _load(config) if prebuilt.job is None and config.job and may_have_companions(config.job) else prebuilt.job
    companions = None if loaded is None else loaded.companions
    if loaded is not None and companions is not None:
        check_options(config, strategy, loaded.name)
        sizes = config.batch_sizes or (config.batch_size or loaded.batch_size,)
        companions.check(config.most_workers or 1, max(sizes))
    cluster = prebuilt.cluster or asked_cluster(config, companions)
    workers = workers_of(config, cluster, companions)
    parts = check_without_job(config, strategy, workers)
    given = _load(config) if loaded is None else loaded
    job = _build_job(config, strategy, workers // parts, given if prebuilt.job is None else _adjusted(given, config))
    whole = config.batch_sizes or (job.batch_size,) * (workers // parts)
    if isinstance(strategy.sync, OfEpochs):
        strategy = replace(strategy, sync=strategy.sync.with_epoch(job.train.steps(1.0, sum(whole))))
    sizes = _of_partition(pipeline_of(strategy.partition), whole)
    least = workers if config.elastic is None else config.elastic.least
    steps = _steps(config, job, sum(sizes[:least]), sum(whole))
    every = config.eval_every or (max(1, steps // EVALUATIONS) if steps < ENDLESS else _often(companions))
    absent = cluster.absent if cluster is not None else frozenset(range(least, workers))
    here = place() if is_started_outside(config.on) else None
    local_rank = None if here is None else here.local_rank
    machines = _machines(workers, cluster, here)
    asked = CPU if config.device is None or (config.timing_only and config.device == AUTO) else config.device
    look = partial(devices_of, virtual=config.virtual, local_rank=local_rank)
    devices = (first_of if takes_address(config.on) else look)(asked, workers)
    device = devices[0] if config.virtual else CPU
    timed = None if cluster is None else referred(cluster, job)
    speeds = _speeds(timed, job, strategy.partition, machines, sizes, prebuilt.times)
    by_engine = frozenset(ALL_REDUCES) if cluster is not None and cluster.accelerated else BY_ENGINE
    setup = Setup(
        config, job, strategy, workers, machines, sizes, steps, every, absent, devices, device, speeds, by_engine
    )
    if prebuilt.model is not None:
        setup.__dict__["model"] = prebuilt.model
    _check(setup, cluster)
    return setup, cluster


def _often(companions: Companions | None) -> int:
    return EVALUATE_EVERY if companions is None else EVALUATE_EPISODES_EVERY


def rebuild(values: Mapping[str, Any]) -> Setup:
    """Make the set-up of a real run in another of its processes from `Setup.plain()`: its values are final."""
    config, strategy = TrainConfig.of(values["config"]), Strategy.of(**values["strategy"])
    workers, machines, sizes = values["workers"], tuple(values["machines"]), tuple(values["batch_sizes"])
    job = _build_job(config, strategy, workers // _parts(strategy, workers), _load(config))
    steps, every, devices = values["steps"], values["eval_every"], tuple(values["devices"])
    absent = frozenset(values["absent"])
    return Setup(config, job, strategy, workers, machines, sizes, steps, every, absent, devices=devices)


def _load(config: TrainConfig) -> Job:
    """Load the job, with its batch size, its split and its dtype."""
    return load_job(config.job, config.data, batch_size=config.batch_size, split=config.split, dtype=config.dtype)


def _build_job(config: TrainConfig, strategy: Strategy, copies: int, job: Job) -> Job:
    """Set the optimizer of `job` to that of a run of `copies` of the model."""
    averaged = server_rule_of(strategy.sync).averaged(copies)
    local = traits_of(strategy.sync).local_optimizer
    if config.optimizer is None and local is not None:
        job = job.adjusted(optimizer=local)
    job = job.adjusted(optimizer=config.optimizer_over(job.optimizer, averaged))
    if job.groups is not None and config.scale_lr:
        job = job.adjusted(groups=scaled(job.groups, averaged))
    return job


def _adjusted(job: Job, config: TrainConfig) -> Job:
    given: dict[str, Any] = {"batch_size": config.batch_size, "split": config.split}
    adjusted = job.adjusted(**{name: value for name, value in given.items() if value is not None})
    return adjusted if config.dtype is None else adjusted.to(dtype_named(config.dtype))


def asked_cluster(config: TrainConfig, companions: Companions | None = None) -> Cluster | None:
    """The virtual cluster that `config` asks for; None for a real run. Raises `ClusterError`."""
    if not config.virtual:
        return None
    if config.on != "virtual":
        return Cluster.described(config.on)
    return Cluster.uniform(
        config.most_workers or 4 if companions is None else (config.most_workers or 1) + companions.machines
    )


def _check_place(config: TrainConfig) -> None:
    """Raise `UsageError` for a run that its place cannot have. In an elastic run the launcher starts the processes."""
    if config.reserve is not None and not takes_address(config.on):
        raise UsageError(f'reserve="{config.reserve}" is for --on ray, and --on is {config.on}. Leave it out.')
    if config.preemption_notice is not None and (config.virtual or is_started_outside(config.on)):
        raise UsageError(
            f"preemption_notice={config.preemption_notice} is for a real run whose processes dure starts, and --on is "
            f"{config.on}. Leave it out; under torchrun, send SIGTERM to its agent."
        )
    if config.elastic is not None and (config.virtual or is_started_outside(config.on)):
        raise UsageError(
            f"--workers {config.elastic} is for a real run whose processes dure starts, and --on is {config.on}. Give "
            f"one number, such as --workers {config.most_workers}, or use --on local."
        )


def workers_of(config: TrainConfig, cluster: Cluster | None, companions: Companions | None = None) -> int:
    """The number of workers. Raises `UsageError` if `config` asks for others than the cluster has."""
    if companions is not None:
        return _learners(config, cluster, companions)
    if cluster is None:
        return config.most_workers or 4
    if config.workers is not None and config.workers != cluster.workers:
        raise UsageError(
            f"--workers {config.workers} was asked for, and the cluster has {cluster.workers}. "
            "Leave --workers out, or describe machines with as many workers."
        )
    return cluster.workers


def _learners(config: TrainConfig, cluster: Cluster | None, companions: Companions) -> int:
    """The number of workers of a job with companions, 1 if left out."""
    workers = config.most_workers or 1
    needed = workers + companions.machines
    if cluster is not None and cluster.workers != needed:
        raise UsageError(
            f"the cluster describes {cluster.workers} machines, and the run needs {needed}: {workers} for learners, "
            f"then {companions.machines} for actors. Describe as many, or give other numbers of both."
        )
    return workers


def check_without_job(config: TrainConfig, strategy: Strategy, workers: int) -> int:
    """Check the options that need no job; returns the number of workers that hold one copy of the model.

    Raises `UsageError` for a number of workers that does not suit the strategy or the options.
    """
    parts, given, fewest = _parts(strategy, workers), config.batch_sizes, traits_of(strategy.sync).fewest
    if given and len(given) != workers // parts:
        holders, each = ("workers", "worker") if parts == 1 else ("copies of the model", "copy")
        raise UsageError(f"batch_sizes gives {len(given)} sizes for {workers // parts} {holders}. Give one per {each}.")
    if workers < fewest:
        raise UsageError(
            f'"{strategy}" needs at least {fewest} workers, and there are {workers}. Use that many, a smaller number '
            f'in "{member_text("sync", strategy.sync)}", or another method.'
        )
    if config.timing_only and not config.virtual:
        raise UsageError("timing_only is for virtual time, and this run is real. Use --on virtual, or leave it out.")
    return parts


def _parts(strategy: Strategy, workers: int) -> int:
    """The number of workers that hold one copy of the model. Raises `UsageError` where `workers` are no multiple."""
    pipeline, shared = pipeline_of(strategy.partition), shared_of(strategy.partition)
    if pipeline is None:
        return 1
    parts = parts_of(strategy.partition)
    if workers % parts:
        number = "stages" if shared is None else "ways" if isinstance(strategy.partition, SharedLayers) else "parts"
        raise UsageError(
            f"{strategy.text()['partition']} needs {parts} workers for each copy of the model, and there are "
            f"{workers}. Use {parts * max(1, workers // parts)} workers, or another number of {number}."
        )
    return parts


def _machines(workers: int, cluster: Cluster | None, here: RankEnvironment | None) -> tuple[int, ...]:
    """The machine of each worker. A launcher starts as many ranks in a row on each machine as on this one."""
    if cluster is not None:
        places = cluster.placed({str(rank): rank for rank in range(workers)})
        return tuple(cluster.machine_of(place) for place in places.values())
    local = workers if here is None else here.local_size
    return tuple(rank // local for rank in range(workers))


def _speeds(
    cluster: Cluster | None,
    job: Job,
    partition: Any,
    machines: Sequence[int],
    sizes: Sequence[int],
    times: BlockTimes | None,
) -> Speeds:
    """The speeds of worker 0, and for cuts by a profile of the slowest link between two stages of a cluster."""
    pipeline, shared, zero = pipeline_of(partition), shared_of(partition), zero_of(partition)
    by_blocks = zero is not None and zero.stage == 3
    if cluster is None or (pipeline is None and not by_blocks):
        return ANY
    compute = cluster.machines[0].compute
    seconds = compute.mean(job.flops_per_sample * sizes[0])
    call = compute.of_call / seconds
    device = partial(speed_of, cluster, job) if cluster.accelerated else None
    if pipeline is None or not is_by_profile(pipeline.cuts):
        return Speeds(seconds, call=call, times=times, device=device)
    line = machines[:: 1 if shared is None else shared.ways]
    borders = [(here, there) for n, (here, there) in enumerate(pairwise(line)) if (n + 1) % pipeline.stages]
    bandwidths = [
        cluster.inside_of(here).bandwidth if here == there else cluster.bandwidth(here, there)
        for here, there in borders
    ]
    return Speeds(seconds, min(bandwidths, default=math.inf), call, times, device)


def _of_partition(partition: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The mini-batch sizes with which a partition works where `sizes` are asked for."""
    return tuple(map(partition.batch_size, sizes)) if isinstance(partition, Pipeline) else tuple(sizes)


def _steps(config: TrainConfig, job: Job, batch: int, asked: int) -> int:
    """The steps of a run with `batch` samples in a step of all workers. A job's own steps are those for `asked`."""
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None:
        limits.append(job.train.steps(config.epochs, batch))
    if config.seconds is not None and not limits:
        return ENDLESS
    return min(limits) if limits else math.ceil(job.steps * asked / batch)


def _check_pipeline(setup: Setup, pipeline: Pipeline) -> None:
    """Raise `UsageError` for a run that a pipeline cannot make."""
    text, least = setup.strategy.text()["partition"], min(setup.batch_sizes)
    if pipeline.micro_batches > least:
        raise UsageError(
            f"{text} divides a mini-batch into {pipeline.micro_batches} micro-batches, "
            f"and a mini-batch has {least} samples. Write micro={least} or less, or raise --batch-size."
        )
    if setup.config.seconds is not None:
        raise UsageError(
            f"{text} cannot end after {setup.config.seconds:g} seconds: its stages stop after the same mini-batch, "
            "which they know before they begin it. Give --steps or --epochs in place of --seconds."
        )
    pipeline.check_optimizer(setup.job.optimizer)
    assert setup.stages is not None
    pipeline.check_layout(setup.stages.layout)
    if not isinstance(pipeline, Programmed):
        checked = min(setup.steps, CHECKED * pipeline.stages)
        check(Orders.of(pipeline, range(checked)))
        if setup.config.checkpoint_every:
            check(Orders.of(pipeline, range(checked, 2 * checked)))  # after a drain, an order begins later


def _check_events(setup: Setup, cluster: Cluster) -> None:
    """Raise `UsageError` if a worker crashes or joins in a run that needs every worker all the time."""
    remedy = "Leave the event out, or take a method over servers, such as bsp with --topology ps."
    if setup.stages is not None and setup.topology.needs_everybody:
        remedy = (
            "Leave the event out, or the partition, and take a method over servers, such as bsp with --topology ps."
        )
    elif setup.stages is not None:
        remedy = "Leave the event out, or the partition."
    elif not setup.topology.needs_everybody:
        return
    for event in cluster.events:
        if event.kind in ("crash", "join") and event.worker < setup.workers:
            raise UsageError(
                f"the cluster lets worker {event.worker} {event.kind} at {event.at:g} s, and {setup.strategy} "
                f"needs every worker all the time. {remedy}"
            )


def _check_elastic(setup: Setup, elastic: WorkerRange) -> None:
    """Raise `UsageError` for a run whose number of workers cannot change."""
    config, text, fixed = setup.config, setup.strategy.text(), f"Give one number, such as --workers {elastic.most}"
    if setup.job.companions is not None:
        raise UsageError(f"--workers {elastic} leases mini-batches, and {setup.job.name} has no data set. {fixed}.")
    if setup.stages is not None or setup.topology.needs_everybody:
        raise UsageError(
            f"--workers {elastic}: {setup.strategy} needs every worker all the time. {fixed}, or take a method over "
            "servers, such as downpour, or bsp with --topology ps."
        )
    if setup.traits.chooses_samples:
        raise UsageError(f"--workers {elastic} leases mini-batches, and {text['sync']} chooses its samples. {fixed}.")
    if config.batch_sizes:
        raise UsageError(f"--workers {elastic} leases mini-batches of one size. Give --batch-size for --batch-sizes.")
    if not isinstance(setup.job.split, IID | Striped):
        raise UsageError(
            f"--workers {elastic} leases the samples to whoever is there, and the split {setup.job.split} ties them to "
            "workers. Use --split iid."
        )


def _check(setup: Setup, cluster: Cluster | None) -> None:
    if setup.config.elastic is not None:
        _check_elastic(setup, setup.config.elastic)
    check_use(setup.devices, timing_only=setup.config.timing_only)
    pipeline = pipeline_of(setup.strategy.partition)
    if pipeline is not None:
        _check_pipeline(setup, pipeline)
    setup.topology.check()
    check_clip(setup)
    if setup.job.accumulate > 1:
        _check_accumulation(setup)
    if setup.stages is not None:
        check_ties(setup, setup.stages)
        if setup.job.recompute and setup.stages.pipeline.remat:
            raise UsageError(
                f"the job computes the forward of each block again (recompute=true), and {setup.strategy} that of each "
                "stage (remat=true): leave one of them out."
            )
    for name in cluster.codecs if cluster is not None else ():
        _check_costs(name)
    if cluster is not None:
        _check_events(setup, cluster)
        check_worker_memory(setup, cluster)
    if not setup.config.timing_only:
        check_rates(setup)
    if setup.topology.clocked:
        setup.server_side.optimizer(setup.job.optimizer)  # its error is raised now, not by a server


def _check_costs(name: str) -> None:
    """Raise `ClusterError` if the cluster gives costs of a codec that does not exist."""
    try:
        check_codec_name(name)
    except StrategyError as error:
        raise ClusterError(f"codecs: the cluster has the costs of a codec {quoted(name)}: {error}") from error


def _check_accumulation(setup: Setup) -> None:
    """Raise `UsageError` where a worker has no memory of its own for the sum of several whole gradients."""
    accumulate, zero = setup.job.accumulate, setup.zero
    if zero is not None and zero.stage > 1 and setup.parts == 1:
        raise UsageError(
            f"accumulate={accumulate} sums the whole gradients of {accumulate} mini-batches at each worker, and "
            f"zero:stage={zero.stage} keeps a part of one: leave accumulate out, or use zero:stage=1."
        )
    if setup.stages is not None:
        raise UsageError(
            f"accumulate={accumulate} is for workers with the whole model, and {setup.strategy} splits it: leave it "
            "out. A pipeline has micro-batches of its own, as in 1f1b:stages=2,micro=8."
        )


LARGE = 2**31
"""Steps of an epoch that no method has for its own."""


def check_options(config: TrainConfig, strategy: Strategy, name: str) -> None:
    """Raise `UsageError` for an option, or a part of `strategy`, that the job `name` cannot have."""
    sync = strategy.sync
    if not isinstance(strategy.partition, Whole):
        raise UsageError(
            f"{name} learns from a replay, and each of its workers holds a whole model: "
            f"{strategy.text()['partition']} would divide it. Use the partition none."
        )
    if traits_of(sync).chooses_samples:
        raise UsageError(
            f"{member_text('sync', sync)} asks for the gradient of samples that it chooses, and the replay of {name} "
            "chooses them. Use another method, such as bsp or downpour."
        )
    if isinstance(sync, OfEpochs) and sync.with_epoch(LARGE) != sync:
        raise UsageError(f"{member_text('sync', sync)} counts epochs, and {name} has none. Use a fixed schedule.")
    if config.timing_only:
        raise UsageError(
            f"timing_only computes no gradients, and the actors of {name} need a model that learns. Leave it out."
        )
    for option, advice in (("epochs", "Give steps or seconds"), ("split", "Leave it out")):
        if getattr(config, option) is not None:
            raise UsageError(f"{option} is for a job with a data set, and {name} has none. {advice}.")


def check_clip(setup: Setup) -> None:
    """Raise `StrategyError` for a limit of the norm where no worker knows the gradient of the whole model."""
    clip, text = setup.job.optimizer.clip, setup.strategy.text()
    if clip is None:
        return
    over_servers = setup.topology.servers > 0 and not setup.server_side.own_rule
    if over_servers or setup.coordinated:
        raise StrategyError(
            f"clip={clip:g} limits the norm of the gradient of the whole model, and with {text['sync']} over "
            f"{text['topology']} each server applies gradients of its own part of the model. Leave clip out, or use "
            "bsp over collective."
        )
    if setup.stages is not None and not setup.stages.pipeline.flushes:
        raise StrategyError(
            f"clip={clip:g} limits the norm of the gradient over all stages, and the stages of {text['partition']} "
            "update at different times. Leave clip out, or use a pipeline that flushes, such as gpipe or 1f1b."
        )


def check_ties(setup: Setup, stages: Stages) -> None:
    """Raise `StrategyError` for parameters in several stages if a codec or the method makes their copies different."""
    copies = [held for each in stages.layout.held for held in each if not held.first]
    ties, text = [held for each in stages.layout.held for held in each if held.tied] or copies, setup.strategy.text()
    if not setup.synchronous:
        refuse_ties("an asynchronous method", stages.layout.tied, "a synchronous one, such as bsp")
        if copies:
            raise StrategyError(
                f"the parameter {copies[0].name!r} is whole at all workers that share layers by {text['partition']}, "
                f"and {text['sync']} over {text['topology']} updates it at each of them at a time of its own, so the "
                "copies would differ. Use a synchronous method, such as bsp."
            )
    changes = setup.traits.messages.changes
    if setup.codec is None or not ties or not (changes or setup.topology.servers):
        return
    what = "the change of each stage's model" if changes else "what each stage sends to its servers"
    raise StrategyError(
        f"{text['codec']} encodes {what}, and several workers have copies of the parameter {ties[0].name!r}, which "
        "would become different. Use fp32, other cuts, or bsp over collective, which encodes gradients."
    )
