"""`dure.attach` over collectives: two ranks on a device give what two on the CPU give (`collective_programs.py`)."""

import re
from pathlib import Path

import pytest
from accelerator import target
from accelerator.collective_programs import CODECS, SCALED
from support.purposes import soaked

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]

ENGINE = ["bsp", "one-shot", "averaging:period=2", "bmuf:period=2,fragments=2", "diloco:period=2,overlap=1"]
ENGINE += ["eamsgd:period=2 collective"]
ALGORITHMS = ["ring", "tree", "halving-doubling", "hierarchical,per_host=2"]
SENT = [f"bsp collective:algorithm={each}" for each in ALGORITHMS]
MORE = [
    "bmuf:period=2",
    "diloco:period=2",
    "easgd:period=2 collective",
    "bsp collective:algorithm=hierarchical,per_host=1",
]
MORE += [f"{sync} collective:algorithm={each}" for sync in ENGINE[1:5] for each in ALGORITHMS]


def ran(*names):
    """The values of both ranks, by name. They may share a device."""
    return {name: ranks for name, *ranks in target.results("collective_programs", *names)}


@pytest.fixture(scope="module")
def trained():
    return ran(*ENGINE, *SENT)


@pytest.fixture(scope="module")
def trained_long():
    return ran(*MORE)


def check_equal(ranks, within=0.0):
    within = max(within, target.ROUNDING)
    for rank in ranks:
        assert not isinstance(rank, str), rank
        assert rank["difference"] <= within
        assert rank["moved"] > 1e-3
        assert rank["bytes"][0] == rank["bytes"][1] > 0


@pytest.mark.parametrize("strategy", [*ENGINE, *SENT])
def test_two_ranks_on_a_device_equal_two_on_the_cpu(trained, strategy):
    check_equal(trained[strategy])


@pytest.mark.parametrize("strategy", soaked(*MORE))
def test_the_other_methods_on_a_device_equal_those_on_the_cpu(trained_long, strategy):
    check_equal(trained_long[strategy])


@pytest.mark.parametrize("strategy", [*ENGINE, *SENT])
def test_the_host_waits_for_the_device_at_most_twice_in_a_step(trained, strategy):
    """Once to look for NaN in the gradient, and once where buffers are merged; twice more in the first step.

    There it looks whether the gradient has values, in the backward and before the step.
    """
    target.skip_without_counts()
    for rank in trained[strategy]:
        merges = [0] * 6 if strategy.startswith(("bsp", "one-shot", "eamsgd")) else [0, 1] * 3
        assert rank["waits"] == [3 + merges[0], *(1 + each for each in merges[1:])]


@pytest.fixture(scope="module")
def codecs():
    return ran("codecs")["codecs"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_over_a_group_on_a_device_gives_what_it_gives_on_the_cpu(codecs, codec):
    check_equal([rank if isinstance(rank, str) else rank[codec] for rank in codecs])


@pytest.fixture(scope="module")
def cases():
    return ran(*STREAMS, *FAULTS, *LOST, "gradient_scalers")


STREAMS = ["on_a_stream_of_the_user", "branches_on_two_streams"]


@pytest.mark.parametrize("case", STREAMS)
def test_training_on_streams_of_the_user_equals_training_on_the_cpu(cases, case):
    for rank in cases[case]:
        check_equal([rank] if isinstance(rank, str) else rank)


@pytest.mark.parametrize("text", [*SCALED, "autocast"])
def test_an_overflow_at_one_rank_skips_the_step_of_all_and_lowers_all_scales(cases, text):
    """Operators that autocast runs in 16 bits are not the same ones on the CPU and on a device."""
    told = [rank if isinstance(rank, str) else rank[text] for rank in cases["gradient_scalers"]]
    check_equal(told, within=1e-3 if text == "autocast" else 0.0)
    for rank in told:
        assert rank["scales"] == [[1024, 2048, 2048, 1024, 1024, 2048]] * 2  # grows after two good steps
        assert rank["unmoved"] == [[False, False, False, True, False, False]] * 2  # momentum and decay included
        assert rank["clocks"] == [[1, 2, 3, 4, 5, 6]] * 2


LOST = {"killed_rank": 3.0, "frozen_rank": 8.0}
"""Seconds until the other rank knows; a rank is frozen after three."""


@pytest.mark.parametrize("case", LOST)
def test_a_lost_rank_ends_the_wait_of_the_others(cases, case):
    first, second = cases[case]
    assert not isinstance(first, str), first
    assert re.search(r"rank 1|worker 1|a rank is gone", first[0])
    assert first[1] < LOST[case]
    assert second.startswith("no answer")


UNORDERED = r"no event orders the two"
FAULTS = {
    "fault_slice_does_not_wait_for_its_streams": UNORDERED,
    "fault_results_are_not_waited_for": UNORDERED,
    "fault_slice_is_sent_on_a_stream_that_does_not_wait": UNORDERED,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_synchronization_is_caught(cases, fault):
    if target.device_type() != "standin":
        pytest.skip("only the stand-in checks the order of streams")
    for rank in cases[fault]:
        assert isinstance(rank, str)
        assert re.search(FAULTS[fault], rank)
