"""Inputs and targets side by side."""

import pytest
import torch
from support.wording import raising

from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.data.digits import load_digits
from dure.job.data.split import Dirichlet, Replicated


def test_a_batch_is_a_copy_of_the_rows_asked_for() -> None:
    data = Data(torch.arange(12.0).view(4, 3), torch.arange(4))
    inputs, targets = data.batch(torch.tensor([3, 1, 3]))
    assert inputs.tolist() == [[9, 10, 11], [3, 4, 5], [9, 10, 11]]
    assert targets.tolist() == [3, 1, 3]
    inputs.zero_()
    assert data.inputs.sum() == 66


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (torch.zeros(3, 2), torch.zeros(2), "and 2"),
        (torch.zeros(0, 2), torch.zeros(0), "sample"),
        (torch.tensor(1.0), torch.zeros(1), "dimension"),
        ({"ids": torch.zeros(3), "mask": torch.zeros(2)}, torch.zeros(3), "3"),
        (torch.zeros(3), (torch.zeros(3), torch.zeros(1)), "0"),
        ((torch.zeros(3), torch.zeros(3)), torch.zeros(4), "and 4"),
        ([1, 2], torch.zeros(2), "0"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: torch.Tensor, targets: torch.Tensor, said: str) -> None:
    with raising(UsageError, said):
        Data(inputs, targets)


def test_a_mapping_and_a_tuple_have_batches_of_their_own_form() -> None:
    data = Data({"ids": torch.arange(6).view(3, 2), "mask": torch.ones(3)}, (torch.arange(3), torch.arange(3) / 2))
    assert len(data) == 3
    inputs, targets = data.batch(torch.tensor([2, 0]))
    assert isinstance(inputs, dict)
    assert isinstance(targets, tuple)
    assert inputs["ids"].tolist() == [[4, 5], [0, 1]]
    assert [each.tolist() for each in targets] == [[2, 0], [1.0, 0.0]]
    cast = data.to(torch.float64)
    assert [each.dtype for each in cast.targets] == [torch.int64, torch.float64]
    assert data.steps(2.0, 4) == 2


def test_data_without_a_tensor_of_labels_are_not_split_by_label() -> None:
    data = Data(torch.zeros(4, 1), {"label": torch.arange(4)})
    with raising(UsageError, "labels"):
        data.samplers(Dirichlet(1.0), [2, 2], seed=0)
    assert len(data.samplers(Replicated(), [2, 2], seed=0)) == 2


def test_digits_are_standardised_and_split_once_for_all() -> None:
    loaded = load_digits()
    assert loaded.train.inputs.shape == (1437, 64)
    assert loaded.test.inputs.shape == (360, 64)
    assert loaded.train.inputs.dtype == torch.float32
    assert torch.equal(loaded.train.inputs, load_digits().train.inputs)
    deviation = loaded.train.inputs.std(dim=0, unbiased=False)
    assert torch.allclose(deviation[deviation > 0], torch.ones(1), atol=1e-4)
    assert loaded.train.inputs.mean(dim=0).abs().max() < 1e-5
    assert loaded.test.targets.bincount().min() > 20
    rows = {tuple(row.tolist()) for row in loaded.train.inputs}
    assert not rows & {tuple(row.tolist()) for row in loaded.test.inputs}
