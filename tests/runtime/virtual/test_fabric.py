"""Racks and sites: which links a message takes between two machines, and what plans make of them."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from textwrap import dedent

import pytest
from support.machines import placed

import dure.runtime.virtual.fabric as module
from dure.core.accelerator_cost import tree, two_level
from dure.job.job import load_job
from dure.planner.candidates import Scene
from dure.planner.explain import no_answer
from dure.planner.search import Found
from dure.planner.sweeps import of_workers, with_bandwidth, with_free_network
from dure.planner.timing import timed
from dure.runtime.virtual.accelerators import Card
from dure.runtime.virtual.cluster import Cluster, Link, Machines, ServerMachines
from dure.runtime.virtual.compute import Constant
from dure.runtime.virtual.fabric import Racks, Site, SiteLine, SitePair
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network

GIGABIT = 1.25e8
FAST, SLOW = Link(bandwidth=8e6, latency=1e-3), Link(bandwidth=1e6, latency=2e-3)
LINE = SiteLine(bandwidth="1 Mbit/s", latency="30 ms")


def three_sites() -> Cluster:
    """Racks of two at sites of 3, 2 and 1 machines."""
    sites = [Site(machines=count) for count in (3, 2, 1)]
    pairs = [
        SitePair(sites=[1, 0], bandwidth=100.0, latency=0.1),
        SitePair(sites=[0, 2], bandwidth=200.0, latency=0.2),
        SitePair(sites=[1, 2], bandwidth=300.0, latency=0.3),
    ]
    racks = Racks(machines=2, oversubscription=4, latency=0.01)
    kinds = [Machines(count=2, link=FAST), Machines(count=4, link=SLOW)]
    return Cluster(machines=kinds, racks=racks, sites=sites, between=pairs, servers=ServerMachines(link=FAST))


def way(cluster: Cluster, here: int, there: int) -> list[tuple[str, float, range]] | None:
    transit = cluster.transit(here, there)
    return None if transit is None else [(link.kind, link.bandwidth, link.machines) for link in transit.links]


def test_a_message_takes_the_links_of_its_racks_and_sites() -> None:
    cluster, server = three_sites(), 6
    assert way(cluster, 0, 1) is way(cluster, 1, 0) is way(cluster, 3, 4) is way(cluster, 5, 5) is None
    up, down = ("uplink", 16e6 / 4, range(2)), ("downlink", 1e6 / 4, range(2, 3))
    assert way(cluster, 0, 2) == way(cluster, 1, 2) == [up, down]
    assert way(cluster, 1, 3) == [up, ("line", 100.0, range(3)), ("downlink", 2e6 / 4, range(3, 5))]
    assert way(cluster, 5, 2) == [("uplink", 1e6 / 4, range(5, 6)), ("line", 200.0, range(5, 6)), down]
    assert way(cluster, 0, server) == [up]
    assert way(cluster, server, 2) == [down]
    assert way(cluster, server, 4) == [("line", 100.0, range(3)), ("downlink", 2e6 / 4, range(3, 5))]
    assert way(cluster, server, server + 1) is None


def test_messages_of_two_machines_share_one_link_in_each_direction() -> None:
    cluster = three_sites()
    there, back = cluster.transit(0, 2), cluster.transit(2, 1)
    assert there is not None
    assert back is not None
    assert there.links[0] is cluster.transit(1, 5).links[0]  # type: ignore[union-attr]
    assert not {*there.links} & {*back.links}
    assert cluster.fabric is not None
    links = cluster.fabric.shared_links
    assert {*there.links, *back.links} <= {*links}
    kinds = [link.kind for link in links]
    assert [kinds.count(kind) for kind in ("uplink", "downlink", "line")] == [4, 4, 6]


def test_latencies_add_up_and_the_slowest_link_counts() -> None:
    cluster = three_sites()
    assert [cluster.latency(0, other) for other in (1, 2, 3, 5, 6)] == pytest.approx([1e-3, 0.012, 0.112, 0.212, 0.011])
    assert [cluster.bandwidth(0, other) for other in (1, 2, 3, 5, 6)] == [8e6, 2.5e5, 100.0, 200.0, 4e6]
    transit = cluster.transit(0, 2)
    assert transit is not None
    assert transit.bandwidth == 2.5e5


def test_an_uplink_of_all_cards_is_no_queue() -> None:
    cluster = Cluster(racks=Racks(machines=4, latency=0.5))
    transit = cluster.transit(0, 4)
    assert transit is not None
    assert (transit.links, transit.latency, transit.bandwidth) == ((), 0.5, math.inf)


def test_a_cluster_of_sites_survives_pickling_after_use() -> None:
    cluster = three_sites()
    cluster.latency(0, 5)
    again = pickle.loads(pickle.dumps(cluster))
    assert again == cluster
    assert again.latency(0, 5) == cluster.latency(0, 5)


def test_a_cluster_states_its_racks_and_sites() -> None:
    cluster = three_sites()
    said = "4 racks with an oversubscription of 4, 3 sites with 100 B/s to 2.4 kbit/s between them"
    one = Cluster(sites=[Site(machines=4)] * 2, between=LINE, racks=Racks(machines=8))
    assert one.about().endswith("2 racks with an oversubscription of 1, 2 sites with 1 Mbit/s between them")
    assert cluster.about().endswith(f"links of 64 Mbit/s and 8 Mbit/s, {said}")
    assert f"Described, not measured: {said}. " in cluster.basis()
    assert f"Described, not measured: {said}. " in cluster.changed(hosts=("vm",)).basis()
    assert "not measured" not in Cluster().basis()


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cluster-file.md"


def test_the_docstring_and_the_page_have_one_cluster(tmp_path: Path) -> None:
    assert module.__doc__ is not None
    file, found = tmp_path / "cluster.yaml", []
    on_page = PAGE.read_text().partition("## Racks and sites")[2].split("sites.yaml\n")[1].split("```")[0]
    for text in ("machines: [{count: 48}]\n" + dedent(module.__doc__.split("\n\n")[1]), on_page):
        file.write_text(text)
        found.append(Cluster.from_yaml(file))
    cluster = found[0]
    assert found[1] == cluster
    assert [cluster.bandwidth(0, other) / GIGABIT for other in (15, 16, 32)] == pytest.approx([10, 10, 1])
    transit = cluster.transit(0, 16)
    assert transit is not None
    assert transit.bandwidth == pytest.approx(160 / 3 * GIGABIT)


# ---- accelerators


def accelerators(**levels: object) -> Network:
    """Four machines of eight GPUs behind cards of 100 Gbit/s, of which 11 GB/s are used."""
    machines = Machines(count=4, gpus=8, inside={"bandwidth": "100 GB/s"})
    cluster = Cluster(machines=[machines], link=Link(bandwidth="100 Gbit/s"), **levels)  # type: ignore[arg-type]
    return Network(cluster, Kernel(), placed(cluster))


@pytest.mark.parametrize("oversubscription", [1, 2, 16])
def test_a_ring_of_accelerators_over_two_racks_is_limited_by_its_share_of_an_uplink(oversubscription: float) -> None:
    plain = accelerators()
    racked = accelerators(racks=Racks(machines=2, oversubscription=oversubscription, latency=1e-3))
    nbytes, card, uplink = 4 * 10**9, 11e9, 2 * 11e9 / oversubscription
    alternating = [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    for order, crossing in ((range(32), 1), (alternating, 2)):
        bare, found = (each.cost("all_reduce", nbytes, order).seconds for each in (plain, racked))
        latency = 2 * 2 * crossing * 1e-3
        more = 2 * 31 / 32 * nbytes * (1 / min(card, uplink / crossing) - 1 / card)
        assert found == pytest.approx(bare + latency + more, rel=1e-12)
    # Groups of one GPU of each machine share the uplinks with seven others.
    column = range(0, 32, 8)
    bare, found = (each.cost("reduce_scatter", nbytes, column).seconds for each in (plain, racked))
    more = 3 / 4 * nbytes * 8 * (1 / min(card, uplink) - 1 / card)
    assert found == pytest.approx(bare + 2e-3 + more, rel=1e-12)
    within = (each.cost("all_reduce", nbytes, range(16)).seconds for each in (plain, racked))
    assert next(within) == next(within)


def test_trees_and_two_levels_of_accelerators_wait_for_a_line() -> None:
    levels = {"sites": [Site(machines=2)] * 2, "between": SiteLine(bandwidth="1 Tbit/s", latency="30 ms")}
    bare, apart = (each.levels(range(32)) for each in (accelerators(), accelerators(**levels)))
    assert tree(1000, apart) == pytest.approx(tree(1000, bare) + 2 * 0.03)
    assert two_level(1000, apart) == pytest.approx(two_level(1000, bare) + 2 * 2 * 0.03)


# ---- plans


def test_sweeps_change_the_links_between_machines() -> None:
    cluster = three_sites()
    for name, factor in ((0, 1), (1, 2), (2, 5)):
        assert with_bandwidth(cluster, 3.0).bandwidth(0, factor) == 3 * cluster.bandwidth(0, factor), name
    one = cluster.changed(between=LINE)
    assert with_bandwidth(one, 3.0).bandwidth(0, 5) == 3 * LINE.bandwidth
    for each in (cluster, one, Cluster(racks=Racks(machines=4, oversubscription=8, latency=1))):
        free = with_free_network(each)
        assert free.latency(0, 4) == 0.0
        assert free.bandwidth(0, 4) == 1e6 * each.bandwidth(0, 4)


def test_a_free_network_frees_the_cards_of_accelerators() -> None:
    tcp = Card(transport="tcp")
    for cards in ({"card": tcp}, {"machines": [{"count": 2, "gpus": 4, "card": tcp}]}):
        free = with_free_network(Cluster(**{"machines": [{"count": 2, "gpus": 4}], **cards}))
        card = free.card_of(0)
        assert card is not None
        assert (card.flow, card.hop) == (None, 0.0)
        assert free.network_bandwidth(free.machines[0]) == pytest.approx(1e6 * 0.9 * 1.25e9)


def test_the_workers_of_sites_are_not_swept() -> None:
    assert of_workers(Cluster(sites=[Site(machines=4)] * 2, between=LINE), 16) is None
    more = of_workers(Cluster(racks=Racks(machines=4, oversubscription=2)), 16)
    assert more is not None
    assert more.latency(0, 15) == Cluster().link.latency


COMPUTE = Constant(flops_per_second=1e9, overhead=1e-3)


def scene(**levels: object) -> Scene:
    machines = Machines(count=8, compute=COMPUTE)
    return Scene(load_job("digits-mlp"), Cluster(machines=(machines,), link=Link(bandwidth=1e8), **levels), batch=128)


def test_the_seconds_that_suffice_are_estimated_for_sites_too() -> None:
    here = scene(sites=[Site(machines=4)] * 2, between=LINE)
    assert "--within" in no_answer(here, Found(left={"bsp": 0.1}), 1.0)


@pytest.mark.parametrize("strategy", ["bsp", "bsp collective:algorithm=ring", "bsp ps", "averaging:period=2"])
def test_shared_links_only_slow_a_run(strategy: str) -> None:
    """So a bound that leaves them out stays a bound."""
    bare = timed(scene(), strategy).seconds
    racks = [timed(scene(racks=Racks(machines=4, oversubscription=o)), strategy).seconds for o in (1, 4, 64)]
    assert bare == pytest.approx(racks[0], rel=1e-12)
    assert racks[0] <= racks[1] < racks[2]
    sites = timed(scene(sites=[Site(machines=4)] * 2, between=LINE), strategy).seconds
    assert sites > 2 * bare
