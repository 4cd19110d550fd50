"""Interleaved and zero-bubble pipelines: SGD to rounding, in the memory and the time that their schedules promise."""

from __future__ import annotations

import pytest
import torch
from support.chains import play
from support.delayed import sgd
from support.purposes import soaked
from support.runs import local, virtual
from support.stage_jobs import job_text

from dure.errors import StrategyError
from dure.partition.methods.interleaved import Interleaved
from dure.partition.methods.zero_bubble import ZeroBubble
from dure.partition.schedule import Orders, schedule
from dure.run.strategy import make
from dure.runtime.launch.fork_server import ForkServer

CHUNKED = [
    "zero-bubble:stages=2,micro=3,schedule=v",
    "interleaved:stages=2,micro=4",
    "zero-bubble:stages=4,micro=5",
    *soaked(
        "interleaved:stages=2,micro=3",
        "interleaved:stages=1,micro=3,chunks=4",
        "zero-bubble:stages=2,micro=3,schedule=v,remat=true",
        "zero-bubble:stages=1,micro=2,schedule=v",
        "zero-bubble:stages=3,micro=5,schedule=h2",
        "zero-bubble:stages=3,micro=10",
    ),
]


def trained(job, partition, run=virtual, **options):
    workers = make(partition, "partition").stages if partition != "none" else 1
    given = {"workers": workers, "steps": 5, "eval_every": 5, "seed": 3, "dtype": "float64"} | options
    return run(job_text(job), f"bsp collective {partition}", **given)


@pytest.mark.parametrize("partition", CHUNKED)
def test_the_update_is_that_of_sgd(partition):
    torch.testing.assert_close(trained("plain", partition).params, trained("plain", "none").params, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["h1", "h2"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_split_backward_keeps_the_sets_of_its_timetable(stages, kind):
    run = play(f"zero-bubble:micro=3,schedule={kind}", stages, steps=3)
    torch.testing.assert_close(run.params, sgd(3), rtol=0, atol=1e-12)
    timetable = schedule(Orders.of(run.stages[0].pipeline, range(3)))
    assert [stage.counts.most_sets for stage in run.stages] == [timetable.most_sets(rank) for rank in range(stages)]
    assert [stage.counts.staleness for stage in run.stages] == [{0: 3}] * stages


@pytest.mark.long
@pytest.mark.parametrize("partition", [CHUNKED[0], *soaked(*CHUNKED[1:3])])
def test_chunks_on_processes_are_those_in_virtual_time_bit_for_bit(partition):
    with ForkServer() as server:
        really = trained("normed", partition, lambda *given, **options: local(*given, fork_server=server, **options))
    assert torch.equal(really.params, trained("normed", partition).params)


def test_the_orders_of_each_schedule_can_run():
    for pipeline in (
        Interleaved(stages=3, micro=6, chunks=3),
        *(ZeroBubble(stages=3, micro=6, schedule=kind) for kind in ("h1", "h2", "v")),
    ):
        assert schedule(Orders.of(pipeline, range(2))).staleness(0) == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interleaved:stages=4,micro=9", "micro=9 does not divide into 2 rounds of one size for stages=4"),
        ("interleaved:stages=4,chunks=0", "chunks=0 leaves a worker no stage"),
        ("zero-bubble:schedule=h3", "h3"),
    ],
)
def test_bad_parameters_are_refused(text, message):
    with pytest.raises(StrategyError, match=message):
        make(text, "partition")
