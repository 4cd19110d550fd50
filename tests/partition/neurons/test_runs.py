"""Runs of models whose units are at several machines against runs of the whole model."""

from __future__ import annotations

import json

import pytest
import torch
from support.purposes import soaked
from support.runs import local, virtual
from support.stage_jobs import job_text
from support.wording import raising

import dure
from dure.errors import StrategyError, UsageError
from dure.partition.methods.neurons import Neurons
from dure.partition.neurons.assignment import traffic, words_sent
from dure.partition.neurons.layers import unit_model

OPTIONS = {"steps": 4, "seed": 3, "dtype": "float64", "batch_size": 8, "optimizer": "momentum:lr=0.1"}
LOCAL = "digits-local:channels=2"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("job", "partition", "workers"),
    [
        ("digits-mlp:hidden=12,depth=2", Neurons(3, "random"), 3),
        ("digits-mlp:hidden=12,depth=2", Neurons(3, "layers"), 3),
        (LOCAL, Neurons(4, "even"), 4),
        (LOCAL, Neurons(4, "cut"), 4),
        (LOCAL, Neurons(2, "random", seed=5), 4),
    ],
)
def test_a_run_equals_that_of_the_whole_model_and_sends_the_words_of_the_assignment(job, partition, workers):
    replicas = workers // partition.ways
    whole = virtual(job, "bsp collective", workers=replicas, **OPTIONS)
    split = virtual(job, f"bsp collective {text(partition)}", workers=workers, **OPTIONS)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)
    layers, _ = unit_model(whole.setup.job.build(0))
    found = traffic(layers, partition.assigned(layers), partition.ways)
    if replicas == 1:
        words = sum(words_sent(found)) * OPTIONS["steps"] * OPTIONS["batch_size"]
        assert split.summary["bytes_sent"] == words * torch.float64.itemsize
    rows = OPTIONS["batch_size"]
    for machine, module in enumerate(split.setup.stages.modules):
        counted = sum(piece.flops for piece in module.cost(0, rows).forward)
        assert counted == 2 * rows * sum(int(each.work[machine]) for each in found)


def text(partition: Neurons) -> str:
    return f"neurons:ways={partition.ways},assignment={partition.assignment},seed={partition.seed}"


def test_a_timing_only_run_takes_the_seconds_and_bytes_of_a_run_with_gradients():
    strategy = "bsp collective neurons:ways=3,assignment=random"
    trained = virtual(LOCAL, strategy, workers=3, **OPTIONS)
    timed = virtual(LOCAL, strategy, workers=3, timing_only=True, **OPTIONS)
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-12)
    assert timed.summary["bytes_sent"] == trained.summary["bytes_sent"]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        *soaked(("bsp collective neurons:ways=2,assignment=random", 2), ("bsp ps neurons:ways=2", 4)),
        *soaked(("bsp collective neurons:ways=3,assignment=layers", 3)),
    ],
)
def test_processes_give_the_bits_of_virtual_time(fork_server, strategy, workers):
    virtually = virtual(LOCAL, strategy, workers=workers, **OPTIONS)
    really = local(LOCAL, strategy, workers=workers, fork_server=fork_server, **OPTIONS)
    assert torch.equal(virtually.params, really.params)
    assert virtually.summary["bytes_sent"] == really.summary["bytes_sent"]


@pytest.mark.long
def test_downpour_trains_replicas_that_are_split_by_units():
    """One replica over servers reads what it wrote, so it is SGD."""
    options = OPTIONS | {"optimizer": "sgd:lr=0.1"}
    whole = virtual(LOCAL, "bsp collective", workers=1, **options)
    split = virtual(LOCAL, "downpour ps neurons:ways=2,assignment=random", workers=2, **options)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)
    several = virtual(
        LOCAL, "downpour ps neurons:ways=2,assignment=random", workers=6, **OPTIONS | {"steps": 60, "eval_every": 10}
    )
    losses = [row["loss"] for row in several.rows]
    assert losses[-1] < losses[0] / 2


def test_a_run_goes_on_with_other_machines_for_its_units(tmp_path):
    options = OPTIONS | {"optimizer": "adam:lr=0.01"}
    strategy = {"sync": "bsp", "topology": "collective", "checkpoint_every": 2}
    splits = [("neurons:ways=3,assignment=random", 3), ("neurons:ways=2,assignment=cut", 2), ("none", 1)]
    dure.train(LOCAL, partition=splits[0][0], workers=3, out=tmp_path, on="virtual", **strategy, **options)
    for number, (partition, workers) in enumerate(splits[1:], start=1):
        run = dure.train("", resume=tmp_path, partition=partition, steps=4 + 2 * number)
        assert run.config["workers"] == workers
    whole = virtual(LOCAL, "bsp collective", workers=1, **options | {"steps": 8})
    assert run.history[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-12)


def test_an_assignment_is_read_from_a_file(tmp_path):
    file = tmp_path / "units.json"
    layers, _ = unit_model(virtual(LOCAL, "bsp collective", workers=1, **OPTIONS | {"steps": 1}).setup.job.build(0))
    owners = Neurons(3, "random", seed=9).assigned(layers)
    file.write_text(json.dumps({name: each.tolist() for name, each in owners.items()}))
    found = Neurons(3, str(file)).assigned(layers)
    assert {name: each.tolist() for name, each in found.items()} == json.loads(file.read_text())
    for spoiled, message in [
        ({name: each.tolist()[1:] for name, each in owners.items()}, "machine from 0 to 2"),
        ({name: (each * 2).tolist() for name, each in owners.items()}, "machine from 0 to 2"),
        ({"1": [0]}, "units of the layers 1, 3, 6"),
        ({name: [0] * len(each) for name, each in owners.items()}, "machine 1 of 3 has no unit"),
    ]:
        file.write_text(json.dumps(spoiled))
        with pytest.raises(UsageError, match=message):
            Neurons(3, str(file)).assigned(layers)


@pytest.mark.parametrize(
    ("job", "strategy", "message"),
    [
        (job_text("normed_between"), "bsp collective neurons:ways=2", "BatchNorm1d"),
        (LOCAL, "bsp collective neurons:ways=2,assignment=evn", "assignment=evn"),
        (LOCAL, "bsp collective neurons:ways=4,assignment=layers", "has 3"),
        (LOCAL, "bsp collective gpipe:stages=2+neurons:ways=2", "neurons"),
    ],
)
def test_refusals_name_the_reason(job, strategy, message):
    with raising((UsageError, StrategyError), message):
        virtual(job, strategy, workers=4, **OPTIONS | {"batch_size": 4})
