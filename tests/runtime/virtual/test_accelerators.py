"""Machines of accelerators in a cluster: their keys, their links, and steps whose seconds have closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import yaml
from support.wording import raising
from torch import nn

import dure
from dure.errors import ClusterError
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.planner.candidates import Scene
from dure.planner.timing import timed
from dure.runtime.virtual.accelerators import AcceleratorEngine, Card, InsideLink, slowest_of
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network

BARE = AcceleratorEngine(library="at-end", contention=0, spread=0, start=0)


def cluster(count=2, gpus=4, *, seconds=0.1, engine=BARE, link="100 Gbit/s", **kind):
    machines = Machines(**{"count": count, "gpus": gpus, "compute": Constant(seconds=seconds), **kind})
    return Cluster(machines=(machines,), engine=engine, link=Link(bandwidth=link))


def test_machines_with_another_device_have_its_memory_unless_they_state_their_own():
    kind = Machines(gpus=8, gpu="v100-sxm2-16gb")
    assert kind.changed(gpu="a100-sxm4-80gb") == Machines(gpus=8, gpu="a100-sxm4-80gb")
    assert kind.changed(gpu="a100-sxm4-80gb", memory="40 GB").memory == 40 * 10**9
    assert kind.changed(count=2).memory == 16 * 2**30
    stated = Machines(gpus=8, gpu="v100-sxm2-16gb", memory="12 GB")
    assert stated.changed(gpu="a100-sxm4-80gb").memory == 12 * 10**9


def test_gpus_are_workers_and_a_file_reads_back():
    given = cluster(4, 8, inside=InsideLink(kind="mesh"), card=Card(count=4, transport="tcp"))
    assert given.workers == 32
    text = given.to_yaml()
    assert "workers" not in yaml.safe_load(text)["machines"][0]
    assert Cluster(**yaml.safe_load(text)) == given
    assert given.machines[0].changed(count=2).workers == 8
    assert given.machines[0].with_workers(2).gpus == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"machines": [{"gpus": 2, "workers": 2}]}, "machines[0].workers: gpus: 2 is the number of workers"),
        ({"machines": [{"gpus": 2}, {"workers": 2}]}, "machines[1].gpus: other machines have `gpus`"),
        ({"machines": [{"workers": 2, "card": {"count": 2}}]}, "machines[0].card: cards are those of accelerators"),
        ({"engine": {"library": "horovod"}}, "engine: it is for accelerators"),
        ({"machines": [{"gpus": 1}], "host": {}}, "machines[0].gpus: `host` has processes"),
        ({"machines": [{"gpus": 2, "inside": {"kind": "wire"}}]}, "kind"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(given, said):
    with raising(ClusterError, said):
        Cluster(**given)


def test_kinds_of_links_and_transports_set_defaults_that_a_file_may_replace():
    assert InsideLink() == InsideLink(bandwidth=12e9, latency=10e-6)
    mesh = InsideLink(kind="mesh")
    assert [mesh.ring(gpus) for gpus in (2, 4, 8)] == pytest.approx([22e9, 80e9, 130e9])
    assert InsideLink(kind="switch", bandwidth="230 GB/s").ring(8) == 230e9
    assert Card(transport="tcp").bandwidth(25e9 / 8) == 13e9 / 8
    assert Card(transport="tcp").bandwidth(10e9 / 8) == pytest.approx(0.9 * 10e9 / 8)
    assert Card(transport="tcp", flow="18 Gbit/s").bandwidth(25e9 / 8) == 18e9 / 8
    assert Card(transport="tcp", flow=None) == Card(transport="tcp")  # an empty key, which a written file leaves out
    assert Card().bandwidth(25e9 / 8) == pytest.approx(0.88 * 25e9 / 8)


def network(given, workers=None):
    names = {f"worker {i}": i for i in range(workers or given.workers)}
    return Network(given, Kernel(), names)


def test_a_ring_has_all_cards_of_a_machine_and_groups_of_ranks_divide_them():
    given = network(cluster(2, 8, card=Card(count=4, share=1)))
    assert given.levels(range(16)).across.bandwidth == pytest.approx(4 * 12.5e9)
    assert given.levels([0, 8]).across.bandwidth == pytest.approx(4 * 12.5e9 / 8)
    assert given.levels(range(0, 16, 2)).across.bandwidth == pytest.approx(4 * 12.5e9 / 2)
    # a run of four workers of each machine alone
    fewer = Network(
        given.cluster, Kernel(), {f"worker {i}": place for i, place in enumerate((0, 1, 2, 3, 8, 9, 10, 11))}
    )
    assert fewer.levels(range(8)).across.bandwidth == pytest.approx(4 * 12.5e9)


def test_a_machine_with_one_rank_of_a_group_does_not_bound_the_links_inside_the_others():
    mesh = {"inside": InsideLink(kind="mesh"), "compute": Constant(seconds=0.1)}
    kinds = tuple(Machines(count=1, gpus=gpus, **mesh) for gpus in (8, 1))
    for order in (kinds, kinds[::-1]):
        given = network(cluster().changed(machines=order))
        assert given.levels(range(9)).inside.bandwidth == pytest.approx(130e9)
        assert given.levels(range(9)).bandwidth == pytest.approx(0.88 * 12.5e9)


@pytest.mark.parametrize(("cards", "times"), [(1, 2), (2, 1), (8, 1)])
def test_messages_of_gpus_with_cards_of_their_own_do_not_share_one(cards, times):
    given = network(cluster(2, 2, card=Card(count=cards, share=1, hop="10 us"), engine=BARE.changed(start=30e-6)))
    arrived, nbytes = [], 125_000_000
    for gpu in range(2):
        given.send(gpu, gpu + 2, nbytes, lambda: arrived.append(given.kernel.now), 0)
    given.kernel.run()
    assert arrived == pytest.approx([times * nbytes / 12.5e9 + 40e-6] * 2)


# ---- steps


def dense(*widths, batch=8, **given):
    def model():
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))

    data = Data(torch.randn(64, widths[0]), torch.zeros(64, dtype=torch.int64))
    return Job(model, nn.functional.cross_entropy, data, batch_size=batch, **given)


def step(job, given, strategy="bsp"):
    return timed(Scene(job, given, job.batch_size * given.workers), strategy).seconds


def test_an_all_reduce_at_the_end_of_backward_has_its_closed_form():
    job, nbytes = dense(1000, 1000), 4 * 10**6
    given = cluster(2, 4, inside=InsideLink(bandwidth=80e9, latency=0), card=Card(share=1, hop=0))
    assert step(job, given) == pytest.approx(0.1 + 2 * 7 / 8 * nbytes / 12.5e9)
    two = 0.1 + 2 * 3 / 4 * nbytes / 80e9 + 2 / 2 * nbytes / 12.5e9
    assert step(job, given, "bsp collective:algorithm=hierarchical") == pytest.approx(two)
    one = cluster(1, 4, inside=InsideLink(bandwidth=80e9, latency=0))
    assert step(job, one) == pytest.approx(0.1 + 2 * 3 / 4 * nbytes / 80e9)


@pytest.mark.parametrize("library", ["ddp", "horovod", "at-end"])
def test_a_worker_alone_does_not_pay_for_the_library(library):
    given = cluster(1, 1, engine=AcceleratorEngine(library=library))
    assert step(dense(100, 100, 100), given) == pytest.approx(0.1)


def test_steps_with_a_distribution_have_no_spread_of_their_own():
    job, engine = dense(10, 10), BARE.changed(spread=0.02)
    constant = step(job, cluster(2, 4, engine=engine, inside=InsideLink(latency=0), card=Card(hop=0)))
    assert constant == pytest.approx(0.1 * (1 + 0.02 * slowest_of(8)), rel=1e-3)
    links = {"inside": InsideLink(latency=0), "card": Card(hop=0)}
    machines = Machines(count=2, gpus=4, compute=LogNormal(seconds=0.1, sigma=0), **links)
    assert step(job, cluster(engine=engine).changed(machines=(machines,))) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "period"),
    [
        ("bsp", 1),
        ("bsp collective:algorithm=halving-doubling", 1),
        ("bsp collective 1bit", 1),
        ("bsp ps", 1),
        ("bsp tensor:ways=2", 1),
        ("bsp 1f1b:stages=2,micro=2", 1),
        ("averaging:period=4", 4),
        ("diloco:period=4", 4),
        ("ad-psgd", None),
    ],
)
def test_workers_that_wait_for_each_other_wait_for_the_slowest_with_every_method(strategy, period):
    """A sum of `period` steps spreads less than each of them."""
    given = [cluster(2, 2, engine=BARE.changed(spread=spread), seconds=10) for spread in (0.1, 0)]
    spread, none = (step(dense(64, 64, 64), each, strategy) for each in given)
    expected = 1.0 if period is None else 1 + 0.1 * slowest_of(4) / period**0.5
    assert spread / none == pytest.approx(expected, rel=1e-3)


LAST_HEAVY = {"widths": (10, 10, 100_000), "seconds": ((0.01, 0.08), (0.005, 0.005))}
"""A small first block with almost all of backward, and a large last one, as in VGG-16."""


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_large_block_that_backward_completes_first_is_hidden_behind_the_others(accelerated):
    """By parameters, its gradient is complete at the end of backward; by stated seconds, after a seventeenth of it."""
    widths, seconds = LAST_HEAVY["widths"], LAST_HEAVY["seconds"]
    if accelerated:
        engine = AcceleratorEngine(library="ddp", bucket=1, contention=0, spread=0, start=0)
        given = cluster(2, 1, seconds=0.1, engine=engine, link="1 Gbit/s", card=Card(share=1, hop=0))
        tensors = 2 * engine.rules.tensor
        large, small = 4 * 10 * 100_000 / 125e6, 4 * 100 / 125e6
    else:
        given = Cluster(
            machines=(Machines(count=2, compute=Constant(seconds=0.1)),), link=Link(bandwidth="1 Gbit/s", latency=0),
            alpha=0, beta=0, gamma=0, backward=0.85,
        )  # fmt: skip
        tensors, large, small = 0.0, 4 * 10 * 100_000 / 125e6, 4 * 100 / 125e6
    assert large < 0.08
    stated = step(dense(*widths, block_seconds=seconds), given)
    assert stated == pytest.approx(0.1 + tensors + small, rel=1e-3)
    if not accelerated:
        # backward of 0.085 s completes equally many parameters in each second
        assert step(dense(*widths), given) == pytest.approx(0.1 + large + small, rel=0.02)


def test_the_operations_of_blocks_decide_on_accelerators_where_no_seconds_are_stated():
    """A convolution before a large dense layer: nearly all of backward is the convolution's."""

    def model():
        convolutions = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1), nn.AvgPool2d(32)
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 15_000))

    data = Data(torch.randn(64, 3, 32, 32), torch.zeros(64, dtype=torch.int64))
    job = Job(model, nn.functional.cross_entropy, data, batch_size=64)
    engine = AcceleratorEngine(library="ddp", bucket=1, contention=0, spread=0, start=0, intensity=1e-9)
    given = cluster(2, 1, seconds=0.1, engine=engine, link="1 Gbit/s", card=Card(share=1, hop=0))
    large = 4 * 65 * 15_000 / 125e6
    assert 0.03 < large < 0.04
    assert 0.1 < step(job, given) < 0.1 + 0.1 * large


def test_seconds_of_another_number_of_blocks_are_refused():
    with raising(dure.errors.UsageError, "states the seconds of 3 blocks in block_seconds, and its model has 2 blocks"):
        step(dense(4, 4, 4, block_seconds=((1, 1),) * 3), cluster())


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("batch", [2, 8])
def test_workers_that_share_layers_reduce_activations_by_the_engine(ways, batch):
    """Four all-reduces of batch x sequence x hidden for each layer: of both parts, forward and backward."""
    layers, sequence, hidden = 3, 16, 64
    job = load_job("transformer:layers=3,hidden=64,heads=4,vocab=50,sequence=16,form=llama", batch_size=batch)
    rates = 1e9, 4e9
    slow, fast = (
        timed(
            Scene(job, cluster(1, ways, inside=InsideLink(kind="switch", bandwidth=rate)), batch), f"tensor:ways={ways}"
        )
        for rate in rates
    )
    nbytes = batch * sequence * hidden * 4
    each = 2 * (ways - 1) / ways * nbytes * (1 / rates[0] - 1 / rates[1])
    # the embedding of words and the loss have collectives too, of smaller tensors
    assert 4 * layers * each <= slow.seconds - fast.seconds <= (4 * layers + 3) * each


def test_shared_layers_give_the_same_values_by_the_engine_and_in_messages():
    ends = []
    for machines in (Machines(count=1, gpus=2), Machines(count=1, workers=2)):
        run = dure.train(
            "char-gpt:layers=1,width=16,heads=2,context=8",
            strategy="tensor:ways=2",
            on=Cluster(machines=(machines,)),
            steps=4,
        )
        ends.append(run.summary()["loss"])
    assert ends[0] == ends[1]
