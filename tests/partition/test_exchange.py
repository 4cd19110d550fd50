"""Exchanges between the stages of a pipeline at an update, against the unpartitioned model."""

from __future__ import annotations

import pytest
import torch
from support.purposes import soaked
from support.runs import local, virtual
from support.stage_jobs import job_text
from support.wording import raising

from dure.errors import StrategyError
from dure.partition.layout import StageLayout
from dure.runtime.launch.fork_server import ForkServer

OPTIONS = {"steps": 5, "seed": 3, "dtype": "float64", "optimizer": "momentum:lr=0.1"}

TIED = "stages=3,cuts=2/3"  # the weight is in all stages, the bias in the last two
FLUSHES = [
    f"gpipe:{TIED},micro=3",
    f"1f1b:{TIED},micro=2",
    "interleaved:stages=2,chunks=2,micro=4,cuts=2/3/4",  # worker 1 has two chunks with the weight and the bias
    "gpipe:stages=2,cuts=5,micro=2",
    "1f1b:stages=5,micro=4",
    f"zero-bubble:{TIED},micro=3",
]


def trained(job, partition="", replicas=1, topology="collective", **options):
    stages = int(partition.partition("stages=")[2].partition(",")[0]) if partition else 1
    return virtual(job, f"bsp {topology} {partition}", workers=replicas * stages, **{**OPTIONS, **options})


def watch_copies(monkeypatch):
    """The values of tied parameters at each worker of a pipeline, whenever a whole model is put together."""
    joined, seen = StageLayout.joined, []

    def watched(self, parts):
        seen.append(
            [
                [part[each.start : each.stop] for each in held if each.tied]
                for part, held in zip(parts, self.held, strict=True)
            ]
        )
        return joined(self, parts)

    monkeypatch.setattr(StageLayout, "joined", watched)
    return seen


@pytest.mark.parametrize("replicas", [1, *soaked(2)])
@pytest.mark.parametrize("partition", [*FLUSHES[:3], *soaked(*FLUSHES[3:])])
def test_tied_parameters_are_trained_as_in_the_whole_model(partition, replicas):
    """With cuts=5 all blocks that share are in one stage, so nothing is exchanged."""
    job = job_text("tied")
    whole, cut = trained(job, replicas=replicas), trained(job, partition, replicas)
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=1e-12)
    assert cut.rows[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-12)


def test_copies_of_tied_parameters_have_the_same_bits(monkeypatch):
    """Three replicas, whose mean the ring sums in an order that depends on the place of an element."""
    seen = watch_copies(monkeypatch)
    trained(job_text("tied"), f"gpipe:{TIED},micro=3", 3, "collective:algorithm=ring")
    for first, second, third in seen:
        (weight,), (same, bias), (too, one) = first, second, third
        assert torch.equal(weight, same)
        assert torch.equal(weight, too)
        assert torch.equal(bias, one)
    assert len(seen) > 1


def test_the_bytes_of_tied_parameters():
    """Each worker sends the gradients of its tied parameters to each worker that has a copy, once per update."""
    for timing_only in (False, True):
        runs = [
            trained(job_text("tied"), f"gpipe:{TIED},micro={micro}", timing_only=timing_only).summary
            for micro in (1, 2)
        ]
        borders = {0: 12, 1: 2 * 12, 2: 12}  # elements per sample that a stage sends
        ties = {0: 2 * 144, 1: 2 * 144 + 12, 2: 2 * 144 + 12}
        for rank, summary in ((rank, summary) for rank in borders for summary in runs):
            sent = summary["per_worker"][f"worker {rank}"]["bytes_sent"]
            assert sent == 8 * 5 * (10 * borders[rank] + ties[rank]), (rank, timing_only)


@pytest.mark.long
def test_exchanges_on_processes():
    """The same bits and the same payload as in virtual time, of tied parameters and of norms."""
    strategy, options = (
        f"bsp collective 1f1b:{TIED},micro=3",
        OPTIONS | {"optimizer": "momentum:clip=0.45", "workers": 3},
    )
    with ForkServer() as fork_server:
        here = local(job_text("tied"), strategy, fork_server=fork_server, **options)
    there = virtual(job_text("tied"), strategy, **options)
    assert torch.equal(here.params, there.params)
    for worker, counts in there.summary["per_worker"].items():
        assert here.summary["per_worker"][worker]["bytes_sent"] == counts["bytes_sent"]


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (
            "averaging:period=2 collective int8",
            "1",
        ),
        ("bsp ps int8", "1"),
        ("downpour ps", "1"),
        ("ad-psgd gossip", "1"),
    ],
)
def test_what_makes_copies_different_is_refused(strategy, problem):
    with raising(StrategyError, problem):
        virtual(job_text("tied"), f"{strategy} gpipe:{TIED},micro=2", workers=6, **OPTIONS)


SAFE = ["bsp collective int8", *soaked("bsp ps", "averaging:period=2", "easgd collective")]


@pytest.mark.parametrize("strategy", SAFE)
def test_what_keeps_copies_equal_is_not_refused(strategy):
    """Equal up to rounding. A mean of encoded gradients is summed over the copies after it."""
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_copies(patch)
        virtual(job_text("tied"), f"{strategy} gpipe:{TIED},micro=2", workers=6, **OPTIONS)
    for (weight,), (same, bias), (too, one) in seen:
        torch.testing.assert_close(torch.stack([weight, weight]), torch.stack([same, too]), rtol=0, atol=1e-12)
        torch.testing.assert_close(bias, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["pipedream", "petrowski", "ddg", "features-replay", "dni"])
def test_methods_without_a_flush_refuse_tied_stages(method):
    with raising(StrategyError, "1.1.weight"):
        trained(job_text("tied"), f"{method}:{TIED}")
