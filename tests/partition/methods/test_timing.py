"""The result of a pipeline depends on the orders of its workers alone, and not on how long anything takes."""

import pytest
import torch
from support.chains import play
from support.purposes import soaked

from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import LogNormal

METHODS = ["pipedream", "spectrain", "multi-version", *soaked("gpipe:micro=3", "petrowski", "pipedream:sync=vertical")]


def uneven():
    """A slow network and stages whose times vary."""
    return Cluster.uniform(4, compute=LogNormal(seconds=0.01, sigma=1.0), link=Link(bandwidth=1e5, latency=0.02))


@pytest.mark.parametrize("strategy", METHODS)
def test_times_change_no_bit(strategy):
    optimizer = "momentum:lr=0.1"
    runs = [play(strategy, 4, optimizer=optimizer, cluster=each) for each in (None, uneven())]
    assert runs[0].finished.seconds != runs[1].finished.seconds
    assert torch.equal(runs[0].params, runs[1].params)
