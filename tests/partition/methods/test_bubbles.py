"""Virtual seconds of flush methods over equal stages, on a network without cost, against the closed forms."""

import pytest
import torch
from support.runs import virtual
from torch import nn
from torch.nn.functional import mse_loss

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant

STEPS = 2
BATCH = 12
BACKWARD = 0.6
"""The share of a backward in the one second of a mini-batch through the whole model."""


def model():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))


def seconds_of_a_step(method, stages, micro):
    data = Data(torch.zeros(2 * BATCH, 4), torch.zeros(2 * BATCH, 4))
    job = Job(name="equal", model=model, loss=mse_loss, train=data, batch_size=BATCH)
    cluster = Cluster.uniform(
        stages,
        compute=Constant(seconds=1.0),
        link=Link(bandwidth=1e18, latency=0.0),
        alpha=0.0,
        beta=0.0,
        backward=BACKWARD,
    )
    partition = f"{method}:stages={stages},micro={micro},cuts=even"
    return virtual(job, f"bsp {partition}", cluster, workers=stages, steps=STEPS, timing_only=True).seconds / STEPS


def passes(stages, micro):
    """The seconds of a forward and of a backward of a micro-batch through one stage."""
    return (1 - BACKWARD) / (stages * micro), BACKWARD / (stages * micro)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 1), (2, 4), (3, 2), (3, 6), (4, 3), (6, 12)])
@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_a_step_takes_as_many_passes_as_micro_batches_and_later_stages(method, stages, micro):
    forward, backward = passes(stages, micro)
    expected = (micro + stages - 1) * (forward + backward)
    assert seconds_of_a_step(method, stages, micro) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (2, 4), (3, 6), (4, 4)])
def test_zero_bubble_computes_gradients_of_weights_in_the_bubbles(stages, micro):
    forward, backward = passes(stages, micro)
    inputs = weights = backward / 2
    expected = micro * (forward + backward) + (stages - 1) * (forward + inputs - weights)
    assert seconds_of_a_step("zero-bubble", stages, micro) == pytest.approx(expected, rel=1e-9)
