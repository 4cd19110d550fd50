"""GNMT without values: parameters and operations are the published ones, and layers are blocks of pipelines."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn

from dure.core.flop_counter import FlopCounter
from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.shapes.recurrent import UNITS, WORDS, Recurrent
from dure.partition.blocks import blocks_of

PROFILED = {"gnmt8": 193_765_952, "gnmt16": 277_717_568}
"""Parameters in PipeDream's profiles (github.com/msr-fiddle/pipedream), with an embedding for each language and
attention whose vector is not normed.
"""


@pytest.mark.parametrize("name", PROFILED)
def test_parameters_are_the_published_ones(name: str) -> None:
    numel = sum(each.numel() for each in load_job(name).build().parameters())
    assert numel == PROFILED[name] - WORDS * UNITS + UNITS + 1
    # version 0.5 of MLPerf training: 159,593,523 parameters with 31,794 words (from memory)
    if name == "gnmt8":
        assert numel - (WORDS - 31_794) * (2 * UNITS + 1) == 159_593_523


def test_a_layer_has_parameters_operations_and_shapes_of_an_lstm() -> None:
    with torch.device("meta"):
        ours, torchs = Recurrent(6, 4), nn.LSTM(6, 4, batch_first=True)
        inputs = torch.zeros(2, 5, 6)
    found = []
    for module in (ours, torchs):
        given = inputs.clone().requires_grad_()
        with FlopCounter() as counter:
            outputs = module(given)
            outputs = outputs if module is ours else outputs[0]
            outputs.sum().backward()
        found.append((outputs.shape, counter.get_total_flops(), sum(each.numel() for each in module.parameters())))
    assert found[0][::2] == found[1][::2]
    # the first state needs no gradient, which is a step of five with products of 4 x 16
    assert found[0][1] - found[1][1] == 2 * 2 * 4 * 16


def test_layers_are_blocks_of_a_pipeline_of_both_languages() -> None:
    job = load_job("gnmt8:sequence=4,batch=4")
    assert len(blocks_of(job, job.build())) == 11
    run = virtual(job, "bsp 1f1b:stages=2,micro=2,cuts=5", workers=2, steps=1, timing_only=True)
    assert run.summary["seconds"] > 0


def test_a_sequence_has_words() -> None:
    with raising(UsageError, "sequence must be at least 1"):
        load_job("gnmt16:sequence=0")
