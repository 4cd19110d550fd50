"""Models that are no chain of dense layers, and the check of a way of stacking, tried on planted faults."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.models.mlp import mlp
from dure.job.stacked_gradients import Dense, find_fault


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.Softmax(1)), (7, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.PReLU()), (7, 12)),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(84, 3)), (7, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 3)), (7, 2, 12)),
        (lambda: nn.Sequential(nn.Linear(12, 4), nn.Linear(5, 3)), (7, 12)),
        (lambda: nn.Linear(12, 3), (7, 12)),
    ],
)
def test_what_is_no_dense_chain(model, inputs):
    exact = GradientEngine(SimpleNamespace(model=model, loss=cross_entropy), exact=True)
    work = GradientWork(0, 0, exact.initial_values(0), torch.zeros(inputs), torch.zeros(7, dtype=torch.long), 0, 1.0)
    assert Dense.of(exact.replica, cross_entropy, work, 1) is None


class Wrapped:
    """A right way of stacking with a fault added: `spoil(values, losses, works)`."""

    describe, least, fewest = "wrapped", 1, 1

    def __init__(self, inner, spoil):
        self.inner, self.spoil = inner, spoil

    def evaluate(self, works):
        return self.spoil(*self.inner.evaluate(works), works)


def fault_of(spoil):
    exact = GradientEngine(SimpleNamespace(model=lambda: mlp(12, 8, 3), loss=cross_entropy), exact=True)
    generator = torch.Generator().manual_seed(0)
    work = GradientWork(
        rank=0,
        step=0,
        values=exact.initial_values(0),
        inputs=torch.randn(7, 12, generator=generator),
        targets=torch.randint(3, (7,), generator=generator),
        seed=0,
        flops=1.0,
    )
    dense = Dense.of(exact.replica, cross_entropy, work, 1)
    return find_fault(Wrapped(dense, spoil), work, 40, lambda each: exact.evaluate([each])[0])


def one_bit_by_size(values, losses, works):
    values = values.clone()
    values.view(torch.int32)[0, 0] ^= len(works) % 2
    return values, losses


def one_bit_of_the_last(values, losses, works):
    values = values.clone()
    values.view(torch.int32)[-1, 3] ^= 1
    return values, losses


def loss_by_place(values, losses, works):
    return values, losses.double() + 1e-15 * torch.arange(len(losses))


def wrong_everywhere(values, losses, works):
    values = values.clone()
    values[:, 5:8] *= -1
    return values, losses


def refuses(values, losses, works):
    raise RuntimeError("not this model\nwith a second line")


def loops(values, losses, works):
    warnings.warn("performance drop", stacklevel=1)
    return values, losses


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (one_bit_by_size, "bits depend on the other gradients"),
        (one_bit_of_the_last, "bits depend on the other gradients"),
        (loss_by_place, "bits depend on the other gradients"),
        (wrong_everywhere, "differs from the one computed alone"),
        (refuses, "not this model"),
        (loops, "performance drop"),
    ],
)
def test_a_fault_is_found(spoil, fault):
    found = fault_of(spoil)
    assert found is not None
    assert found.startswith(fault) or fault in found
    assert "\n" not in found


def test_a_right_way_has_none():
    assert fault_of(lambda values, losses, works: (values, losses)) is None


def raised(values, losses, works):
    raise ValueError("no stacks\nhere")


def test_an_exception_of_any_kind_is_a_fault():
    """The code of a user, which computes one gradient at a time, may raise anything where it gets a stack."""
    assert fault_of(raised) == "no stacks"
