"""Copies of a model times stages times workers that share layers: the same training as with whole models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.purposes import soaked
from support.runs import Finished, local, resolved, virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text, plain

from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment

GPT = "char-gpt:layers=2,width=16,heads=2,context=12"
TIED = f"{GPT},tied=true"
OPTIONS = {"steps": 20, "seed": 3, "batch_size": 8, "optimizer": "sgd:lr=0.1"}
WITHIN = {"float64": 1e-12, "float32": 1e-5}


def mesh(stages, ways):
    """The partition, for so many workers in a copy of the model."""
    pipeline, shared = f"gpipe:stages={stages},micro=2", f"tensor:ways={ways}"
    return shared if stages == 1 else pipeline if ways == 1 else f"{pipeline}+{shared}"


def whole(copies, job=GPT, **options) -> Finished:
    return virtual(job, "bsp collective", workers=copies, **OPTIONS | options)


def distance(one, other):
    return float((one.params - other.params).abs().max())


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "optimizer", "dtype"),
    [
        (GPT, "momentum:lr=0.1", "float64"),
        *soaked((GPT, "sgd:lr=0.1", "float64"), (TIED, "sgd:lr=0.1", "float64"), (GPT, "sgd:lr=0.1", "float32")),
    ],
)
def test_two_copies_of_two_stages_of_two_ways_train_as_one_process(job, optimizer, dtype):
    """The one process has mini-batches of both copies."""
    options = {"optimizer": optimizer, "dtype": dtype, "split": "striped"}
    shared = virtual(job, f"bsp collective {mesh(2, 2)}", workers=8, **OPTIONS | options)
    assert distance(shared, whole(1, job, **options | {"batch_size": 16})) < WITHIN[dtype]
    assert distance(shared, whole(1, job, **options | {"batch_size": 16, "steps": 19})) > 1e-3  # it has moved


@pytest.mark.parametrize(
    ("copies", "stages", "ways", "dtype"),
    [
        *soaked(*((2, 1, 1, each) for each in WITHIN)),
        *soaked(*((1, 2, 1, each) for each in WITHIN)),
        *soaked(*((1, 1, 2, each) for each in WITHIN)),
        *soaked(*((2, 2, 1, each) for each in WITHIN)),
        *soaked((2, 1, 2, "float64"), (1, 2, 2, "float64")),
    ],
)
def test_processes_train_as_one_process(copies, stages, ways, dtype, fork_server):
    options = {"dtype": dtype, "split": "striped"}
    partition = "none" if stages * ways == 1 else mesh(stages, ways)
    given = {"workers": copies * stages * ways, **OPTIONS, **options}
    really = local(GPT, f"bsp collective {partition}", fork_server=fork_server, **given)
    assert distance(really, whole(1, **options | {"batch_size": 8 * copies})) < WITHIN[dtype]


@pytest.mark.long
@pytest.mark.parametrize(("partition", "workers"), [(mesh(2, 2), 8), *soaked(("tensor:ways=2", 4))])
def test_the_norm_of_the_gradient_counts_each_parameter_once(partition, workers):
    options = {"optimizer": "sgd:lr=0.1,clip=0.2", "dtype": "float64", "steps": 4}
    shared = virtual(TIED, f"bsp collective {partition}", workers=workers, **OPTIONS | options)
    assert distance(shared, whole(2, TIED, **options)) < 1e-12
    assert distance(shared, whole(2, TIED, **options | {"optimizer": "sgd:lr=0.1"})) > 1e-3


@pytest.mark.parametrize(
    "method",
    [
        "averaging:period=3 collective",
        *soaked("one-shot collective", "easgd:period=2 collective", "eamsgd:period=2 collective"),
        *soaked("bmuf:period=3,overlap=2 collective", "diloco:period=3 collective", "averaging:period=2 ps", "bsp ps"),
        *soaked("averaging:period=3,weights=fisher collective", "bsp collective:algorithm=ring"),
    ],
)
def test_copies_that_share_layers_are_workers_with_the_whole_model(method):
    options = {**OPTIONS, "steps": 7, "dtype": "float64", "batch_sizes": (8, 12)}
    other = virtual(job_text("plain"), method, workers=2, **options)
    shared = virtual(job_text("plain"), f"{method} {pairs(2)}", workers=4, **options)
    assert distance(shared, other) < 1e-12


def test_groups_and_schedules_are_those_of_the_whole_model():
    """A bias that is split, one that is whole, and a weight of each split have rates of their own."""
    rates = {"0.0.bias": 0.3, "1.0.bias": 0.2, "2.0.weight": 0.05, "3.0.weight": 0.01}

    def groups(name, parameter):
        return {"lr": rates[name], "weight_decay": 0.1} if name in rates else {}

    job = replace(plain(), groups=groups, schedule="cosine:steps=7,warmup=2")
    options = {"steps": 7, "dtype": "float64", "seed": 3, "optimizer": "momentum:lr=0.1"}
    other = virtual(job, "bsp collective", workers=2, **options)
    shared = virtual(job, f"bsp collective gpipe:stages=2,micro=2+{pairs(2)}", workers=8, **options)
    assert distance(shared, other) < 1e-12
    alike = virtual(plain(), "bsp collective", workers=2, **options)
    assert distance(shared, alike) > 1e-3


# ---- parameters that are whole at several workers


def copies_of(job, strategy, workers, **options):
    """For each copy of the model, and each parameter that several of its workers have whole, their values."""
    setup, cluster = resolved(job, strategy, workers=workers, on="virtual", eval_every=1000, **options)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    segment.run()
    segment.end()
    found = {}
    for number, worker in segment.workers.items():
        for held in setup.stages.layout.held[number % setup.parts]:
            if held.shard is None:
                key = number // setup.parts, held.name
                found.setdefault(key, []).append(worker.params[held.start : held.stop])
    return found


@pytest.mark.parametrize("codec", ["int8", "top-k", *soaked("bf16", "1bit", "int8+ef", "sign", "ternary")])
def test_codecs_of_gradients_keep_copies_equal(codec):
    """Some encode a parameter in blocks with others, which differ between workers that share layers."""
    found = copies_of(job_text("plain"), f"bsp collective {codec} {pairs(2)}", 4, steps=4, seed=3)
    assert {name for _, name in found} == {"1.0.bias", "3.0.bias"}
    for values in found.values():
        assert len(values) == 2
        assert torch.equal(values[0], values[1])


def test_a_codec_of_single_elements_gives_the_gradient_of_the_whole_model():
    options = {"steps": 4, "seed": 3}
    other = virtual(job_text("plain"), "bsp collective bf16", workers=2, **options)
    shared = virtual(job_text("plain"), f"bsp collective bf16 {pairs(2)}", workers=4, **options)
    assert distance(shared, other) < 1e-3  # a gradient at the border of two numbers goes either way
    bare = virtual(job_text("plain"), f"bsp collective {pairs(2)}", workers=4, **options)
    assert not torch.equal(shared.params, bare.params)
