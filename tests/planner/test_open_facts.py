"""Facts that a cluster leaves open: which, their values, and the range of figures over them."""

from __future__ import annotations

from functools import cache

import pytest
import yaml

from dure.job.job import Job, load_job
from dure.planner.open_facts import extremes, open_facts
from dure.run.step_shape import referred
from dure.runtime.virtual.cluster import Cluster

SPEED, INSIDE, CARDS = "the speed of a GPU", "the links inside a machine", "the network cards of a machine"
TRANSPORT, SHARE, FLOW = "the transport of the network", "the share of a card that RDMA uses", "the flow of TCP"
SPREAD = "the spread of equal steps"

TWO = {"count": 2, "gpus": 8, "compute": {"seconds": "100 ms"}}
LINK = {"bandwidth": "100 Gbit/s"}
STATED = {
    "machines": [{**TWO, "inside": {"kind": "mesh"}}],
    "link": LINK,
    "card": {"count": 1, "transport": "rdma", "share": 0.88},
    "engine": {"spread": 0.02},
}


@cache
def alexnet() -> Job:
    return load_job("alexnet:batch=8")


def in_line(text: str) -> Cluster:
    return referred(Cluster.described(text), alexnet())


def names(cluster: Cluster) -> list[str]:
    return [fact.name for fact in open_facts(cluster)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("2x8 v100-sxm2-16gb @ 100 Gbit/s", [SPEED, CARDS, TRANSPORT, SPREAD]),
        ("2x8 v100-sxm2-16gb mesh @ 4x 100 Gbit/s rdma", [SPEED, SHARE, SPREAD]),
        ("2x8 v100-sxm2-16gb @ 1x 100 Gbit/s tcp", [SPEED, FLOW, SPREAD]),
        ("2x8 v100-pcie-16gb @ 10 Gbit/s", [SPEED, INSIDE, CARDS, TRANSPORT, SPREAD]),
        ("2x8 v100-pcie-16gb pcie @ 1x10 Gbit/s tcp", [SPEED, FLOW, SPREAD]),
        ("2x1 v100-pcie-16gb @ 100 Gbit/s", [SPEED, TRANSPORT, SPREAD]),
        ("1x8 v100-sxm2-16gb", [SPEED, SPREAD]),
        ("1x1 v100-pcie-16gb", [SPEED]),
    ],
)
def test_a_line_leaves_open_what_it_does_not_state(text: str, left: list[str]) -> None:
    assert names(in_line(text)) == left


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, []),
        ({"card": {"count": 1}}, [TRANSPORT]),
        ({"card": {"transport": "tcp", "count": 1, "flow": "13 Gbit/s"}}, []),
        ({"card": {}}, [CARDS, TRANSPORT]),
        ({"machines": [TWO]}, [INSIDE]),
        ({"machines": [TWO], "inside": {"bandwidth": "12 GB/s"}}, []),
        ({"machines": [{**TWO, "card": {"share": 0.88}, "inside": {"kind": "pcie"}}]}, [CARDS, TRANSPORT]),
        ({"engine": {}}, [SPREAD]),
        ({"engine": {}, "machines": [{**TWO, "compute": {"distribution": "lognormal"}}]}, [INSIDE]),
        ({"hosts": ["vm"], "card": {}}, []),
    ],
)
def test_a_stated_default_is_stated(changed: dict[str, object], left: list[str]) -> None:
    cluster = Cluster(**{**STATED, **changed})
    assert names(cluster) == left
    assert names(Cluster(**yaml.safe_load(cluster.to_yaml()))) == left, "a file that dure writes states the same"


def test_machines_with_cpus_have_no_open_facts() -> None:
    assert open_facts(Cluster.uniform(4)) == []


def test_stated_seconds_of_a_named_gpu_are_not_those_of_the_catalogue() -> None:
    given = Cluster(machines=[{"gpus": 1, "gpu": "v100-sxm2-16gb", "compute": {"seconds": "100 ms"}}])
    assert names(referred(given, alexnet())) == []


def values(cluster: Cluster, name: str) -> dict[str, Cluster]:
    fact = next(fact for fact in open_facts(cluster) if fact.name == name)
    return {words: change(cluster) for words, change in fact.values.items()}


def test_a_value_changes_what_it_names_and_no_stated_value() -> None:
    given = Cluster(machines=[{**TWO, "card": {"share": 0.7}}, {**TWO, "gpus": 4}], link=LINK, card={"hop": "1 us"})
    by_tcp = values(given, TRANSPORT)["TCP at 8 Gbit/s of a card"]
    first, second = (kind.card for kind in by_tcp.machines)
    assert first is not None
    assert second is not None
    assert (first.transport, first.share, first.flow, first.hop) == ("tcp", 0.7, 1e9, 80e-6)
    assert (second.transport, second.share, second.flow, second.hop) == ("tcp", 0.9, 1e9, 1e-6)
    assert [*values(given, CARDS)] == ["4 cards", "8 cards"]
    assert by_tcp.link == given.link


def test_a_flow_wider_than_the_cards_is_told_by_its_hops() -> None:
    given = in_line("2x8 v100-sxm2-16gb @ 10 Gbit/s")
    assert [*values(given, TRANSPORT)][2:] == ["TCP at 8 Gbit/s of a card", "TCP with hops of 25 us"]
    assert [*values(given, CARDS)] == ["2 cards"]


def test_another_speed_of_the_catalogue_is_one_of_the_seconds() -> None:
    given = in_line("1x1 v100-pcie-16gb")
    seconds = {words: each.machines[0].compute.seconds for words, each in values(given, SPEED).items()}
    assumed = given.machines[0].compute.seconds
    assert assumed is not None
    assert [*seconds.values()] == [pytest.approx(assumed / 0.6), pytest.approx(assumed / 2.1)]


def test_pcie_through_the_host_has_the_generation_of_the_device() -> None:
    given = in_line("1x8 a100-pcie-40gb")
    assert given.inside_of(0).bandwidth == 20e9
    (host,) = values(given, INSIDE).values()
    assert (host.inside_of(0).kind, host.inside_of(0).bandwidth) == ("pcie-host", pytest.approx(11e9))
    unknown = Cluster(machines=[TWO])
    assert [each.inside_of(0).bandwidth for each in values(unknown, INSIDE).values()] == [22e9, 120e9, 10e9, 5.5e9]


def test_extremes_take_each_fact_where_it_helps() -> None:
    tried = {"cards": [(5.0, "4"), (4.0, "8")], "share": [(2.0, "low"), (2.5, "high")], "spread": [(3.0, "none")]}
    lowest, highest, changes = extremes(3.0, tried)
    assert (lowest, highest) == ({"share": "low"}, {"cards": "4"})
    assert changes == {"cards": 2.0, "share": 1.0, "spread": 0.0}
