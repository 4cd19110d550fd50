"""One of several alike replicas stands for all."""

import dataclasses

import pytest

from dure.job.job import load_job
from dure.planner import timing
from dure.planner.candidates import Scene
from dure.planner.timing import simulated_workers
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.runtime.virtual.fabric import Racks

COMPUTE = Constant(flops_per_second=1e9, overhead=1e-3)
IN_STEP = (
    "bsp",
    "averaging:period=4",
    "diloco:period=4",
    "bmuf:period=4",
    "bsp gpipe:stages=2,micro=4",
    "bsp 1f1b:stages=2,micro=4",
    "bsp pipedream-2bw:stages=2,micro=2",
    "bsp tensor:ways=2",
    "bsp pipedream:stages=2",
    "bsp zero:stage=1",
    "bsp zero:stage=3",
    "bsp zero:stage=1,within=2",
    "bsp zero:stage=3,within=4",
    "bsp 1f1b:stages=2,micro=4+zero:stage=1",
)


def scene(count=8, **kind):
    machines = Machines(**{"count": count, "compute": COMPUTE, **kind})
    return Scene(load_job("digits-mlp"), Cluster(machines=(machines,)), batch=128)


@pytest.mark.parametrize("strategy", IN_STEP)
def test_one_replica_has_the_figures_of_all(monkeypatch, strategy):
    _same_figures(monkeypatch, scene(), strategy)


def test_one_replica_of_a_split_pipeline_has_the_figures_of_all(monkeypatch):
    here = scene(4, workers=2)
    text = "char-gpt:width=32,layers=2,heads=2,context=16"
    _same_figures(monkeypatch, Scene(load_job(text), here.cluster, batch=16), "bsp 1f1b:stages=2,micro=2+tensor:ways=2")


@pytest.mark.parametrize("strategy", ["bsp", "averaging:period=4"])
def test_one_of_whole_models_on_machines_that_they_share_has_the_figures_of_all(monkeypatch, strategy):
    _same_figures(monkeypatch, scene(4, workers=2), strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        "bsp",
        "bsp collective:algorithm=hierarchical",
        "averaging:period=4",
        "bsp 1f1b:stages=2,micro=4",
        "bsp tensor:ways=2",
        "bsp zero:stage=1,within=host",
        "bsp zero:stage=3,within=host",
    ],
)
def test_one_of_several_accelerators_has_the_figures_of_all(monkeypatch, strategy):
    _same_figures(monkeypatch, scene(2, gpus=4), strategy)


def _same_figures(monkeypatch, here, strategy):
    setup = timing.setup_in(here, strategy)
    assert simulated_workers(setup, here.cluster) == setup.parts < here.workers
    one = timing.timed(here, strategy)
    monkeypatch.setattr(timing, "simulated_workers", lambda setup, cluster: setup.workers)
    whole = timing.timed(here, strategy)
    assert one.bytes_per_step == pytest.approx(whole.bytes_per_step, rel=1e-3)  # segments of a ring are unequal
    assert one.shares == pytest.approx(whole.shares, rel=1e-9)
    assert one.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert dataclasses.replace(one, seconds=0, samples_per_second=0, bytes_per_step=0, shares={}) == (
        dataclasses.replace(whole, seconds=0, samples_per_second=0, bytes_per_step=0, shares={})
    )


@pytest.mark.parametrize(
    "strategy", ["bsp ps:shards=2", "downpour ps", "ad-psgd", "bsp 1bit", "bsp collective:algorithm=tree"]
)
def test_replicas_that_send_each_other_messages_are_all_simulated(strategy):
    here = scene()
    assert simulated_workers(timing.setup_in(here, strategy), here.cluster) == 8


UNEQUAL = {
    "speeds": scene(speed=(1.0,) * 7 + (0.5,)),
    "random": scene(compute=LogNormal(flops_per_second=1e9)),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_replicas_on_unequal_machines_are_all_simulated(name):
    here = UNEQUAL[name]
    assert simulated_workers(timing.setup_in(here, "bsp"), here.cluster) == 8


def test_replicas_of_which_one_slows_down_are_all_simulated():
    cluster = scene().cluster
    slow = cluster.changed(events=(Event(at=1, kind="slow", worker=3, factor=2),))
    assert simulated_workers(timing.setup_in(scene(), "bsp"), slow) == 8


def test_whole_models_are_alike_on_machines_that_they_share():
    """They send no messages but those of the engine's collectives."""
    here = scene(4, workers=2)
    assert simulated_workers(timing.setup_in(here, "bsp"), here.cluster) == 1


def test_parts_of_models_that_share_a_card_are_all_simulated():
    here = scene(2, workers=4)
    assert simulated_workers(timing.setup_in(here, "bsp 1f1b:stages=2,micro=4"), here.cluster) == 8


def test_replicas_that_share_uplinks_are_all_simulated():
    """Stages of a replica in two racks send messages over uplinks that other replicas use; whole models send none."""
    here = scene()
    racked = here.on(here.cluster.changed(racks=Racks(machines=3, oversubscription=4)))
    assert simulated_workers(timing.setup_in(racked, "bsp gpipe:stages=2,micro=4"), racked.cluster) == 8
    assert simulated_workers(timing.setup_in(racked, "bsp"), racked.cluster) == 1


def test_whole_machines_of_one_replica_are_alike():
    """Its workers share the card of their machine with each other alone."""
    here = scene(4, workers=2)
    assert simulated_workers(timing.setup_in(here, "bsp 1f1b:stages=2,micro=4"), here.cluster) == 2
