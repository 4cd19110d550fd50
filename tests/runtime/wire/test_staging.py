"""Tensors as bytes, and memory within a budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import raising

from dure.core.node import TensorSpec
from dure.runtime.wire.memory import Lease, Share, Staging, announced, bytes_of, described, nbytes_of, spec_of


def spec(nbytes):
    return [TensorSpec("uint8", nbytes)]


def test_bytes_are_the_tensors_own():
    tensor = torch.tensor([1.0, 2.0])
    view = bytes_of(tensor)
    view[:] = bytes(bytes_of(torch.tensor([3.0, 4.0])))
    assert tensor.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4).t(), torch.zeros(4, dtype=torch.complex64).conj(), torch.empty(1, device="meta")]
)
def test_tensors_that_cannot_travel_as_they_lie_are_refused(tensor):
    with raising(ValueError, "tensor.c"):
        bytes_of(tensor)


def test_leased_tensors_have_the_specs_they_were_asked_for_and_do_not_overlap():
    specs = [TensorSpec("uint8", 3), TensorSpec("float64", 5), TensorSpec("bfloat16", 0), TensorSpec("complex64", 7)]
    lease = Staging(1 << 20).take(specs)
    assert [spec_of(tensor) for tensor in lease.tensors] == specs
    for number, tensor in enumerate(lease.tensors):
        tensor.fill_(number)
    assert [tensor.abs().sum().item() for tensor in lease.tensors] == [0, 5, 0, 21]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60_000)), max_size=60))
def test_memory_stays_within_the_budget(steps):
    staging, leases = Staging(100_000), []
    for take, size in steps:
        if take:
            before = staging.held_nbytes
            lease = staging.take(spec(size))
            if lease is None:
                assert before
                assert before + size + 4096 > staging.budget_nbytes
            else:
                leases.append(lease)
        elif leases:
            leases.pop(size % len(leases)).release()
        assert staging.peak_nbytes <= staging.budget_nbytes
    for lease in leases:
        lease.release()
        lease.release()
    assert staging.held_nbytes == 0


def test_memory_is_used_again():
    staging = Staging(1 << 20)
    first = staging.take(spec(10_000))
    address = first.tensors[0].data_ptr()
    first.release()
    assert staging.take(spec(10_001)).tensors[0].data_ptr() == address


def test_what_exceeds_the_whole_budget_goes_alone():
    staging = Staging(1000)
    large = staging.take(spec(5000))
    assert large is not None
    assert staging.take(spec(1)) is None
    large.release()
    assert staging.take(spec(1)) is not None


def test_words_for_specs():
    assert described([TensorSpec("float32", 2), TensorSpec("int8", 0)]) == "float32[2], int8[0]"
    assert announced([["float32", 2]]) == "float32[2]"
    for nonsense in (None, 3, [3], [["x", "y"]], [["x", float("inf")]]):
        assert announced(nonsense) == "nothing readable"
    with raising(TypeError, "torch"):
        nbytes_of(TensorSpec("float33", 1))
    assert [tensor.numel() for tensor in Lease.of_nothing([TensorSpec("int64", 0)]).tensors] == [0]


def test_one_caller_holds_its_share_or_one_payload():
    staging, mine, other = Staging(8 << 20), Share(), Share()
    first = staging.take(spec(3 << 18), share=mine)
    assert staging.take(spec(3 << 18), share=mine) is None
    assert staging.take(spec(3 << 18), share=other) is not None
    first.release()
    assert mine.held_nbytes == 0
    large = staging.take(spec(5 << 20), share=mine)
    assert large is not None, "a payload above the share travels alone"
    large.forget()
    assert mine.held_nbytes == 0
