"""Graphs of neighbors: what they look like, how they are read and mended, and how fast they mix."""

import math
import random

import networkx as nx
import numpy as np
import pytest
from support.wording import raising

from dure.core.mixing import metropolis_mixing, mixing, pairwise_mixing, spectral_gap
from dure.errors import StrategyError
from dure.run.strategy import Strategy
from dure.topology.gossip.choice import GRAPHS, Gossip
from dure.topology.gossip.graph import build, reconnect, size


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16, 31])
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "random-regular"])
def test_each_is_connected_and_nobody_is_its_own_neighbor(name, workers):
    graph = build(Gossip(name), workers)
    assert sorted(graph) == list(range(workers))
    assert nx.is_connected(graph)
    assert nx.number_of_selfloops(graph) == 0
    assert nx.is_regular(graph)


def test_who_is_whose_neighbor():
    assert sorted(build(Gossip("ring"), 6).neighbors(0)) == [1, 5]
    assert sorted(build(Gossip("exponential"), 16).neighbors(0)) == [1, 2, 4, 8, 12, 14, 15]
    assert sorted(build(Gossip("complete"), 5).neighbors(2)) == [0, 1, 3, 4]


@pytest.mark.parametrize(("degree", "workers"), [(2, 7), (3, 8), (4, 9), (4, 16)])
def test_a_random_regular_graph_is_the_same_for_the_same_seed(degree, workers):
    one, again, other = (build(Gossip("random-regular", degree, seed), workers) for seed in (0, 0, 1))
    assert nx.is_connected(one)
    assert {one.degree(node) for node in one} == {degree}
    assert set(one.edges) == set(again.edges)
    assert set(one.edges) != set(other.edges)


def test_a_graph_is_read_from_a_file(tmp_path):
    edges = tmp_path / "mine.edges"
    edges.write_text("0 1\n1 2\n2 3 {}\n10 3\n# a remark\n")
    assert set(map(frozenset, build(Gossip(str(edges)), 5).edges)) == {
        frozenset(pair) for pair in ((0, 1), (1, 2), (2, 3), (3, 4))
    }
    nx.write_graphml(nx.relabel_nodes(nx.star_graph(11), "n{}".format), tmp_path / "star.graphml")
    graph = build(Gossip(str(tmp_path / "star.graphml")), 12)
    assert sorted(graph.neighbors(0)) == list(range(1, 12))
    nx.write_graphml(nx.DiGraph([("b", "a"), ("b", "c")]), tmp_path / "named.graphml")
    assert sorted(build(Gossip(str(tmp_path / "named.graphml")), 3).neighbors(1)) == [0, 2]


def test_a_graph_is_given_as_pairs_or_as_an_object():
    pairs = Gossip("0-1/1-2/2-3/3-1")
    assert sorted(build(pairs, 4).neighbors(1)) == [0, 2, 3]
    assert (size(pairs), size(Gossip("ring"))) == (4, None)
    given = nx.relabel_nodes(nx.MultiDiGraph([(30, 9), (9, 30), (9, 9), (100, 9)]), {30: "n30", 9: "n9", 100: "n100"})
    assert Gossip(given).graph == "0-1/0-2"  # by their numbers: 9, 30, 100
    strategy = Strategy.of("ad-psgd", Gossip(nx.star_graph(3)))
    assert str(Strategy.parse(str(strategy))) == str(strategy)
    assert set(build(strategy.topology, 4).edges) == {(0, 1), (0, 2), (0, 3)}


def test_what_is_no_graph_for_the_run_is_refused(tmp_path):
    path = tmp_path / "two.edges"
    path.write_text("0 1\n2 3\n")
    for topology, workers, reason in (
        (Gossip(str(path)), 4, "falls apart into 2 parts"),
        (Gossip(str(path)), 5, "has 4 nodes, and the run 5 workers"),
        (Gossip("rign"), 4, "none of ring, exponential, random-regular, complete"),
        (Gossip("random-regular"), 4, "needs more than 4 workers"),
        (Gossip("random-regular", 3), 7, "needs an even number of workers"),
        (Gossip("0-1/2-3"), 4, r"0-1/2-3 falls apart into 2 parts, the first of them \[0, 1\]"),
        (Gossip("0-1/1-2"), 4, "the graph 0-1/1-2 has 3 nodes, and the run 4 workers"),
        (Gossip("0-1/1"), 2, "none of ring, .* no pairs of ranks"),
    ):
        with pytest.raises(StrategyError, match=reason):
            build(topology, workers)
    with raising(StrategyError, "into 2"):
        Gossip(nx.Graph([("a", "b"), ("c", "d")]))
    with raising(StrategyError, "neighbors"):
        Strategy.parse("ad-psgd gossip:graph=random-regular,degree=1")
    assert str(Strategy.parse("gossip:graph=ring ad-psgd").topology) == str(Gossip("ring"))


@pytest.mark.parametrize("name", GRAPHS)
def test_knit_together_the_rest_is_connected(name):
    graph = build(Gossip(name), 16)
    for seed in range(50):
        chance = random.Random(seed)
        gone = chance.sample(range(16), chance.randrange(1, 15))
        rest = reconnect(graph, gone)
        assert sorted(rest) == sorted(set(range(16)) - set(gone))
        assert nx.is_connected(rest)
    assert set(reconnect(graph, ()).edges) == set(graph.edges)


def test_the_neighbors_of_who_is_gone_become_neighbors():
    assert sorted(reconnect(build(Gossip("ring"), 6), {0}).neighbors(5)) == [1, 4]
    assert sorted(reconnect(build(Gossip("ring"), 6), {0, 5}).neighbors(4)) == [1, 3]


@pytest.mark.parametrize("workers", [3, 4, 6, 9])
def test_closed_forms(workers):
    complete, circle = (pairwise_mixing(build(Gossip(graph), workers)) for graph in ("complete", "ring"))
    assert spectral_gap(complete) == pytest.approx(1 / (workers - 1))
    ring = 1 - (1 - math.cos(2 * math.pi / workers)) / workers
    assert 1 - spectral_gap(circle) == pytest.approx(ring)
    assert spectral_gap(metropolis_mixing(build(Gossip("complete"), workers))) == pytest.approx(1)


def test_what_halves_the_disagreement():
    """Of 16: on a ring (1 - cos(2 pi/16)) / 16 is the gap of an averaging, 2/3 (1 - cos) that of a round."""
    wave = 1 - math.cos(math.pi / 8)
    ring = mixing(build(Gossip("ring"), 16))
    assert (ring.workers, ring.neighbors) == (16, "2")
    assert (ring.gap, ring.round_gap) == (pytest.approx(wave / 16), pytest.approx(2 / 3 * wave))
    assert (1 - ring.gap) ** ring.averagings_to_halve <= 0.5 < (1 - ring.gap) ** (ring.averagings_to_halve - 1)
    assert (
        (1 - ring.round_gap) ** (2 * ring.rounds_to_halve)
        <= 0.5
        < (1 - ring.round_gap) ** (2 * ring.rounds_to_halve - 2)
    )
    assert mixing(build(Gossip("exponential"), 16)).gap == pytest.approx(1 / 28)
    assert mixing(nx.star_graph(7)).neighbors == "1 to 7"
    pair = mixing(build(Gossip("complete"), 2))
    assert (pair.gap, pair.averagings_to_halve, pair.rounds_to_halve) == (pytest.approx(1), 1, 1)


@pytest.mark.parametrize("weights", [pairwise_mixing, metropolis_mixing])
@pytest.mark.parametrize("graph", [nx.star_graph(5), nx.path_graph(6), nx.cycle_graph(7), nx.wheel_graph(6)])
def test_mixing_is_symmetric_and_keeps_the_mean(weights, graph):
    matrix = weights(graph)
    assert np.allclose(matrix, matrix.T)
    assert np.allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    assert 0 < spectral_gap(matrix) < 1


def test_more_edges_mix_faster():
    gaps = [spectral_gap(pairwise_mixing(build(Gossip(name), 16))) for name in ("ring", "exponential", "complete")]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[2] / 5
