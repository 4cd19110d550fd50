"""Seconds of calls: a pipeline pays them for each micro-batch, and each stage pays its part."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import dure
from dure.partition.profile import BlockTimes, PassShare, PassTime, share
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant

CALL, WORK, STEPS = 3.0, 5.0, 4


def job() -> dure.Job:
    """Four equal layers."""
    nothing = torch.zeros(8, 4)
    made = lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))  # noqa: E731
    return dure.Job(made, mse_loss, dure.Data(nothing, nothing), batch_size=8, name="equal layers")


def cluster(workers: int) -> Cluster:
    """A cluster whose messages take no time; a mini-batch takes CALL + WORK seconds."""
    compute = Constant(seconds=CALL + WORK, call=CALL)
    return Cluster.uniform(
        workers, compute=compute, link=Link(bandwidth=1e18, latency=0.0), alpha=0.0, beta=0.0, backward=0.5, small=0
    )


@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_gpipe_pays_a_call_for_each_micro_batch(stages, micro):
    """Equal stages, U micro-batches: (U + K - 1) (call + work / U) / K for each mini-batch."""
    partition = f"gpipe:stages={stages},micro={micro},cuts=even"
    run = dure.train(job(), partition=partition, on=cluster(stages), steps=STEPS, timing_only=True)
    expected = STEPS * (micro + stages - 1) * (CALL + WORK / micro) / stages
    assert run.summary()["seconds"] == pytest.approx(expected, rel=1e-6)


def test_the_shares_of_all_blocks_and_samples_are_one():
    times = BlockTimes([PassTime(1.0, 0.5), PassTime(2.0, 0.25)], [PassTime(0.0, 1.0), PassTime(1.0, 3.0)])
    for each in times:
        assert sum(share(each, [block], 8, 8).total for block in range(2)) == pytest.approx(1.0)


def test_a_way_makes_all_calls():
    assert PassShare(call=0.2, work=0.6).split(0.5) == pytest.approx(0.5 / 0.8)
    assert PassShare(call=0.0, work=0.6).split(0.5) == 0.5
