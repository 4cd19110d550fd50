"""The transfers of a device replica: correct programs pass, and each planted fault of synchronization is caught."""

import re
from pathlib import Path

import pytest
from accelerator import target
from accelerator.transfer_programs import PROGRAMS

HERE = Path(__file__).parent
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]  # the first test compiles

UNORDERED = r"raised: standin: .* and no event orders the two"

CAUGHT = {
    "event_left_out": UNORDERED,
    "event_not_asked_for": r"wrong: \[nan",
    "wait_on_another_stream": UNORDERED,
    "memory_still_in_use": UNORDERED,
    "record_stream_left_out": r"raised: standin: .* was freed while .* Call tensor.record_stream",
    "returned_early": r"wrong: |raised: standin: .* was overwritten",
    "returned_when_received": r"wrong: |raised: standin: .* was overwritten",
    "beside_without_an_event": UNORDERED,
}


@pytest.fixture(scope="module")
def outcomes():
    """Outcomes of each program, by fault."""
    return dict(target.results("transfer_programs"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_transfers_carry_messages(outcomes, name):
    assert outcomes[name][""] == "right"


FAULTS = [(name, fault) for name, (_, faults) in PROGRAMS.items() for fault in faults[1:]]


@pytest.mark.skipif(target.device_type() != "standin", reason="only the stand-in catches each fault")
@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_fault_is_caught(outcomes, name, fault):
    assert re.match(CAUGHT[fault], outcomes[name][fault])
