"""The stand-in accelerator lets correct programs pass and catches planted faults; `programs.py` holds both."""

import json
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from accelerator import target
from accelerator.programs import PROGRAMS

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.xdist_group("accelerator"),
    pytest.mark.timeout(600),  # the first test compiles
]

UNORDERED = r"raised: .* and no event orders the two"
DROPPED = r"raised: .* was freed while .* Call tensor.record_stream"
NOT_YET = r"wrong: \[nan, nan,"

CAUGHT = {
    "host_reads_device_memory": r"killed by signal 11: standin: the host touched device memory",
    "fresh_memory": NOT_YET,
    "memory_after_a_free": NOT_YET,
    "tensors_of_two_devices": r"raised: Expected all tensors to be on the same device",
    "copy_out": NOT_YET,
    "copy_out_by_to": NOT_YET,
    "copy_out_with_an_event": NOT_YET,
    "copy_out_and_a_polled_event": NOT_YET,
    "copy_out_on_a_side_stream": NOT_YET,
    "copy_out_into_a_slot_in_use": r"wrong: \[-1.0, -2.0",
    "copy_in": r"wrong: \[0.0, 0.0",
    "copy_in_that_the_device_needed": r"raised: .* was overwritten before its copy to the device had ended",
    "side_stream_reads": UNORDERED,
    "main_stream_reads_back": UNORDERED,
    "main_stream_overwrites_what_the_side_reads": UNORDERED,
    "event_of_the_right_moment": UNORDERED,
    "slices_on_two_streams": UNORDERED,
    "columns_on_two_streams": UNORDERED,
    "three_streams_in_a_chain": UNORDERED,
    "host_waits_between_two_streams": UNORDERED,
    "copy_in_on_a_side_stream": UNORDERED,
    "tensor_dropped_while_a_side_stream_reads_it": DROPPED,
    "tensor_dropped_before_its_stream_waits": DROPPED,
    "late_copy_into_a_dropped_tensor": DROPPED,
    "backward_on_a_side_stream": UNORDERED,
    "thread_with_a_stream_of_its_own": UNORDERED,
    "running_statistics_on_a_side_stream": UNORDERED,
    "sparse_values_on_a_side_stream": UNORDERED,
    "parameters_in_one_flat_buffer": r"wrong: \[1.0, 2.0",
    "random_state_restored": r"wrong: ",
    "dropout_follows_the_device": r"wrong: ",
    "generator_of_the_device": r"raised: Expected a 'standin' device type for generator but found 'cpu'",
    "one_seed_on_two_devices": r"wrong: 0.0, not 1.0",
    "fork_before_the_first_use": r"raised: standin: the device was used before this process was forked",
    "step_without_synchronization": r"wrong: 1, not 0",
    "pinned_memory_is_counted": r"wrong: ",
    "all_reduce_and_wait": UNORDERED,
    "all_reduce_and_wait_on_another_stream": UNORDERED,
    "input_of_a_collective_changed": UNORDERED,
    "received_before_the_wait": UNORDERED,
    "group_of_the_device_alone": r"raised: No backend type associated with device type cpu",
    "ddp_hook_on_a_side_stream": UNORDERED,
}


@pytest.fixture(scope="module")
def outcomes():
    """What became of each program: one outcome, and a second one where there is a faulty form."""
    if reason := target.absent():
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "accelerator.programs"], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return {name: rest for name, *rest in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_correct_program_passes(outcomes, name):
    if name not in outcomes:
        pytest.skip("the program reads the counters of the stand-in")
    if outcomes[name][0].startswith("skipped: "):
        pytest.skip(outcomes[name][0])
    assert outcomes[name][0] == "right"


@pytest.mark.skipif(target.device_type() != "standin", reason="only the stand-in catches each fault")
@pytest.mark.parametrize("name", CAUGHT)
def test_the_fault_is_caught(outcomes, name):
    [caught] = outcomes[name][1:]
    assert re.match(CAUGHT[name], caught)


def test_every_fault_has_its_evidence():
    assert set(CAUGHT) == {name for name, program in PROGRAMS.items() if signature(program).parameters}


def test_the_process_of_the_tests_has_no_stand_in():
    """It would change the results of other tests, which find an accelerator then."""
    assert "torch.standin" not in sys.modules
