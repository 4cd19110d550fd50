"""Replicas of a pipeline with a flush are workers with the whole model: the same parameters under every method."""

from __future__ import annotations

import copy
import dataclasses
import shutil

import pytest
import torch
from support import gossip_jobs
from support.chains import LR, chain, flat, play, split, stage_modules
from support.purposes import soaked
from support.real_runs import Trial
from support.runs import Finished, local, resolved, virtual
from support.stage_jobs import job_text
from support.wording import raising
from torch import nn

import dure
from dure.errors import StrategyError, UsageError
from dure.job.job import load_job
from dure.partition.pipeline import Pipeline
from dure.partition.stage import Stage
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.strategy import Strategy, make
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import LogNormal
from dure.sync import CATALOGUE
from dure.sync.base import traits_of

OPTIONS = {"steps": 7, "batch_size": 8, "dtype": "float64", "split": "striped"}
GPIPE = "gpipe:stages=2,micro=2"


def pair(strategy: str, partition: str = GPIPE, stages: int = 2, **options: object) -> tuple[Finished, Finished]:
    """A run of two replicas of a pipeline, and that of two workers without a partition."""
    chosen = {**OPTIONS, **options}
    return (
        virtual("digits-mlp", f"{strategy} {partition}", workers=2 * stages, **chosen),
        virtual("digits-mlp", strategy, workers=2, **chosen),
    )


def distance(one: Finished, other: Finished) -> float:
    return float((one.params - other.params).abs().max())


COLLECTIVE = [
    "bsp collective",
    "averaging:period=3 collective",
    "one-shot collective",
    "easgd:period=2 collective",
    "eamsgd:period=2 collective",
    "bmuf:period=4,overlap=2 collective",
    "diloco:period=3 collective",
    *soaked(
        "averaging:period=2,weights=fisher collective",
        "averaging:period=3,state=average collective",
        "bmuf:period=3 collective",
        "bsp collective:algorithm=tree",
        "averaging:period=2 collective:algorithm=ring",
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_replicas_of_a_pipeline_are_workers_with_the_whole_model(strategy):
    one, other = pair(strategy, optimizer="momentum" if strategy.startswith("averaging") else None)
    assert distance(one, other) < 1e-12


def test_unequal_batches_weigh_the_replicas():
    one, other = pair("averaging:period=3 collective", batch_sizes=(12, 4))
    assert distance(one, other) < 1e-12


@pytest.mark.parametrize("strategy", ["averaging:period=3 collective", "easgd:period=2 ps"])
def test_a_worker_limits_the_norm_of_the_gradient_of_all_stages(strategy):
    one, other = pair(strategy, optimizer="sgd:clip=0.1")
    assert distance(one, other) < 1e-12
    assert distance(one, pair(strategy)[0]) > 1e-3


def test_averaging_after_every_step_is_bsp():
    one, _ = pair("averaging:period=1 collective")
    assert distance(one, pair("bsp collective")[1]) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("averaging:weights=loss collective", "weights=loss uses the loss, and only the last stage knows it"),
        ("averaging:schedule=adaptive collective", "schedule=adaptive uses the loss"),
        ("averaging:schedule=overhead collective", "schedule=overhead measures seconds"),
        ("averaging:pace=time ps", "pace=time counts a worker's steps by its seconds"),
        ("bmuf:fragments=2 collective", "fragments cut the vector of the whole model"),
        ("downpour:warm_start=0.1 ps", "warm_start begins with one worker, and each stage would choose its own"),
        ("backup ps", "it leaves out the last gradients"),
        ("k-sync ps", "it leaves gradients out"),
        ("k-batch-sync ps", "it leaves gradients out"),
        ("k-async ps", "its servers group the gradients that come first"),
        ("k-batch-async ps", "its servers group the gradients that come first"),
        ("ssp ps", "its servers count the lead of each worker"),
        ("hogwild", "its workers share the memory of one model"),
        ("hogbatch", "its workers share the memory of one model"),
        ("asysvrg", "it computes gradients of all samples too"),
        ("lbfgs", "it computes the gradient of a whole batch in portions"),
    ],
)
def test_a_method_that_would_decide_for_each_stage_is_refused(strategy, reason):
    with pytest.raises(StrategyError, match=f"does not run over gpipe:stages=2,micro=2: {reason}") as refused:
        Strategy.parse(f"{strategy} {GPIPE}")
    Strategy.parse(str(refused.value).split('"')[1])  # the nearest that works


def test_every_method_runs_over_stages_or_says_why_not():
    for name in CATALOGUE:
        traits = traits_of(make(name))
        assert traits.staged != bool(traits.reasons.stages), name


def test_a_hybrid_topology_does_not_connect_stages():
    with raising(StrategyError, "collective"):
        Strategy.parse(f"bsp hybrid {GPIPE}")


@pytest.mark.parametrize("kind", ["crash", "join"])
def test_a_pipeline_needs_every_worker(kind):
    cluster = Cluster.uniform(4, events=(Event(at=0.01, kind=kind, worker=1),))
    with pytest.raises(UsageError, match=f"lets worker 1 {kind} at 0.01 s, and .* Leave the event out, or the"):
        resolved("digits-mlp", f"downpour ps {GPIPE}", cluster, workers=4)


SERVERS = [
    "bsp ps:shards=2,colocated=true",
    "averaging:period=3 ps",
    "one-shot ps",
    "easgd:period=2 ps:shards=2",
    "bmuf:period=3 ps",
    "downpour:n_push=2,n_fetch=3 ps:shards=2",
    *soaked(
        "bsp ps",
        "eamsgd:period=2 ps",
        "diloco:period=3 ps",
        "downpour ps",
        "downpour:at_once=true ps",
        "downpour+dc-asgd ps",
        "downpour+staleness-lr ps",
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", SERVERS)
def test_each_stage_has_its_own_servers(strategy):
    """Equal machines, so that the updates of asynchronous methods arrive in the same order in both runs."""
    one, other = pair(strategy, eval_every=3)
    assert distance(one, other) < 1e-12
    assert [row["updates"] for row in one.rows] == [row["updates"] for row in other.rows]
    assert [row["loss"] for row in one.rows] == pytest.approx([row["loss"] for row in other.rows], rel=1e-12)
    for name in ("updates_applied", "updates_refused", "staleness", "samples"):
        assert one.summary[name] == other.summary[name]
    assert len(one.summary["per_shard"]) == 2 * len(other.summary["per_shard"])


@pytest.mark.parametrize("strategy", ["downpour ps", "ad-psgd gossip"])
def test_one_pipeline_is_one_worker(strategy):
    one = virtual("digits-mlp", f"{strategy} {GPIPE}", workers=2, **OPTIONS)
    assert distance(one, virtual("digits-mlp", strategy, workers=1, **OPTIONS)) < 1e-12


# ---- gossip

UNEVEN = Cluster(machines=(Machines(count=6, compute=LogNormal(seconds=0.01, sigma=0.5)),))
GOSSIP = {"sync": "ad-psgd gossip", "replicas": 3, "cluster": UNEVEN, "steps": 12}


@pytest.mark.parametrize("partition", ["gpipe:micro=3", "pipedream"])
def test_gossip_keeps_the_sum_of_the_models_of_each_stage(partition):
    """The mean of all models is the initial one less the rate times the mean of all gradients, whoever averages."""
    played = play(partition, 2, eval_every=4, **GOSSIP)
    sums = torch.cat([torch.stack(gradients).sum(dim=0) for gradients in played.gradients])
    assert [len(gradients) for gradients in played.gradients] == [3 * 12] * 2
    assert float((played.params - (flat(stage_modules(2)) - LR / 3 * sums)).abs().max()) < 1e-12


def test_the_consensus_is_the_distance_of_whole_models():
    strategy = f"ad-psgd gossip {split('gpipe:micro=3', 2)}"
    setup, cluster = resolved(chain(), strategy, UNEVEN, workers=6, on="virtual", steps=12, dtype="float64")
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    segment.run()
    assert min(worker.peer.averaged for worker in segment.workers.values()) > 3
    models = [worker.params for worker in segment.workers.values()]
    whole = torch.stack([torch.cat(models[first : first + 2]) for first in (0, 2, 4)])
    apart = float((whole - whole.mean(dim=0)).square().sum())
    assert segment.whole.history[-1]["consensus"] == pytest.approx((apart / 3) ** 0.5, rel=1e-9)


def test_all_actions_of_a_mini_batch_read_the_same_weights(monkeypatch):
    """A neighbor replaces the parameters at any time, also between two micro-batches."""
    read: dict[tuple[str, int], set[float]] = {}
    present: dict[tuple[str, int], set[float]] = {}

    def reads(rule):
        def noted(pipeline, stage: Stage, batch: int) -> torch.Tensor:
            weights = rule(pipeline, stage, batch)
            read.setdefault((stage.node.name, batch), set()).add(float(weights.sum()))
            present.setdefault((stage.node.name, batch), set()).add(float(stage.requester.params.sum()))
            return weights

        return noted

    monkeypatch.setattr(Pipeline, "forward_reads", reads(Pipeline.forward_reads))
    monkeypatch.setattr(Pipeline, "backward_reads", reads(Pipeline.backward_reads))
    play("gpipe:micro=3", 2, **GOSSIP)
    assert {len(each) for each in read.values()} == {1}
    assert max(len(each) for each in present.values()) > 1


# ---- without a flush


@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_replicas_of_a_delayed_pipeline_step_by_their_mean_gradient(topology):
    """w_k(t + 1) = w_k(t) - lr mean_r grad_k f(x_r(t); w_1(t - 2), w_2(t - 1), w_3(t)) of three stages."""
    steps, job = 8, dataclasses.replace(chain(), split=load_job("digits-mlp", split="striped").split)
    played = play("pipedream", 3, sync=f"bsp {topology}", replicas=2, job=job, steps=steps)
    samplers = job.samplers([job.batch_size] * 2, seed=0)
    versions = [stage_modules(3)]
    for t in range(steps):
        after = copy.deepcopy(versions[t])
        for sampler in samplers:
            read = [copy.deepcopy(versions[max(0, t - 2 + k)][k]) for k in range(3)]
            inputs, targets = job.train.batch(sampler.next())
            found = torch.autograd.grad(
                job.loss(nn.Sequential(*read)(inputs), targets), [each for stage in read for each in stage.parameters()]
            )
            for parameter, gradient in zip((p for stage in after for p in stage.parameters()), found, strict=True):
                parameter.data.sub_(gradient, alpha=LR / 2)
        versions.append(after)
    assert float((played.params - flat(versions[-1])).abs().max()) < 1e-12


# ---- on the way


def test_the_rate_grows_with_the_copies_of_the_model():
    one, other = pair("bsp collective", scale_lr=True)
    assert one.setup.job.optimizer == other.setup.job.optimizer


@pytest.mark.parametrize("strategy", ["downpour ps", "easgd ps", "ad-psgd gossip"])
def test_tied_parameters_need_a_synchronous_method(strategy):
    with raising(StrategyError, "asynchronous"):
        resolved(job_text("tied"), f"{strategy} gpipe:stages=3", workers=6, on="virtual")
    resolved(job_text("tied"), "bsp ps gpipe:stages=3", workers=6, on="virtual")


def test_servers_of_tied_parameters_get_them_as_they_are():
    with raising(StrategyError, "servers"):
        resolved(job_text("tied"), "bsp ps int8 gpipe:stages=3", workers=6, on="virtual")
    ties = {}
    for strategy in ("bsp ps", "averaging:period=2 ps"):
        run = virtual(job_text("tied"), f"{strategy} gpipe:stages=3", workers=6, steps=4, dtype="float64")
        alone = virtual(job_text("tied"), strategy, workers=2, steps=4, dtype="float64")
        ties[strategy] = distance(run, alone)
    assert max(ties.values()) < 1e-12


RESUMED = [
    "averaging:period=3 collective",
    "easgd:period=2 ps:shards=2",
    "bmuf:period=3,overlap=1 collective",
    "ad-psgd gossip",
    *soaked(
        "bsp ps:shards=2",
        "one-shot ps",
        "eamsgd:period=3 collective",
        "averaging:period=3 ps",
        "diloco:period=3 ps",
        "downpour:n_push=2,n_fetch=3 ps:shards=2",
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("partition", [GPIPE, *soaked("pipedream:stages=2")])
@pytest.mark.parametrize("strategy", RESUMED)
def test_resumed_is_uninterrupted(strategy, partition, tmp_path):
    kinds = (Machines(count=4, compute=LogNormal(seconds=0.01, sigma=0.4)),)
    on = Cluster(machines=kinds, unfairness=0.3)
    options = {"strategy": f"{strategy} {partition}", "steps": 7, "batch_size": 8, "optimizer": "momentum"}
    whole = dure.train("digits-mlp", on=on, out=tmp_path / "whole", checkpoint_every=4, eval_every=3, **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (tmp_path / "killed" / "summary.json").unlink()
    resumed = dure.train("digits-mlp", on=on, resume=tmp_path / "killed")
    facts = [{**run.summary(), "batching": None, "evaluation_seconds": None} for run in (resumed, whole)]
    assert facts[0] == facts[1]
    assert list(resumed.history) == list(whole.history)


# ---- on processes


@pytest.mark.long
def test_servers_on_processes_are_the_virtual_ones_also_after_a_failure(fork_server, tmp_path):
    """All stages go back to the checkpoint together, so that no step is lost and none is made twice."""
    options = {"workers": 4, "steps": 60, "eval_every": 20, "checkpoint_every": 20, "seed": 3}
    strategy = "bsp ps pipedream:stages=2"
    config = TrainConfig(
        job=job_text("slow"), strategy=strategy, on="local", out=tmp_path / "here", optimizer="momentum", **options
    )
    killed = []

    def kill(trial):
        saved = (tmp_path / "here" / "checkpoints" / "step-20").exists()
        if saved and not killed:
            killed.append(trial.driver)
            trial.kill("server 1")  # that of the second stage

    trial = Trial(config)
    really = trial.run(kill, fork_server=fork_server)
    there = virtual(job_text("slow"), strategy, optimizer="momentum", out=tmp_path / "there", **options)
    assert torch.equal(really.params, there.params)
    assert [(row["step"], row["loss"]) for row in really.history] == [(row["step"], row["loss"]) for row in there.rows]
    for name in ("samples", "updates_applied"):
        assert really.totals.counts[name] == there.outcome.totals.counts[name], name
    assert (len(trial.drivers), really.totals.failures_survived) == (2, 1)


@pytest.mark.long
def test_an_asynchronous_method_on_processes(fork_server):
    """One worker makes its updates in order, whatever the order of stages in time."""
    one = local(
        "digits-mlp",
        f"downpour:n_push=2,n_fetch=2 ps {GPIPE}",
        workers=2,
        fork_server=fork_server,
        **{**OPTIONS, "eval_every": 2},
    )
    other = virtual("digits-mlp", "downpour:n_push=2,n_fetch=2 ps", workers=1, **OPTIONS)
    assert distance(one, other) < 1e-12
    assert (one.rows[-1]["step"], one.rows[-1]["updates"], one.summary["updates_applied"]) == (7, 7, 4)


@pytest.mark.long
def test_gossip_on_processes(fork_server):
    """f = -b v - b w has the gradient -b everywhere, so each stage's mean is start + lr x steps x mean of b."""
    job = f"{gossip_jobs.__file__}:blocks"
    run = local(
        job, "ad-psgd gossip gpipe:stages=2,micro=1", workers=4, steps=100, eval_every=40, fork_server=fork_server
    )
    mean = sum(gossip_jobs.PUSHES[:2]) / 2
    assert run.params.tolist() == pytest.approx([1.0 + 0.25 * 100 * mean] * 2, rel=1e-12)
    assert run.rows[-1]["updates"] == 200
