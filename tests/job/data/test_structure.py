"""Batches of a tensor, a mapping or a tuple."""

import pytest
import torch
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.data.structure import called, checked, joined, mapped, tensors

X, Y = torch.arange(4.0), torch.ones(4)


@pytest.mark.parametrize("batch", [X, (X, Y), {"b": X, "a": Y}])
def test_a_structure_survives(batch):
    assert [each.tolist() for each in tensors(mapped(lambda each: each + 1, batch))] == [
        (each + 1).tolist() for each in tensors(batch)
    ]
    stacked = joined(torch.stack, [batch, mapped(torch.neg, batch)])
    assert type(stacked) is type(batch)
    pairs = zip(tensors(stacked), tensors(batch), strict=True)
    assert all(torch.equal(two, torch.stack([one, -one])) for two, one in pairs)
    assert type(checked(batch, "it")) is type(batch)


def test_a_list_is_a_tuple():
    assert checked([X, Y], "it") == (X, Y)


def test_a_mapping_gives_arguments_by_name_and_a_tuple_by_place():
    class Difference(nn.Module):
        def forward(self, left, right):
            return left - right

    for inputs in ((X, Y), {"right": Y, "left": X}):
        assert torch.equal(called(Difference(), inputs), X - Y)
    assert torch.equal(called(nn.Identity(), X), X)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "tensors"),
        ((X, [1]), "torch.as_tensor"),
        (X.numpy(), "torch.as_tensor"),
        ({"ids": 2}, "ids"),
        ({0: X}, "key 0"),
        ({}, "empty"),
    ],
)
def test_anything_else_is_refused(value, said):
    with raising(UsageError, said):
        checked(value, "it")
