"""Words and seconds of assignments, computed alone, against counted ones and closed forms."""

from __future__ import annotations

import json

import pytest
import torch
from support.runs import virtual
from torch import nn

from dure.job.job import load_job
from dure.partition.methods.neurons import Neurons
from dure.partition.neurons.assignment import even, forecast, shuffled, traffic, words_sent
from dure.partition.neurons.layers import unit_model
from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant

JOB = "digits-mlp:hidden=24,depth=3"
OPTIONS = {"steps": 2, "seed": 3, "dtype": "float64", "batch_size": 8}
SLOW = 1e5
FREE = {"small": 0, "header": 0, "field": 0, "alpha": 0.0, "beta": 0.0}
"""A cluster in which messages take the time of their words on the link and nothing else."""


@pytest.mark.parametrize("machines", [1, 2, 5])
def test_no_balanced_assignment_of_dense_layers_is_better_than_another(machines):
    """A dense layer of n units that a dense layer reads sends n (D - 1) words, and gets as many back."""
    layers, _ = unit_model(nn.Sequential(nn.Linear(7, 20), nn.Linear(20, 30), nn.Linear(30, 10)))
    for assignment in (even(layers, machines), shuffled(layers, machines, 0)):
        found = traffic(layers, assignment, machines)
        each = [(int(layer.forward.sum()), int(layer.backward.sum())) for layer in found]
        assert each == [(0, 0), *[(n * (machines - 1), n * (machines - 1)) for n in (20, 30)], (10 * (machines - 1), 0)]
        assert words_sent(found) == (60 * (machines - 1), 50 * (machines - 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("assignment", ["even", "random", "layers", "uneven"])
@pytest.mark.parametrize("bandwidth", [1e15, SLOW])
def test_a_mini_batch_takes_the_seconds_of_the_slowest_machine_in_each_layer(assignment, bandwidth, tmp_path):
    torch.manual_seed(1)
    chances, units = torch.tensor([6.0, 3.0, 2.0]), {"1": 24, "3": 24, "5": 24, "7": 10}
    owners = {name: torch.multinomial(chances, count, replacement=True).tolist() for name, count in units.items()}
    file = tmp_path / "units.json"
    file.write_text(json.dumps(owners))
    partition = Neurons(3, str(file) if assignment == "uneven" else assignment)
    compute = Constant(seconds=1.0, flops=OPTIONS["batch_size"] * load_job(JOB).flops_per_sample)
    cluster = Cluster.uniform(3, compute=compute, link=Link(bandwidth=bandwidth, latency=0.0), **FREE)
    text = f"neurons:ways=3,assignment={partition.assignment}"
    run = virtual(JOB, f"bsp collective {text}", cluster, timing_only=True, **OPTIONS)
    layers, _ = unit_model(run.setup.job.build(0))
    found = traffic(layers, partition.assigned(layers), 3)
    words_per_second = bandwidth / (OPTIONS["batch_size"] * torch.float64.itemsize)
    right = forecast(found, 1.0, words_per_second, backward=cluster.backward)
    steps = OPTIONS["steps"]
    if assignment == "uneven" and bandwidth == SLOW:  # a machine begins a layer before others have their inputs
        assert 0.95 * right.seconds < run.seconds / steps <= right.seconds
        return
    assert run.seconds == pytest.approx(steps * right.seconds, rel=1e-9)
    assert 1 - run.outcome.totals.time["compute"] / (3 * run.seconds) == pytest.approx(right.idle, rel=1e-9)
