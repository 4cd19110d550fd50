"""Graphs of neighbors: what they look like, how they are read and mended, and how fast they mix."""

import math
import random

import networkx as nx
import numpy as np
import pytest

from dure.errors import StrategyError
from dure.strategy import Strategy
from dure.topology.graph import build, contraction, knit, metropolis_mixing, pairwise_mixing, spectral_gap
from dure.topology.spec import GRAPHS, Gossip


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


def test_what_is_no_graph_for_the_run_is_refused(tmp_path):
    path = tmp_path / "two.edges"
    path.write_text("0 1\n2 3\n")
    for topology, workers, reason in (
        (Gossip(str(path)), 4, "falls apart into 2 parts"),
        (Gossip(str(path)), 5, "has 4 nodes, and the run 5 workers"),
        (Gossip("rign"), 4, "none of ring, exponential, random-regular, complete"),
        (Gossip("random-regular"), 4, "needs more than 4 workers"),
        (Gossip("random-regular", 3), 7, "needs an even number of workers"),
    ):
        with pytest.raises(StrategyError, match=reason):
            build(topology, workers)
    with pytest.raises(StrategyError, match="degree counts neighbors"):
        Strategy.parse("ad-psgd gossip:graph=random-regular,degree=1")
    assert str(Strategy.parse("gossip:graph=ring ad-psgd").topology) == str(Gossip("ring"))


@pytest.mark.parametrize("name", GRAPHS)
def test_knit_together_the_rest_is_connected(name):
    graph = build(Gossip(name), 16)
    for seed in range(50):
        chance = random.Random(seed)
        gone = chance.sample(range(16), chance.randrange(1, 15))
        rest = knit(graph, gone)
        assert sorted(rest) == sorted(set(range(16)) - set(gone))
        assert nx.is_connected(rest)
    assert set(knit(graph, ()).edges) == set(graph.edges)


def test_the_neighbors_of_who_is_gone_become_neighbors():
    assert sorted(knit(build(Gossip("ring"), 6), {0}).neighbors(5)) == [1, 4]
    assert sorted(knit(build(Gossip("ring"), 6), {0, 5}).neighbors(4)) == [1, 3]


@pytest.mark.parametrize("workers", [3, 4, 6, 9])
def test_closed_forms(workers):
    assert contraction(build(Gossip("complete"), workers)) == pytest.approx(1 - 1 / (workers - 1))
    ring = 1 - (1 - math.cos(2 * math.pi / workers)) / workers
    assert contraction(build(Gossip("ring"), workers)) == pytest.approx(ring)
    assert spectral_gap(metropolis_mixing(build(Gossip("complete"), workers))) == pytest.approx(1)


@pytest.mark.parametrize("mixing", [pairwise_mixing, metropolis_mixing])
@pytest.mark.parametrize("graph", [nx.star_graph(5), nx.path_graph(6), nx.cycle_graph(7), nx.wheel_graph(6)])
def test_mixing_is_symmetric_and_keeps_the_mean(mixing, graph):
    matrix = mixing(graph)
    assert np.allclose(matrix, matrix.T)
    assert np.allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    assert 0 < spectral_gap(matrix) < 1


def test_more_edges_mix_faster():
    gaps = [spectral_gap(pairwise_mixing(build(Gossip(name), 16))) for name in ("ring", "exponential", "complete")]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[2] / 5
