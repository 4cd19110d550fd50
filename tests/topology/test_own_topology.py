"""A user's own topology, in a file: it runs in both runtimes with the methods that it suits, and errors name it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracles.test_resume import check_every_stop
from support import left_neighbors
from support.runs import local, resolved, virtual

import dure
from dure.errors import StrategyError, UsageError
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster

STAR = f"{Path(__file__).parents[2] / 'examples' / '09_star.py'}:Star"
LEFT = f"{left_neighbors.__file__}:DPSGD {left_neighbors.__file__}:LeftNeighbors"


@pytest.mark.parametrize("sync", ["bsp", "averaging:period=3", "easgd:period=2"])
def test_a_group_of_ones_own_gives_the_results_of_a_ring(sync, fork_server):
    options = {"workers": 3, "steps": 6, "dtype": "float64"}
    ring = virtual("digits-mlp", f"{sync} collective:algorithm=ring", **options)
    star = virtual("digits-mlp", f"{sync} {STAR}:hub=1", **options)
    really = local("digits-mlp", f"{sync} {STAR}:hub=1", fork_server=fork_server, **options)
    torch.testing.assert_close(star.params, ring.params, rtol=0, atol=1e-12)
    torch.testing.assert_close(really.params, star.params, rtol=0, atol=1e-12)


def test_a_session_of_ones_own_averages_in_both_runtimes(fork_server):
    options = {"workers": 3, "steps": 6, "dtype": "float64"}
    virtually = virtual("digits-mlp", LEFT, **options)
    really = local("digits-mlp", LEFT, fork_server=fork_server, **options)
    torch.testing.assert_close(really.params, virtually.params, rtol=0, atol=1e-12)
    alone = virtual("digits-mlp", "one-shot collective", **options)
    assert not torch.allclose(virtually.params, alone.params)


def test_a_session_of_ones_own_is_in_checkpoints(tmp_path):
    check_every_stop("digits-mlp", tmp_path, Cluster.uniform(3), strategy=LEFT, steps=18)


def test_the_hub_of_a_star_must_exist():
    with pytest.raises(dure.DureError, match=r"hub=3 is no rank of 2 workers. Use hub=0."):
        resolved("digits-mlp", f"bsp {STAR}:hub=3", on="virtual", workers=2)


def test_a_star_has_no_loop_of_ones_own_and_no_codec():
    with pytest.raises(StrategyError, match=r"int8 encodes .* over .*09_star.py:Star sends none"):
        Strategy.parse(f"bsp {STAR} int8")
    with pytest.raises(StrategyError, match=r"ssp does not run over .*09_star.py:Star: its workers are at different"):
        Strategy.parse(f"ssp {STAR}")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"09_star.py:Star does not run in a loop of one's own"):
        dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), topology=STAR)


WRONG = """
from dataclasses import dataclass
from typing import ClassVar
import dure

class Grouped(dure.Topology):
    needs_everybody = True
    def group(self, node, meter): ...

class Hasty(dure.Topology):
    def group(self, node, meter): ...

class Mute(dure.Topology):
    def connect(self, worker, group): ...

class Serverless(dure.Topology):
    clocked = True
    def shard(self, node, number, *, log=False): ...

@dataclass(frozen=True)
class Wrong:
    offers: ClassVar = {offers}
    deployed_as: ClassVar = {deployed_as}
"""


@pytest.mark.parametrize(
    ("offers", "deployed_as", "words"),
    [
        (
            '("group",)',
            "dure.Topology",
            "offers group, and Topology has no `group` of its own. Define it, or leave group",
        ),
        ('("grup",)', "Grouped", 'offers grup, and Grouped has no `connect` of its own. .* Did you mean "group"?'),
        ('("group",)', "Hasty", "offers group, so Hasty must have `needs_everybody = True`"),
        ('"group"', "Grouped", "offers must be a tuple of names, got 'group'"),
        ('("group",)', '"nowhere:Grouped"', "deployed_as='nowhere:Grouped' cannot be imported .*Give the class itself"),
        ('("group",)', "int", "deployed_as must be a subclass of dure.Topology, got <class 'int'>"),
        ('("servers",)', "Serverless", "Serverless is `clocked`, .* `servers` must be at least 1, got 0"),
    ],
)
def test_a_wrong_topology_is_refused_in_the_caller(offers, deployed_as, words, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(WRONG.format(offers=offers, deployed_as=deployed_as))
    with pytest.raises(StrategyError, match=words):
        resolved("digits-mlp", f"bsp {file}:Wrong", on="virtual", workers=2)


@pytest.mark.parametrize(
    ("sync", "offers", "deployed_as", "words"),
    [
        ("bsp", '("group",)', "Grouped", "Wrong offers group, .* Its class in a run must return one from `group`"),
        ("ad-psgd", '("peers",)', "Mute", "Wrong offers peers, .* must set worker.sessions.peer in `connect`"),
    ],
)
def test_a_topology_that_gives_a_worker_too_little_is_named(sync, offers, deployed_as, words, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(WRONG.format(offers=offers, deployed_as=deployed_as))
    with pytest.raises(UsageError, match=words):
        virtual("digits-mlp", f"{sync} {file}:Wrong", workers=2, steps=2)
