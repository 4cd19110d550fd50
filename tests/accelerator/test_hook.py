"""`dure.hook` on a device equals `dure.hook` on the CPU, and the planted faults are caught (`hook_programs.py`)."""

import re
from pathlib import Path

import pytest
from accelerator import target
from accelerator.hook_programs import CODECS, FAULTS, MORE_CODECS
from support.purposes import soaked

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]

CORRECT = [
    "each_kind_of_codec",
    "narrow_buckets",
    "a_group_for_the_device_alone",
    "messages_of_ranks_that_share_a_device",
    "a_stream_of_the_users_own",
    "a_model_dropped_after_a_failed_backward",
    "autocast_and_a_scaler",
    "states_between_the_cpu_and_the_device",
    "the_host_waits_for_the_codec_alone",
]
CAUGHT = {
    fault: ("a_stream_of_the_users_own", r"raised: (.|\n)* and no event orders the two")
    for fault in FAULTS
    if fault != "buckets_are_not_recorded"
}
CAUGHT["buckets_are_not_recorded"] = (
    "a_model_dropped_after_a_failed_backward",
    r"raised: .* was freed while .* Call tensor.record_stream",
)
PLANTED = {f"{program} with {fault}": evidence for fault, (program, evidence) in CAUGHT.items()}


def ran(*names):
    """The outcome of each program."""
    return dict(target.results("hook_programs", *names, ranks=2))


@pytest.fixture(scope="module")
def outcomes():
    return ran(*CORRECT, *(PLANTED if target.device_type() == "standin" else []))


@pytest.fixture(scope="module")
def outcomes_by_codec():
    return ran(*CODECS, *MORE_CODECS)


@pytest.mark.parametrize("name", CORRECT)
def test_a_training_on_the_device_equals_that_on_the_cpu(outcomes, name):
    assert outcomes[name] == "right"


@pytest.mark.skipif(target.device_type() != "standin", reason="only the stand-in catches faults of synchronization")
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_synchronization_is_caught(outcomes, name):
    assert re.match(PLANTED[name], outcomes[name])


@pytest.mark.parametrize("codec", soaked(*CODECS, *MORE_CODECS))
def test_every_codec_on_the_device_equals_that_on_the_cpu(outcomes_by_codec, codec):
    assert outcomes_by_codec[codec] == "right"
