"""Replicas of a pipeline with a flush are workers with the whole model: the same parameters under every method."""

from __future__ import annotations

import pytest
import torch
from support.chains import LR, chain, flat, play, split, stage_modules
from support.runs import Finished, resolved, virtual
from support.soak import soaked

from dure.errors import StrategyError
from dure.partition.pipeline import Pipeline
from dure.partition.stage import Stage
from dure.run.callbacks import Callbacks
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import LogNormal

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


@pytest.mark.parametrize("strategy", COLLECTIVE)
def test_replicas_of_a_pipeline_are_workers_with_the_whole_model(strategy):
    one, other = pair(strategy, optimizer="momentum" if strategy.startswith("averaging") else None)
    assert distance(one, other) < 1e-12


def test_unequal_batches_weigh_the_replicas():
    one, other = pair("averaging:period=3 collective", batch_sizes=(12, 4))
    assert distance(one, other) < 1e-12


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
        ("backup ps", "it decides on each gradient"),
        ("k-sync ps", "it decides on each gradient"),
        ("lbfgs ps", "it decides on each gradient"),
    ],
)
def test_a_method_that_would_decide_for_each_stage_is_refused(strategy, reason):
    with pytest.raises(StrategyError, match=f"does not run over gpipe:stages=2,micro=2: {reason}"):
        Strategy.parse(f"{strategy} {GPIPE}")


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
