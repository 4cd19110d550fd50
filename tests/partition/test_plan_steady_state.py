"""The slowest stage of a plan against the steady state of pipelines in virtual time.

Stages with unequal replicas run PipeDream's 1F1B-RR (SOSP 2019, sections 3.2 and 3.3) here: mini-batch n is at replica
n mod r of a stage of r replicas, whose first backward comes after ceil(R / r) forwards; R counts the workers of the
stage and of those after it.
"""

import math
import random
from itertools import chain, pairwise

import pytest
import torch

from dure.job.job import load_job
from dure.partition.cut import Level, plan
from dure.partition.profile import BlockProfile, Profile
from dure.planner.candidates import Scene
from dure.planner.timing import setup_in, timed
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.runtime.virtual.network import Network
from dure.runtime.virtual.runtime import VirtualRuntime

FREE = {"link": Link(bandwidth=1e15, latency=0), "alpha": 0.0, "beta": 0.0}
FORWARD = 1 / 3
"""The share of the forward in the seconds of a stage."""


class RoundRobin:
    """1F1B-RR over stages of so many `seconds` per mini-batch, each with its number of `replicas`."""

    def __init__(self, seconds, replicas):
        self.seconds, self.replicas = seconds, replicas
        cluster = Cluster.uniform(sum(replicas), **FREE)
        self.names = [[f"stage {stage}.{each}" for each in range(count)] for stage, count in enumerate(replicas)]
        places = {name: place for place, name in enumerate(chain.from_iterable(self.names))}
        self.runtime = VirtualRuntime(cluster, lambda kernel: Network(cluster, kernel, places), None, seed=0)
        self.nodes = {name: self.runtime.node(name, place) for name, place in places.items()}
        self.ended = []

    def at(self, stage, number):
        return self.names[stage][number % self.replicas[stage]]

    async def pass_(self, node, stage, number, step):
        """A forward (`step` 1) receives from the stage before; a backward (-1) from the stage behind."""
        before, behind = stage - step, stage + step
        if 0 <= before < len(self.names):
            await node.recv(self.at(before, number), torch.zeros(1), tag=step % 3)
        await node.sleep(self.seconds[stage] * (FORWARD if step == 1 else 1 - FORWARD))
        if 0 <= behind < len(self.names):
            node.send(self.at(behind, number), torch.zeros(1), tag=step % 3)
        elif step == -1:
            self.ended.append(node.now())

    async def worker(self, stage, replica, count):
        node, numbers = self.nodes[self.names[stage][replica]], range(replica, count, self.replicas[stage])
        ahead = math.ceil(sum(self.replicas[stage:]) / self.replicas[stage])
        for number in numbers[:ahead]:
            await self.pass_(node, stage, number, 1)
        for place, number in enumerate(numbers):
            await self.pass_(node, stage, number, -1)
            if place + ahead < len(numbers):
                await self.pass_(node, stage, numbers[place + ahead], 1)

    def steady_seconds(self, rounds=40):
        """Seconds per mini-batch, over whole rounds in the middle of a run."""
        round_ = math.lcm(*self.replicas)
        for stage, count in enumerate(self.replicas):
            for replica in range(count):
                name = self.names[stage][replica]
                self.nodes[name].spawn(self.worker(stage, replica, rounds * round_), name)
        self.runtime.kernel.run()
        ended = sorted(self.ended)
        first, last = rounds // 2 * round_, rounds * 3 // 4 * round_
        return (ended[last] - ended[first]) / (last - first)


def chains(count, counts):
    """Random stages: seconds and replicas."""
    draw = random.Random(0)
    for _ in range(count):
        stages = range(draw.randint(1, 4))
        yield [draw.choice([0.3, 0.6, 1.2, 2.7, 3.3]) for _ in stages], [draw.choice(counts) for _ in stages]


def slowest(seconds, replicas):
    return max(each / count for each, count in zip(seconds, replicas, strict=True))


def test_the_steady_state_is_the_slowest_stage_where_replicas_never_increase():
    """The replicas of each stage divide those of the stage before, as PipeDream's plans for VGG-16 (15-1)."""
    found = [
        (seconds, replicas)
        for seconds, replicas in chains(400, [1, 2, 3, 4])
        if all(before % behind == 0 for before, behind in pairwise(replicas))
    ]
    assert sum(len(set(replicas)) > 1 for _, replicas in found) > 40
    for seconds, replicas in found:
        assert RoundRobin(seconds, replicas).steady_seconds() == pytest.approx(slowest(seconds, replicas), rel=1e-6)


@pytest.mark.long
def test_the_slowest_stage_is_a_bound_for_all_replicas():
    """The fixed order of mini-batches can leave the slowest stage idle, as with replicas 1, 2, 1."""
    ratios = [
        RoundRobin(seconds, replicas).steady_seconds() / slowest(seconds, replicas)
        for seconds, replicas in chains(80, [1, 2, 3, 4])
    ]
    assert min(ratios) > 1 - 1e-6
    assert max(ratios) > 1.2
    assert sum(each < 1 + 1e-6 for each in ratios) > 50


def test_the_plan_with_unequal_replicas_has_the_steady_state_of_its_seconds():
    """Large parameters keep the last layer from having replicas."""
    blocks = [BlockProfile(seconds, 0, size) for seconds, size in ((2.0, 1), (2.0, 1), (1.5, 1), (1.0, 10**6))]
    found = plan(Profile(tuple(blocks)), [Level(6, bandwidth=1e5)])
    replicas = [stage.replicas for stage in found.stages]
    seconds = [sum(block.seconds for block in blocks[stage.start : stage.stop]) for stage in found.stages]
    assert replicas == [5, 1]
    assert RoundRobin(seconds, replicas).steady_seconds() == pytest.approx(found.seconds, rel=1e-6)


@pytest.mark.parametrize(("stages", "workers"), [(2, 2), (3, 3), (2, 6)])
def test_runs_of_pipedream_have_the_steady_state_of_their_slowest_stage(stages, workers):
    machines = Machines(count=workers, compute=Constant(flops_per_second=1e6))
    here = Scene(load_job("digits-mlp:depth=4"), Cluster(machines=(machines,), **FREE), 12 * workers)
    strategy = f"bsp pipedream:stages={stages},cuts=profile"
    shares = setup_in(here, strategy).stages.layout.shares
    computed = 12 * workers / (workers // stages) * here.job.flops_per_sample / 1e6
    assert timed(here, strategy).seconds == pytest.approx(max(shares) * computed, rel=1e-3)
