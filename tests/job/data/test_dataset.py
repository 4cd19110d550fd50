"""Batches of a tensor, a mapping or a tuple; samples in memory, and map-style data sets."""

import random

import numpy as np
import pytest
import torch
from support.input_jobs import Reviews, padded
from support.wording import raising
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dure.errors import UsageError
from dure.job.data.dataset import Data, Samples, called, checked, joined, mapped, tensors
from dure.job.data.loaders import load_digits
from dure.job.data.split import Dirichlet, Replicated

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


PAIRS = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


@pytest.mark.parametrize("dataset", [PAIRS, Subset(PAIRS, range(6)), [PAIRS[index] for index in range(6)]])
def test_a_batch_is_that_of_a_data_loader(dataset):
    inputs, targets = Samples(dataset).batch(torch.tensor([5, 0, 5]))
    (expected,) = DataLoader(Subset(PAIRS, [5, 0, 5]), batch_size=3)
    assert torch.equal(inputs, expected[0])
    assert torch.equal(targets, expected[1])
    assert (len(Samples(dataset)), Samples(dataset).steps(1.0, 4)) == (6, 2)


def test_a_collate_pads_and_labels_are_read_for_a_split():
    data = Samples(Reviews(), padded)
    inputs, targets = data.batch(torch.arange(5))
    assert {key: value.shape for key, value in inputs.items()} == {"ids": (5, 7), "mask": (5, 7)}
    assert targets.tolist() == Reviews().targets[:5]
    by_label = data.samplers(Dirichlet(0.1), [4, 4], seed=0)
    again = Dirichlet(0.1).samplers(torch.tensor(Reviews().targets), [4, 4], seed=0)
    assert [each.next().tolist() for each in by_label] == [each.next().tolist() for each in again]


class Noisy(Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())]), index


def test_transforms_draw_by_the_numbers_of_the_batch_and_leave_the_generators_as_they_were():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data, indices = Samples(Noisy()), torch.tensor([1, 1])
    one, again, other = (data.batch(indices, draw)[0] for draw in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    assert torch.equal(one, again)
    assert (one != other).all()
    assert (one[0] != one[1]).all()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_floating_point_values_are_cast():
    inputs, targets = Samples(PAIRS).to(torch.float64).batch(torch.tensor([0]))
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


class Unmeasured:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (
            Endless(),
            "__len__",
        ),
        (Unmeasured(), "__len__"),
        (DataLoader(PAIRS), "dure.Samples("),
        ([], "sample"),
    ],
)
def test_what_is_no_map_style_data_set_is_refused(dataset, said):
    with raising(UsageError, said):
        Samples(dataset)


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda samples: {"ids": torch.zeros(2), "labels": torch.zeros(2)}, "mapping"),
        (lambda samples: torch.zeros(2), "targets"),
        (lambda samples: (1, 2, 3), "gave 3"),
        (lambda samples: (["words"], torch.zeros(2)), "0"),
        (lambda samples: (torch.zeros(7, 2), torch.zeros(2)), "for 2"),
        (lambda samples: (torch.zeros(2), torch.tensor(0.0)), "for 2"),
    ],
)
def test_a_collate_that_makes_no_batch_is_refused(collate, said):
    with raising(UsageError, said):
        Samples(PAIRS, collate).batch(torch.tensor([0, 1]))
    with raising(UsageError, "function"):
        Samples(PAIRS, collate="pad")


def test_every_tensor_of_the_inputs_has_one_row_per_sample():
    def collate(samples):
        return {"ids": torch.zeros(len(samples), 2), "mask": torch.zeros(len(samples) + 1, 2)}, torch.zeros(
            len(samples)
        )

    with raising(UsageError, "for 3"):
        Samples(PAIRS, collate).batch(torch.arange(3))


def test_samples_of_different_lengths_need_a_collate():
    words = [(torch.zeros(length), 0) for length in (2, 3)]
    with raising(UsageError, "default_collate"):
        Samples(words).batch(torch.arange(2))


@pytest.mark.parametrize("targets", [["cat", "dog"] * 3, [{"boxes": 1}] * 6, None, [1, 2]])
def test_targets_that_are_no_labels_are_left_alone(targets):
    class Named(TensorDataset):
        pass

    data = Named(*PAIRS.tensors)
    data.targets = targets
    sampler = Samples(data).samplers(Replicated(), [2], seed=0)[0]
    assert set(sampler.next().tolist()) <= set(range(6))
